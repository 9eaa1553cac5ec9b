"""Potential energies, minus the logarithm of a density: what the samplers walk on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from ...layers import device_of
from ..checks import check_outputs, check_positive
from ..dataset import SyntheticCoreset, as_float
from ..fitting import as_taken_by, logits_of
from ..flat import FlatNetwork

Potential = Callable[[Tensor], Tensor]
"""Parameters `(d,)` to a scalar, differentiably."""

Augment = Callable[[Tensor, Generator], Tensor]
"""Images `(n, c, h, w)` to changed images, the change drawn from the generator."""


@dataclass(frozen=True)
class Step:
    """One step of a sampler, for whoever wants to watch."""

    number: int
    potential: float
    """At the point where the chain stands after the step."""
    accepted: bool
    acceptance: float
    """The probability with which the proposal was accepted; 1 for samplers without a Metropolis test."""
    step_size: float


Report = Callable[[Step], None]


def value_and_gradient(potential: Potential, theta: Tensor) -> tuple[float, Tensor]:
    """The potential energy at `theta` and its gradient."""
    with torch.enable_grad():
        theta = theta.detach().requires_grad_()
        value = potential(theta)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ValueError(f"potential must give one number, got {tuple(getattr(value, 'shape', ())) or value!r}")
        (gradient,) = torch.autograd.grad(value.sum(), theta)
    return float(value.detach()), gradient


def longest_stable_step(potential: Potential, theta: Tensor, *, iterations: int = 10) -> float:
    r"""$2 / \sqrt{\lambda}$ with the largest curvature $\lambda$ at `theta`: longer leapfrog steps run away.

    Power iteration on differences of gradients, two of them an iteration. Steps of half this length leave room for
    places where the potential is steeper.
    """
    generator = torch.Generator(theta.device).manual_seed(0)
    direction = torch.randn(theta.shape, generator=generator, dtype=theta.dtype, device=theta.device)
    far, curvature = 1e-3 * max(1.0, float(theta.norm())), 0.0
    for _ in range(iterations):
        shift = direction * (far / direction.norm())
        ends = [value_and_gradient(potential, theta + sign * shift)[1] for sign in (1, -1)]
        direction = (ends[0] - ends[1]) / (2 * far)
        curvature = float(direction.norm())
        if not 0 < curvature < math.inf:
            return math.inf
    return 2 / math.sqrt(curvature)


def check_chain(theta0: Tensor, steps: int, burn_in: int, thin: int, positive: dict[str, float]) -> None:
    """Raises for arguments that no sampler can work with."""
    if theta0.ndim != 1 or not theta0.is_floating_point():
        raise ValueError(f"theta0 must be one vector of floats (d,), got {theta0.dtype} {tuple(theta0.shape)}")
    for name, count in {"steps": steps, "burn_in": burn_in, "thin": thin}.items():
        if isinstance(count, bool) or not isinstance(count, int):
            raise ValueError(f"{name} must be a whole number, got {count!r}")
    if not 0 <= burn_in < steps:
        raise ValueError(f"burn_in must be at least 0 and less than steps={steps}, got {burn_in}")
    if not 1 <= thin <= steps - burn_in:
        raise ValueError(f"thin must be between 1 and steps - burn_in = {steps - burn_in}, got {thin}")
    for name, value in positive.items():
        check_positive(name, value, whole=name == "leapfrog")


def network_potential(
    coreset: SyntheticCoreset,
    network: FlatNetwork,
    *,
    weight_decay: float,
    augment: Augment | None = None,
    seed: int = 0,
) -> Potential:
    r"""$U(\theta) = \sum_i \ell(f_\theta(x_i), y_i) + \lambda \|\theta\|^2$ over the coreset's examples.

    $\ell$ is the cross-entropy, or $\frac12\|y - f\|^2$ (unit Gaussian noise) for regression targets; the
    prior is $N(0, 1/(2\lambda))$ with $\lambda$ = `weight_decay`. With `augment` each call changes the inputs at random
    (drawn from `seed`): the stochastic potential of A-SGHMC (Kim et al. 2022).
    """
    inputs, targets = tensors_of(coreset, network.network)
    generator = torch.Generator().manual_seed(seed)

    def potential(theta: Tensor) -> Tensor:
        seen = inputs if augment is None else augment(inputs, generator)
        return misfit(coreset, logits_of(network(theta, seen)), targets) + weight_decay * theta.square().sum()

    return potential


def misfit(coreset: SyntheticCoreset, outputs: Tensor, targets: Tensor) -> Tensor:
    r"""Minus the log-likelihood, summed over examples: cross-entropy, or $\frac12\|y - f\|^2$ for regression targets."""
    if coreset.target_kind == "regression":
        check_outputs("regression", outputs, targets)
        return functional.mse_loss(outputs, targets.to(outputs.dtype), reduction="sum") / 2
    return coreset.loss(outputs, targets, reduction="sum")


def tensors_of(coreset: SyntheticCoreset, network: nn.Module) -> tuple[Tensor, Tensor]:
    """All inputs, in the precision of the network, and all targets."""
    return as_taken_by(network, as_float(coreset.inputs)), coreset.targets.to(device_of(network))
