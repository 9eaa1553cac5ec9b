"""Uniform: random examples without replacement over epochs, the baseline that everything has to beat."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ..coreset import Coreset
from ..types import View


@dataclass(frozen=True, eq=False)
class Place:
    """Where in which pass over the data: the order of `seed`, of which the first `position` examples were shown.

    `late` are the examples of the last pass that were shown together with the first of this one.
    """

    seed: int
    position: int = 0
    late: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def order(self, n: int, size: int) -> Tensor:
        """The whole pass `(n,)`. Examples that are `late` come last among the first `size`.

        Example: the seed's order is `[3, 0, 2, 1, 4]`, and with `size=3` example 0 was left over from the last pass. It is
        shown first, then 3 and 2 of this pass, whose order is `[3, 2, 0, 1, 4]`: example 0 comes in the next selection.
        """
        order = torch.randperm(n, generator=torch.Generator().manual_seed(self.seed))
        if not len(self.late):
            return order
        delayed = torch.isin(order[:size], self.late)
        return torch.cat([order[:size][~delayed], order[:size][delayed], order[size:]])


def next_of_pass(n: int, size: int, place: Place | None, generator: torch.Generator) -> tuple[Tensor, Place]:
    """The next `size` of `n` examples without replacement, and the place behind them.

    What is left at the end of a pass comes first, the rest from a new pass; no example comes twice.
    """
    place = place or Place(_seed(generator))
    left = place.order(n, size)[place.position : place.position + size]
    if len(left) == size:
        return left, Place(place.seed, place.position + size, place.late)
    new = Place(_seed(generator), size - len(left), left.clone())
    return torch.cat([left, new.order(n, size)[: new.position]]), new


def _seed(generator: torch.Generator) -> int:
    return int(torch.randint(2**62, (), generator=generator))


@dataclass(frozen=True)
class Uniform:
    """Keeps random examples, and each one once before any comes again: ten epochs of a tenth are a pass over the data.

    The model is not run. Cost: nothing; two numbers between selections, and the rest of a pass that was not even.
    """

    State: ClassVar[type | None] = Place

    def select(
        self, view: View, size: int, state: Place | None, generator: torch.Generator
    ) -> tuple[Coreset, Place | None]:
        """The next `size` examples of the pass, each as likely as any other."""
        n = len(view.labels)
        picks, place = next_of_pass(n, size, state, generator)
        return Coreset(picks, torch.full((size,), n / size, dtype=torch.float64)), place
