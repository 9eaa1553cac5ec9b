"""CRAIG: facility location over the whole training set at the current weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..coreset import Coreset
from ..facility_location import cover
from ..types import View
from .per_class import PerClass


@dataclass(frozen=True)
class Craig(PerClass):
    r"""Keeps in each class the examples whose gradients cover those of all its others (Mirzasoleiman et al., 2020).

    Greedily minimises $\sum_i \min_{j \in S} \lVert g_j(w) - g_i(w) \rVert$ with logit gradients. Cost: every example
    through the model once, and greedy over $n_c$ examples of a class without their distance matrix.

    Args:
        balance: `"equal"` keeps as many of each class, `"proportional"` in proportion to their size.
    """

    def _score(self, view: View, groups: Sequence[Tensor]) -> Iterator[Tensor]:
        return (vectors[0] for vectors in view.gradients(groups))

    def _choose(self, vectors: Tensor, size: int) -> Coreset:
        return cover(vectors, size)
