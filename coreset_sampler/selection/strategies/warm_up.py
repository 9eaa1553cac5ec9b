"""Warm-up: uniform sampling until the model has something to say about the examples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from ..coreset import Coreset
from ..types import State, Strategy, View
from .uniform import Place, Uniform


@dataclass(frozen=True, eq=False)
class WarmedUp:
    """How many uniform selections there were and where they are in the pass; the state of the strategy after them."""

    done: int = 0
    place: Place | None = None
    inner: State = None


@dataclass(frozen=True)
class WarmUp:
    """Keeps random examples at the first selections, as `Uniform` does, and leaves the later ones to another strategy.

    At its random start a network gives all examples of a class nearly the same gradient, and what covers those well says
    nothing. Cost: nothing, and the first scoring passes are spared.

    Args:
        strategy: what selects after the warm-up; a name, a strategy, or a function.
        selections: how many are uniform first. At `fraction=0.1`, 10 are about one pass over the data.
    """

    strategy: Strategy
    selections: int = field(kw_only=True)

    State: ClassVar[type | None] = WarmedUp

    def __post_init__(self) -> None:
        from .registry import resolve  # which knows all strategies, this one too

        object.__setattr__(self, "strategy", resolve(self.strategy))
        if self.selections < 0:
            raise ValueError(f"selections must be 0 or more, got {self.selections}")

    @property
    def observes(self) -> bool:
        """Whether the other strategy reads what training said, so that the sampler has to watch."""
        return bool(getattr(self.strategy, "observes", False))

    def select(
        self, view: View, size: int, state: WarmedUp | None, generator: torch.Generator
    ) -> tuple[Coreset, WarmedUp]:
        """Uniform first, then as the other strategy does."""
        state = state or WarmedUp()
        if state.done < self.selections:
            coreset, place = Uniform().select(view, size, state.place, generator)
            return coreset, WarmedUp(state.done + 1, place, state.inner)
        coreset, inner = self.strategy.select(view, size, state.inner, generator)
        return coreset, WarmedUp(state.done, state.place, inner)
