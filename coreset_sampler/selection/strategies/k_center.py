"""k-center: examples so spread out that none of the others is far from one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..coreset import Coreset
from ..types import Balance, View
from .per_class import embeddings, select_per_class
from .settings import check_balance


@dataclass(frozen=True)
class KCenter:
    r"""Keeps in each class embeddings that are far apart (Sener and Savarese, 2018).

    Greedily minimises $\max_i \min_{j \in S} \lVert h_j - h_i \rVert$ with $h$ what the head receives, within a factor
    two of the best. Starts from the example nearest to the class mean. Cost: every example through the model once,
    `size` distance rows.

    Args:
        balance: `"equal"` keeps as many of each class, `"proportional"` in proportion to their size.
    """

    balance: Balance = "equal"

    State: ClassVar[type | None] = None

    def __post_init__(self) -> None:
        check_balance(self.balance)

    def select(self, view: View, size: int, state: None, generator: torch.Generator) -> tuple[Coreset, None]:
        """Class by class over the whole training set."""
        return select_per_class(
            view, size, generator, balance=self.balance, score=embeddings, choose=farthest_first
        ), None


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
