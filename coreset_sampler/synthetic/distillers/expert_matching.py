"""What the methods that learn from expert trajectories have in common: settings, inner training, the pixel update."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

from torch import Generator, Tensor

from ..flat import FlatNetwork
from ..networks import Network
from . import inner, pixels
from .augment import Augmentation, augment
from .state import Info, Source, State


@dataclass(frozen=True)
class ExpertMatching:
    """A network is trained on the coreset from an expert's parameters, and the pixels move by SGD with momentum.

    Args:
        network: makes a fresh network of the kind that the experts are.
        inner_steps: SGD steps on the coreset, from where the expert stands.
        inner_lr: their learning rate; the finished coreset names it as the one to train with.
        lr: learning rate of the pixels. The first setting to change.
        momentum: momentum of the pixels.
        augmentation: changes images alike, `(images, generator) -> images`; `None` for data that are no images.
    """

    network: Network
    _: KW_ONLY
    inner_steps: int = 30
    inner_lr: float = 0.03
    lr: float = 1000.0
    momentum: float = 0.5
    augmentation: Augmentation | None = augment

    def __post_init__(self) -> None:
        pixels.check_settings(self)

    @cached_property
    def flat(self) -> FlatNetwork:
        """The network as a function of its parameters."""
        return pixels.flat_network(self.network)

    def init(self, inputs: Tensor, targets: Tensor, *, seed: int = 0) -> State:
        """The state before the first step."""
        return pixels.begin(inputs, targets, seed)

    def describe(self, state: State) -> dict[str, Any]:
        """Keyword arguments of `SyntheticCoreset`: the inner learning rate is the one to train with."""
        return {"target_kind": pixels.target_kind(state.targets), "learning_rate": self.inner_lr}

    def _segment(self, source: Source, state: State, epochs: int, generator: Generator) -> list[Tensor]:
        return pixels.segment(source, self.flat, epochs, generator, state.inputs)

    def _descend(
        self, state: State, start: Tensor, loss: inner.Loss, generator: Generator, temperature: float = 0.0
    ) -> Tensor:
        """Parameters after the inner steps on the coreset."""
        return inner.descend(
            self.flat,
            start,
            state.inputs,
            state.targets,
            loss=loss,
            steps=self.inner_steps,
            lr=self.inner_lr,
            generator=generator,
            augmentation=self.augmentation,
            temperature=temperature,
        )

    def _moved(self, state: State, gradient: Tensor, loss: float, **lower: float) -> tuple[State, Info]:
        """The next state and its figures; `lower` names more settings to lower if the step is not finite."""
        lower = {"lr": self.lr, "inner_lr": self.inner_lr} | lower
        state = pixels.move(state, gradient, lr=self.lr, momentum=self.momentum, lower=lower)
        return state, pixels.figures(loss=loss, gradient=gradient.norm())
