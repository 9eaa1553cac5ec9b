"""What a distillation in progress consists of, and the two things that every method draws from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class State:
    """The coreset so far and whatever the method must remember, all in tensors: saved as it is, resumed to the bit.

    Randomness of step `t` comes from `(seed, t)` alone (`generator`), so no random state has to be kept.
    """

    inputs: Tensor
    """`(n, ...)`: what is stored; a network sees it, or the examples cut out of it."""
    targets: Tensor
    """`(n,)` class numbers or `(n, num_classes)`, a row for each example."""
    seed: int
    step: int = 0
    memory: dict[str, Tensor] = field(default_factory=dict)
    """Momentum, moments of Adam, a learned step size, a pool of networks: by name."""

    def generator(self) -> torch.Generator:
        """The randomness of this step."""
        return torch.Generator().manual_seed((self.seed * 1_000_003 + self.step) % 2**63)


Info = dict[str, float]
"""Figures of a step for people to look at; `loss` is always there."""


class DivergedError(ValueError):
    """A step came to NaN or infinity; the message says what to lower. The state before the step is still good."""


class Source(Protocol):
    """What a coreset is learned from: real examples, and experts that were trained on them."""

    @property
    def n(self) -> int:
        """Real training examples in all."""
        ...

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random real examples: inputs as a network sees them, and class numbers or soft targets."""
        ...

    def segment(self, epochs: int, generator: torch.Generator, kind: int) -> tuple[Tensor, Tensor]:
        """A random expert's flat parameters at a random early epoch, and `epochs` later: `(size,)` each.

        The expert is of this kind of network; where there is one kind, that is 0.
        """
        ...


class Distiller(Protocol):
    """A method. It holds settings only; all that changes is in the `State`."""

    def init(self, inputs: Tensor, targets: Tensor, *, seed: int) -> State:
        """The state before the first step, from real images and their targets."""
        ...

    def step(self, state: State, source: Source) -> tuple[State, Info]:
        """One update of the coreset. The state given is not changed."""
        ...

    def describe(self, state: State) -> dict[str, Any]:
        """What a finished coreset says of itself: keyword arguments of `SyntheticCoreset`.

        `target_kind`, and where they apply `tiles`, `learning_rate` (what networks were trained with on the coreset)
        and `last_layer`. The preprocessing, method, class names and provenance come from whoever runs the distiller.
        """
        ...
