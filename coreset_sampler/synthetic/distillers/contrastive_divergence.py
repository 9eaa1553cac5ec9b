"""BPC-CD: experts should have low energy under the coreset, what its own posterior proposes high."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from . import inner
from .expert_matching import ExpertMatching
from .state import Info, Source, State


@dataclass(frozen=True)
class CrossEntropy:
    """The mean cross-entropy; targets are class numbers or probabilities."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The energy."""
        return functional.cross_entropy(outputs, targets)


@dataclass(frozen=True)
class Focal:
    r"""Cross-entropy that looks away from what is easy, $-\sum_c y_c (1 - p_c)^\gamma \log p_c$ (Lin et al. 2017)."""

    gamma: float = 2.0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The energy."""
        log = outputs.log_softmax(-1)
        each = -((1 - log.exp()) ** self.gamma) * log
        return (each * _probabilities(targets, outputs)).sum(-1).mean()


@dataclass(frozen=True)
class Margin:
    r"""How far other classes come within a margin, $\tfrac1C \sum_c y_c \sum_{j \ne c} \max(0, m - z_c + z_j)$."""

    margin: float = 1.0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The energy."""
        short = (self.margin - outputs[:, :, None] + outputs[:, None, :]).clamp(min=0)
        # the class against itself always falls short by the whole margin
        each = (short.sum(-1) - self.margin) / outputs.shape[-1]
        return (each * _probabilities(targets, outputs)).sum(-1).mean()


def _probabilities(targets: Tensor, outputs: Tensor) -> Tensor:
    if targets.is_floating_point():
        return targets.to(outputs)
    return functional.one_hot(targets, outputs.shape[-1]).to(outputs)


@dataclass(frozen=True, kw_only=True)
class ContrastiveDivergence(ExpertMatching):
    r"""Minimises $\mathrm{KL}[\pi_x \| \pi_u]$ with no form assumed for the posterior of the full data x.

    That of the coreset is $\pi_u \propto \exp(-E(\theta, u) / T)$, and a step descends

    $$E(\theta^+, u) - E(\theta^-, u)$$

    with $\theta^+$ an expert's parameters and $\theta^-$ what `inner_steps` of Langevin dynamics,
    $\theta - \tfrac\alpha2 \nabla E + \sqrt{\alpha T}\,\eta$, make of its start (Tiwary, Shubham, Kashyap, AP 2024,
    equations 11 and 12).

    `inner_lr` is $\alpha / 2$. The paper has $T = 1$: at a step that learns anything its noise wipes a network
    out. By default $T = 1/n$, n the real examples: E is a mean, and the posterior is that of n examples like those of
    the coreset. Pass `temperature=1.0` for the equation as printed. Memory: one network pass, whatever `inner_steps`.

    Args:
        energy: outputs and targets to a mean over the examples: `CrossEntropy()`, `Focal()`, `Margin()` or your own.
        epochs: how many epochs after the start the expert is that should have low energy.
        temperature: T above; `None` for 1/n.
        samples: Langevin chains, and augmentations, in a step; the paper has one.
        network, inner_steps, inner_lr, lr, momentum, augmentation, bounds: as for every method that learns from experts
            (`ExpertMatching`).
    """

    energy: inner.Loss = CrossEntropy()
    epochs: int = 2
    temperature: float | None = None
    samples: int = 1
    inner_steps: int = 10
    lr: float = 1.0
    name: ClassVar[str] = "contrastive_divergence"

    def step(self, state: State, source: Source) -> tuple[State, Info]:
        """One update of the inputs."""
        generator = state.generator()
        start, expert = self._segment(source, state, self.epochs, generator)
        temperature = 1 / source.n if self.temperature is None else self.temperature
        inputs = state.inputs.detach().requires_grad_()
        total, gradient = 0.0, torch.zeros_like(state.inputs)
        for _ in range(self.samples):
            theta = self._descend(state, start, self.energy, generator, temperature)
            seen = inputs if self.augmentation is None else self.augmentation(inputs, generator)
            low, high = (self.energy(self.flat(state)(point, seen), state.targets) for point in (expert, theta))
            gradient += torch.autograd.grad(low - high, inputs)[0] / self.samples
            total += float((low - high).detach()) / self.samples
        return self._moved(state, gradient, total, temperature=temperature)
