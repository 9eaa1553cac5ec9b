"""Herding: examples whose average is the class average."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..coreset import Coreset
from ..types import View
from .per_class import PerClass


@dataclass(frozen=True)
class Herding(PerClass):
    r"""Keeps in each class examples whose mean embedding is that of the class (Welling, 2009).

    Greedily minimises $\lVert \tfrac1n \sum_i h_i - \tfrac1{|S|} \sum_{j \in S} h_j \rVert$ with $h$ what the head
    receives; those of a class weigh the same. Cost: every example through the model once, `size` products with them.

    Args:
        balance: `"equal"` keeps as many of each class, `"proportional"` in proportion to their size.
    """

    def _score(self, view: View, groups: Sequence[Tensor]) -> Iterator[Tensor]:
        return view.embeddings(groups)

    def _choose(self, vectors: Tensor, size: int) -> Coreset:
        return match_mean(vectors, size)


def match_mean(vectors: Tensor, size: int) -> Coreset:
    """Greedy picks from `(n, d)` vectors, each bringing the mean of the picks nearest to the mean of all."""
    vectors = vectors.double()
    mean = vectors.mean(0)
    squares = (vectors * vectors).sum(1)
    total = torch.zeros_like(mean)
    taken = torch.zeros(len(vectors), dtype=torch.bool)
    picks: list[int] = []
    for count in range(1, size + 1):
        # || mean - (total + v) / count ||^2 up to what is the same for all v
        score = squares / count - 2 * (vectors @ (mean - total / count))  # never a copy of all vectors
        pick = int(score.masked_fill(taken, torch.inf).argmin())
        taken[pick] = True
        total += vectors[pick]
        picks.append(pick)
    return Coreset(torch.tensor(picks), torch.full((size,), len(vectors) / size, dtype=torch.float64))
