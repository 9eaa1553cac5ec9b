"""BPC-rKL: the coreset's posterior should lie where that of the full data does."""

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
class ReverseKL(ExpertMatching):
    r"""Minimises $\mathrm{KL}[\pi_u \| \pi_x]$ between the posteriors of the coreset u and of the full data x.

    $\pi_u$ is taken for a Gaussian of deviation `noise` around $\theta_u$, where `inner_steps` of SGD on the coreset lead
    from an expert's parameters. The gradient for example m is a covariance over its `samples` $\theta_s$,

    $$\hat\nabla_{u_m} = -\tfrac1S \sum_s \tilde h_{m,s}\, \bigl(\overline{g}_s - \overline{\tilde g}_s\bigr),$$

    h the input gradients of the log-likelihoods, g and g~ log-likelihoods of a real batch and of the coreset, all less
    their mean over s (Kim, Choi, Lee, Lee, Ha, Lee 2022, algorithm 4). One augmentation serves a whole step: a covariance
    between different augmentations would be of the augmentations. Memory: one network pass, of the batch without
    gradients. Time: `inner_steps + samples` passes forward and back, and `samples` forward over batch and coreset.

    Args:
        loss: outputs and targets to a mean over the examples.
        samples: of the Gaussian; at least two, or there is no covariance.
        noise: deviation of the Gaussian.
        batch: real examples in a step.
        network, inner_steps, inner_lr, lr, momentum, augmentation, bounds: as for every method that learns from experts
            (`ExpertMatching`).
    """

    loss: inner.Loss = functional.cross_entropy
    samples: int = 10
    noise: float = 0.01
    batch: int = 1000
    momentum: float = 0.0
    name: ClassVar[str] = "reverse_kl"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples < 2 or not self.noise:
            raise ValueError(
                f"a covariance needs samples of 2 or more and noise over 0, got {self.samples} and {self.noise}"
            )

    def step(self, state: State, source: Source) -> tuple[State, Info]:
        """One update of the inputs."""
        generator = state.generator()
        start, _ = self._segment(source, state, 1, generator)
        theta = self._descend(state, start, self.loss, generator)
        real, real_targets = source.batch(self.batch, generator)
        gradient, gap = self.covariance(
            state, theta, real.to(state.inputs), real_targets.to(state.inputs.device), generator
        )
        return self._moved(state, gradient, gap)

    def covariance(
        self, state: State, theta: Tensor, real: Tensor, real_targets: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, float]:
        """The gradient, and how much larger the real batch's mean loss is than the coreset's."""
        thetas = [theta + pixels.noise(theta, self.noise, generator) for _ in range(self.samples)]
        draw = int(torch.randint(2**62, (), generator=generator))
        inputs = state.inputs.detach().requires_grad_()
        seen, real = self._augmented(inputs, draw), self._augmented(real, draw)
        with torch.no_grad():
            losses = [
                self.loss(self.flat(state)(each, real), real_targets)
                - self.loss(self.flat(state)(each, seen), state.targets)
                for each in thetas
            ]
        gaps = torch.stack(losses)
        # less their mean, the gaps sum to zero over s, so the mean of h need not be taken off
        weights = (gaps.mean() - gaps) * len(inputs) / self.samples
        gradient = torch.zeros_like(state.inputs)
        for weight, each in zip(weights, thetas, strict=True):
            own = self.loss(self.flat(state)(each, self._augmented(inputs, draw)), state.targets)
            gradient += torch.autograd.grad(weight * own, inputs)[0]
        return gradient, float(gaps.mean())

    def _augmented(self, images: Tensor, draw: int) -> Tensor:
        """The same augmentation for the same draw."""
        if self.augmentation is None:
            return images
        return self.augmentation(images, torch.Generator().manual_seed(draw))
