"""Stochastic gradient Hamiltonian Monte Carlo: one gradient a step, and no test."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .potential import Potential, Report, Step, check_chain, value_and_gradient


def sghmc(
    potential: Potential,
    theta0: Tensor,
    *,
    steps: int = 1000,
    step_size: float = 0.01,
    friction: float = 0.1,
    burn_in: int = 100,
    thin: int = 1,
    temperature: float = 1.0,
    seed: int = 0,
    report: Report | None = None,
) -> Tensor:
    r"""Samples `(kept, d)`, about those of the density $\propto e^{-U(\theta)/T}$, by Langevin dynamics with momentum.

    Each step loses the share `friction` $= \alpha$ of the momentum and makes it up by noise,
    $r \leftarrow (1-\alpha)\,r + \sqrt{\alpha(2-\alpha)T}\,\xi$, between two half moves $\theta \leftarrow \theta +
    \frac\epsilon2 r$ and two half kicks $r \leftarrow r - \frac\epsilon2 \nabla U$ (Chen, Fox and Guestrin 2014, in the
    splitting BAOAB of Leimkuhler and Matthews 2013). `friction=1` is Langevin dynamics without momentum,
    `temperature=0` descent with momentum. Of `steps` steps the first `burn_in` are dropped and of the others every
    `thin`-th is kept.

    The potential may be stochastic: it then draws from a generator of its own at each call. There is no Metropolis
    test, so samples are biased: not at all for a Gaussian and an exact potential, by $O(\epsilon^2)$ for others, and
    gradient noise of variance $V$ heats the chain to about $T + \epsilon^2 V / (\alpha(2-\alpha))$. Costs one gradient of
    the potential per step.

    Args:
        potential: U, parameters `(d,)` to a number; may be stochastic.
        theta0: where the chain begins.
        steps, burn_in, thin: steps in all, those dropped at the start, and of the others every which is kept.
        step_size: how long a move is.
        friction: share of the momentum that a step loses, in (0, 1].
        temperature: T above.
        seed: of the noise.
        report: gets a `Step` after every step.
    """
    check_chain(theta0, steps, burn_in, thin, {"step_size": step_size, "friction": friction})
    if friction > 1 or not 0 <= temperature < math.inf:
        raise ValueError(f"friction must be in (0, 1], temperature at least 0, got {friction} and {temperature}")
    generator = torch.Generator(theta0.device).manual_seed(seed)

    def noise() -> Tensor:
        return torch.randn(theta0.shape, generator=generator, dtype=theta0.dtype, device=theta0.device)

    theta = theta0.detach().clone()
    r = math.sqrt(temperature) * noise()
    energy, gradient = value_and_gradient(potential, theta)
    if not math.isfinite(energy):
        raise ValueError(f"potential must be finite at theta0, got {energy}; start from other parameters")
    kept = []
    for number in range(steps):
        r = r - step_size / 2 * gradient
        theta = theta + step_size / 2 * r
        r = (1 - friction) * r + math.sqrt(friction * (2 - friction) * temperature) * noise()
        theta = theta + step_size / 2 * r
        energy, gradient = value_and_gradient(potential, theta)
        r = r - step_size / 2 * gradient
        if not math.isfinite(energy):
            raise ValueError(
                f"potential is {energy} after {number + 1} steps of step_size {step_size}; lower step_size"
            )
        if report is not None:
            report(Step(number, energy, True, 1.0, step_size))
        if number >= burn_in and (number - burn_in + 1) % thin == 0:
            kept.append(theta)
    return torch.stack(kept)
