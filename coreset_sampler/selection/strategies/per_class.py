"""Selection class by class over the whole training set: the frame that Craig, KCenter and Herding share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..coreset import Coreset
from ..types import Balance, View
from .pools import quotas
from .settings import check_balance


@dataclass(frozen=True)
class PerClass:
    """Keeps some of each class, chosen among all of its examples. A strategy says how to score and how to choose."""

    balance: Balance = "equal"

    State: ClassVar[type | None] = None

    def __post_init__(self) -> None:
        check_balance(self.balance)

    def select(self, view: View, size: int, state: None, generator: torch.Generator) -> tuple[Coreset, None]:
        """Scores and chooses class by class; classes are shared out over processes."""
        quota = quotas(view.labels, size, self.balance, generator)
        classes = view.shard(quota.nonzero().flatten().tolist())
        members = [(view.labels == c).nonzero().flatten() for c in classes]
        parts = []
        for c, indices, vectors in zip(classes, members, self._score(view, members), strict=True):
            _check_finite(vectors, indices)
            chosen = self._choose(vectors, int(quota[c]))
            parts.append(Coreset(indices[chosen.indices], chosen.weights))
        return Coreset.merge(view.gather(parts)), None

    def _score(self, view: View, groups: Sequence[Tensor]) -> Iterator[Tensor]:
        """The vectors `(k, d)` of each group of indices `(k,)`."""
        raise NotImplementedError

    def _choose(self, vectors: Tensor, size: int) -> Coreset:
        """`size` of the vectors of one class."""
        raise NotImplementedError


def _check_finite(vectors: Tensor, indices: Tensor) -> None:
    bad = ~torch.isfinite(vectors).all(1)
    if bool(bad.any()):
        raise ValueError(
            f"the model gives NaN or infinite numbers for {int(bad.sum())} of {len(indices)} examples of a class (the first "
            f"is example {int(indices[int(bad.nonzero()[0])])}). Has training diverged?"
        )
