"""BPC-fKL: the coreset's posterior should cover that of the full data."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from ..flat import FlatNetwork
from ..networks import Network
from . import inner, pixels
from .augment import Augmentation, augment
from .state import Info, Source, State


@dataclass(frozen=True)
class ForwardKL:
    r"""Minimises $\mathrm{KL}[\pi_x \| \pi_u]$ between the posteriors of the full data x and of the coreset u.

    Both are taken for Gaussians of deviation `noise`, around the expert's parameters $\theta_x$ and around $\theta_u$, where
    `inner_steps` of SGD on the coreset lead from the expert's start. With the gradient stopped at $\theta_u$ a step descends

    $$\tfrac1S \sum_s L(u; \theta_x + \sigma \varepsilon_s) - L(u; \mathrm{sg}(\theta_u) + \sigma \varepsilon'_s)$$

    (Kim, Choi, Lee, Lee, Ha, Lee 2022, equation 20), each sample under an augmentation of its own. Memory: one network
    pass, whatever `inner_steps` and `samples`. Time: `inner_steps + 2 samples` passes forward and back.
    """

    network: Network
    _: KW_ONLY
    loss: inner.Loss = functional.cross_entropy
    epochs: int = 1
    """How far on the expert is that the coreset should lead to."""
    inner_steps: int = 30
    inner_rate: float = 0.03
    samples: int = 30
    noise: float = 0.01
    lr: float = 1000.0
    momentum: float = 0.5
    augmentation: Augmentation | None = augment
    name: ClassVar[str] = "forward_kl"

    def __post_init__(self) -> None:
        pixels.check_settings(
            epochs=self.epochs,
            inner_steps=self.inner_steps,
            inner_rate=self.inner_rate,
            samples=self.samples,
            noise=self.noise,
            lr=self.lr,
            momentum=self.momentum,
        )

    @cached_property
    def flat(self) -> FlatNetwork:
        """The network as a function of its parameters."""
        return pixels.flat_network(self.network)

    def init(self, inputs: Tensor, targets: Tensor, *, seed: int = 0) -> State:
        """The state before the first step."""
        return pixels.begin(inputs, targets, seed)

    def step(self, state: State, source: Source) -> tuple[State, Info]:
        """One update of the inputs."""
        generator = state.generator()
        start, expert = pixels.segment(source, self.flat, self.epochs, generator, state.inputs)
        theta = inner.descend(
            self.flat,
            start,
            state.inputs,
            state.targets,
            loss=self.loss,
            steps=self.inner_steps,
            rate=self.inner_rate,
            generator=generator,
            augmentation=self.augmentation,
        )
        gap, gradient = self.gap(state, expert, theta, generator)
        lower = {"lr": self.lr, "inner_rate": self.inner_rate}
        state = pixels.move(state, gradient, lr=self.lr, momentum=self.momentum, lower=lower)
        return state, pixels.figures(loss=gap, gradient=gradient.norm())

    def gap(self, state: State, expert: Tensor, theta: Tensor, generator: torch.Generator) -> tuple[float, Tensor]:
        """Equation 20 and its gradient, one sample in memory at a time."""
        inputs = state.inputs.detach().requires_grad_()
        total, gradient = 0.0, torch.zeros_like(state.inputs)
        for _ in range(self.samples):
            seen = inputs if self.augmentation is None else self.augmentation(inputs, generator)
            there, here = (
                self.loss(self.flat(point + pixels.noise(point, self.noise, generator), seen), state.targets)
                for point in (expert, theta)
            )
            gradient += torch.autograd.grad(there - here, inputs)[0] / self.samples
            total += float((there - here).detach()) / self.samples
        return total, gradient

    def describe(self, state: State) -> dict[str, Any]:
        """The inner rate is the one to train on the coreset with."""
        return {"target_kind": pixels.target_kind(state.targets), "learning_rate": self.inner_rate}


forward_kl = ForwardKL
