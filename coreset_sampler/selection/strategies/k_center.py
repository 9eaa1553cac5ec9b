"""k-center: examples so spread out that none of the others is far from one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..coreset import Coreset
from ..types import View
from .per_class import PerClass


@dataclass(frozen=True)
class KCenter(PerClass):
    r"""Keeps in each class embeddings that are far apart (Sener and Savarese, 2018).

    Greedily minimises $\max_i \min_{j \in S} \lVert h_j - h_i \rVert$ with $h$ what the head receives, within a factor
    two of the best. Starts from the example nearest to the class mean. Cost: every example through the model once,
    `size` distance rows.

    Args:
        balance: `"equal"` keeps as many of each class, `"proportional"` in proportion to their size.
    """

    def _score(self, view: View, groups: Sequence[Tensor]) -> Iterator[Tensor]:
        return view.embeddings(groups)

    def _choose(self, vectors: Tensor, size: int) -> Coreset:
        return farthest_first(vectors, size)


def farthest_first(vectors: Tensor, size: int) -> Coreset:
    """Farthest-first traversal of `(n, d)` vectors; weights count the vectors nearest to each. Ties to the lowest index."""
    to_mean = torch.linalg.vector_norm(vectors - vectors.mean(0), dim=1)
    picks = [int(to_mean.argmin())]
    nearest = torch.linalg.vector_norm(vectors - vectors[picks[0]], dim=1)
    owner = torch.zeros(len(vectors), dtype=torch.int64)
    nearest[picks[0]] = -1  # a pick is nobody else's and is not picked again
    while len(picks) < size:
        pick = int(nearest.argmax())
        distance = torch.linalg.vector_norm(vectors - vectors[pick], dim=1)
        closer = distance < nearest
        owner[closer], nearest[closer] = len(picks), distance[closer]
        owner[pick], nearest[pick] = len(picks), -1
        picks.append(pick)
    return Coreset(torch.tensor(picks), torch.bincount(owner, minlength=size).double())
