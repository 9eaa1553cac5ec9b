"""BPC-W: training on the coreset should end where training on the full data does."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor
from torch.nn import functional

from ..flat import FlatNetwork
from ..networks import Network
from . import inner, pixels
from .augment import Augmentation, augment
from .state import DivergedError, Info, Source, State


@dataclass(frozen=True)
class Wasserstein:
    r"""Minimises the 2-Wasserstein distance between the posteriors of the full data and of the coreset.

    Taken for Gaussians of one covariance around $\theta_x$, an expert's parameters, and $\theta_u$, where `inner_steps` of
    SGD on the coreset lead from the expert's start $\theta_0$, it is their distance, normalised as

    $$\lVert \theta_u - \theta_x \rVert^2 / \lVert \theta_0 - \theta_x \rVert^2$$

    (Kim, Choi, Lee, Lee, Ha, Lee 2022, equation 15; the objective of MTT, Cazenavette et al. 2022). The gradient goes
    back through all inner steps and also moves the inner step size. `recompute` keeps the parameters of each step and
    nothing else of it, and runs the step again on the way back: the memory of one step and `inner_steps` parameter
    vectors; without it the graphs of all steps are kept. The gradient is the same up to rounding.
    """

    network: Network
    _: KW_ONLY
    loss: inner.Loss = functional.cross_entropy
    epochs: int = 2
    """How far on the expert is that the coreset should lead to."""
    inner_steps: int = 30
    inner_rate: float = 0.01
    """Where the learned inner step size begins."""
    inner_rate_lr: float = 1e-7
    """How fast it is learned; 0 leaves it as it is."""
    lr: float = 1000.0
    momentum: float = 0.5
    augmentation: Augmentation | None = augment
    recompute: bool = True
    name: ClassVar[str] = "wasserstein"

    def __post_init__(self) -> None:
        pixels.check_settings(
            epochs=self.epochs,
            inner_steps=self.inner_steps,
            inner_rate=self.inner_rate,
            inner_rate_lr=self.inner_rate_lr,
            lr=self.lr,
            momentum=self.momentum,
        )

    @cached_property
    def flat(self) -> FlatNetwork:
        """The network as a function of its parameters."""
        return pixels.flat_network(self.network)

    def init(self, inputs: Tensor, targets: Tensor, *, seed: int = 0) -> State:
        """The state before the first step."""
        rate = inputs.new_tensor(self.inner_rate, dtype=torch.promote_types(inputs.dtype, torch.float32))
        return pixels.begin(inputs, targets, seed, inner_rate=rate, inner_rate_momentum=torch.zeros_like(rate))

    def step(self, state: State, source: Source) -> tuple[State, Info]:
        """One update of the inputs and of the inner step size."""
        generator = state.generator()
        start, expert = pixels.segment(source, self.flat, self.epochs, generator, state.inputs)
        draws = torch.randint(2**62, (self.inner_steps,), generator=generator).tolist()
        distance = self.recomputed if self.recompute else self.unrolled
        value, gradient, rate_gradient = distance(state, start, expert, draws)
        velocity = self.momentum * state.memory["inner_rate_momentum"] + rate_gradient
        rate = state.memory["inner_rate"] - self.inner_rate_lr * velocity
        lower = {"lr": self.lr, "inner_rate_lr": self.inner_rate_lr, "inner_rate": self.inner_rate}
        memory = {"inner_rate": rate, "inner_rate_momentum": velocity}
        moved = pixels.move(state, gradient, lr=self.lr, momentum=self.momentum, lower=lower, **memory)
        if rate <= 0:
            raise DivergedError(
                f"the inner step size fell to {float(rate):g} at step {state.step}: lower inner_rate_lr "
                f"(now {self.inner_rate_lr:g}), and go on from before it"
            )
        return moved, pixels.figures(loss=value, gradient=gradient.norm(), inner_rate=rate)

    def unrolled(self, state: State, start: Tensor, expert: Tensor, draws: list[int]) -> tuple[float, Tensor, Tensor]:
        """The distance and its gradients for inputs and step size, by one graph through all steps."""
        inputs, rate = (value.detach().requires_grad_() for value in (state.inputs, state.memory["inner_rate"]))
        theta = start.detach().requires_grad_()
        for draw in draws:
            theta = theta - rate * self._gradient(theta, inputs, state.targets, draw)
        value = _distance(theta, start, expert)
        gradient, rate_gradient = torch.autograd.grad(value, (inputs, rate))
        return float(value.detach()), gradient, rate_gradient

    def recomputed(self, state: State, start: Tensor, expert: Tensor, draws: list[int]) -> tuple[float, Tensor, Tensor]:
        r"""The same with the graph of one step at a time.

        Back through $\theta' = \theta - r\,g(\theta, u)$ a gradient $\lambda$ becomes
        $\lambda - r\,\partial_\theta (\lambda \cdot g)$ and leaves $-r\,\partial_u (\lambda \cdot g)$ for the inputs and
        $-\lambda \cdot g$ for the step size.
        """
        inputs, rate = state.inputs.detach().requires_grad_(), state.memory["inner_rate"]
        thetas = [start.detach().clone()]
        for draw in draws:
            step = self._gradient(thetas[-1].requires_grad_(), state.inputs, state.targets, draw, graph=False)
            thetas.append(thetas[-1].detach() - rate * step)
        last = thetas.pop().requires_grad_()
        value = _distance(last, start, expert)
        (adjoint,) = torch.autograd.grad(value, last)
        gradient, rate_gradient = torch.zeros_like(inputs), torch.zeros_like(rate)
        for draw in reversed(draws):
            theta = thetas.pop()
            slope = adjoint @ self._gradient(theta, inputs, state.targets, draw)
            of_theta, of_inputs = torch.autograd.grad(slope, (theta, inputs))
            gradient -= rate * of_inputs
            rate_gradient -= slope.detach()
            adjoint = adjoint - rate * of_theta
        return float(value.detach()), gradient, rate_gradient

    def _gradient(self, theta: Tensor, inputs: Tensor, targets: Tensor, draw: int, *, graph: bool = True) -> Tensor:
        """The gradient for the parameters, itself differentiable with `graph`."""
        if self.augmentation is not None:
            inputs = self.augmentation(inputs, Generator().manual_seed(draw))
        loss = self.loss(self.flat(theta, inputs), targets)
        (gradient,) = torch.autograd.grad(loss, theta, create_graph=graph)
        return gradient

    def describe(self, state: State) -> dict[str, Any]:
        """The learned step size is the one to train on the coreset with."""
        rate = float(state.memory["inner_rate"])
        return {"target_kind": pixels.target_kind(state.targets), "learning_rate": rate}


def _distance(theta: Tensor, start: Tensor, expert: Tensor) -> Tensor:
    return (theta - expert).square().sum() / (start - expert).square().sum()


wasserstein = Wasserstein
