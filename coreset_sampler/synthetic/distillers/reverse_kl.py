"""BPC-rKL: the coreset's posterior should lie where that of the full data does."""

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
class ReverseKL:
    r"""Minimises $\mathrm{KL}[\pi_u \| \pi_x]$ between the posteriors of the coreset u and of the full data x.

    $\pi_u$ is taken for a Gaussian of deviation `noise` around $\theta_u$, where `inner_steps` of SGD on the coreset lead
    from an expert's parameters. The gradient for example m is a covariance over its `samples` $\theta_s$,

    $$\hat\nabla_{u_m} = -\tfrac1S \sum_s \tilde h_{m,s}\, \bigl(\overline{g}_s - \overline{\tilde g}_s\bigr),$$

    h the input gradients of the log-likelihoods, g and g~ log-likelihoods of a real batch and of the coreset, all less
    their mean over s (Kim, Choi, Lee, Lee, Ha, Lee 2022, algorithm 4). One augmentation serves a whole step: a covariance
    between different augmentations would be of the augmentations. Memory: one network pass, of the batch without
    gradients. Time: `inner_steps + samples` passes forward and back, and `samples` forward over batch and coreset.
    """

    network: Network
    _: KW_ONLY
    loss: inner.Loss = functional.cross_entropy
    inner_steps: int = 30
    inner_rate: float = 0.03
    samples: int = 10
    noise: float = 0.01
    batch: int = 1000
    lr: float = 1000.0
    momentum: float = 0.0
    augmentation: Augmentation | None = augment
    name: ClassVar[str] = "reverse_kl"

    def __post_init__(self) -> None:
        pixels.check_settings(
            inner_steps=self.inner_steps,
            inner_rate=self.inner_rate,
            samples=self.samples,
            noise=self.noise,
            batch=self.batch,
            lr=self.lr,
            momentum=self.momentum,
        )
        if self.samples < 2 or not self.noise:
            raise ValueError(
                f"a covariance needs samples of 2 or more and noise over 0, got {self.samples} and {self.noise}"
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
        start, _ = pixels.segment(source, self.flat, 1, generator, state.inputs)
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
        real, real_targets = source.batch(self.batch, generator)
        gradient, gap = self.covariance(
            state, theta, real.to(state.inputs), real_targets.to(state.inputs.device), generator
        )
        lower = {"lr": self.lr, "inner_rate": self.inner_rate}
        state = pixels.move(state, gradient, lr=self.lr, momentum=self.momentum, lower=lower)
        return state, pixels.figures(loss=gap, gradient=gradient.norm())

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
                self.loss(self.flat(each, real), real_targets) - self.loss(self.flat(each, seen), state.targets)
                for each in thetas
            ]
        gaps = torch.stack(losses)
        # less their mean, the gaps sum to zero over s, so the mean of h need not be taken off
        weights = (gaps.mean() - gaps) * len(inputs) / self.samples
        gradient = torch.zeros_like(state.inputs)
        for weight, each in zip(weights, thetas, strict=True):
            own = self.loss(self.flat(each, self._augmented(inputs, draw)), state.targets)
            gradient += torch.autograd.grad(weight * own, inputs)[0]
        return gradient, float(gaps.mean())

    def _augmented(self, images: Tensor, draw: int) -> Tensor:
        """The same augmentation for the same draw."""
        if self.augmentation is None:
            return images
        return self.augmentation(images, torch.Generator().manual_seed(draw))

    def describe(self, state: State) -> dict[str, Any]:
        """The inner rate is the one to train on the coreset with."""
        return {"target_kind": pixels.target_kind(state.targets), "learning_rate": self.inner_rate}


reverse_kl = ReverseKL
