"""BPC-fKL: the coreset's posterior should cover that of the full data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from . import inner, pixels
from .expert_matching import ExpertMatching
from .state import Info, Source, State


@dataclass(frozen=True, kw_only=True)
class ForwardKL(ExpertMatching):
    r"""Minimises $\mathrm{KL}[\pi_x \| \pi_u]$ between the posteriors of the full data x and of the coreset u.

    Both are taken for Gaussians of deviation `noise`, around the expert's parameters $\theta_x$ and around $\theta_u$, where
    `inner_steps` of SGD on the coreset lead from the expert's start. With the gradient stopped at $\theta_u$ a step descends

    $$\tfrac1S \sum_s L(u; \theta_x + \sigma \varepsilon_s) - L(u; \mathrm{sg}(\theta_u) + \sigma \varepsilon'_s)$$

    (Kim, Choi, Lee, Lee, Ha, Lee 2022, equation 20), each sample under an augmentation of its own. Memory: one network
    pass, whatever `inner_steps` and `samples`. Time: `inner_steps + 2 samples` passes forward and back.

    Args:
        loss: outputs and targets to a mean over the examples.
        epochs: how many epochs after the start the expert is that the coreset should lead to.
        samples: of each Gaussian.
        noise: their deviation.
        network, inner_steps, inner_lr, lr, momentum, augmentation, bounds: as for every method that learns from experts
            (`ExpertMatching`).
    """

    loss: inner.Loss = functional.cross_entropy
    epochs: int = 1
    samples: int = 30
    noise: float = 0.01
    name: ClassVar[str] = "forward_kl"

    def step(self, state: State, source: Source) -> tuple[State, Info]:
        """One update of the inputs."""
        generator = state.generator()
        start, expert = self._segment(source, state, self.epochs, generator)
        theta = self._descend(state, start, self.loss, generator)
        gap, gradient = self.gap(state, expert, theta, generator)
        return self._moved(state, gradient, gap)

    def gap(self, state: State, expert: Tensor, theta: Tensor, generator: torch.Generator) -> tuple[float, Tensor]:
        """Equation 20 and its gradient, one sample in memory at a time."""
        inputs = state.inputs.detach().requires_grad_()
        total, gradient = 0.0, torch.zeros_like(state.inputs)
        for _ in range(self.samples):
            seen = inputs if self.augmentation is None else self.augmentation(inputs, generator)
            there, here = (
                self.loss(self.flat(state)(point + pixels.noise(point, self.noise, generator), seen), state.targets)
                for point in (expert, theta)
            )
            gradient += torch.autograd.grad(there - here, inputs)[0] / self.samples
            total += float((there - here).detach()) / self.samples
        return total, gradient
