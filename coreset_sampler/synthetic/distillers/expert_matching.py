"""What the methods that learn from expert trajectories have in common: settings, inner training, the pixel update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

from torch import Generator, Tensor

from ..flat import FlatNetwork
from ..networks import Network, makers
from . import inner, pixels
from .augment import Augmentation, augment
from .beginning import Bounds, check_bounds
from .state import Info, Source, State


@dataclass(frozen=True)
class ExpertMatching:
    """A network is trained on the coreset from an expert's parameters, and the pixels move by SGD with momentum.

    Of several kinds of networks each has every k-th step, with experts of its own kind. BatchNorm has the statistics of
    whatever it is given, as in training: trajectories hold no others.

    Args:
        network: makes a fresh network of the kind that the experts are; or several such makers, in the experts' order.
        inner_steps: SGD steps on the coreset, from where the expert stands.
        inner_lr: their learning rate; the finished coreset names it as the one to train with.
        lr: learning rate of the pixels. The first setting to change.
        momentum: momentum of the pixels.
        augmentation: changes images alike, `(images, generator) -> images`; `None` for data that are no images.
        bounds: the lowest and the highest value of each channel, to which images are clamped after every step.
    """

    network: Network | Sequence[Network]
    _: KW_ONLY
    inner_steps: int = 30
    inner_lr: float = 0.03
    lr: float = 1000.0
    momentum: float = 0.5
    augmentation: Augmentation | None = augment
    bounds: Bounds | None = None

    def __post_init__(self) -> None:
        pixels.check_settings(self)
        makers(self.network)
        check_bounds(self.bounds)

    @cached_property
    def _flats(self) -> tuple[FlatNetwork, ...]:
        return tuple(pixels.flat_network(make) for make in makers(self.network))

    def flat(self, state: State) -> FlatNetwork:
        """The network of this step as a function of its parameters."""
        return self._flats[self._kind(state)]

    def _kind(self, state: State) -> int:
        return state.step % len(self._flats)

    def init(self, inputs: Tensor, targets: Tensor, *, seed: int = 0) -> State:
        """The state before the first step."""
        return pixels.begin(inputs, targets, seed)

    def describe(self, state: State) -> dict[str, Any]:
        """Keyword arguments of `SyntheticCoreset`: the inner learning rate is the one to train with."""
        return {"target_kind": pixels.target_kind(state.targets), "learning_rate": self.inner_lr}

    def _segment(self, source: Source, state: State, epochs: int, generator: Generator) -> list[Tensor]:
        return pixels.segment(source, self.flat(state), epochs, generator, self._kind(state), state.inputs)

    def _descend(
        self, state: State, start: Tensor, loss: inner.Loss, generator: Generator, temperature: float = 0.0
    ) -> Tensor:
        """Parameters after the inner steps on the coreset."""
        return inner.descend(
            self.flat(state),
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
        state = pixels.move(state, gradient, lr=self.lr, momentum=self.momentum, bounds=self.bounds, lower=lower)
        return state, pixels.figures(loss=loss, gradient=gradient.norm())
