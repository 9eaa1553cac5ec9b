"""CRAIG: facility location over the whole training set at the current weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..coreset import Coreset
from ..facility_location import cover
from ..types import Balance, View
from .per_class import gradients, select_per_class
from .settings import check_balance


@dataclass(frozen=True)
class Craig:
    r"""Keeps in each class the examples whose gradients cover those of all its others (Mirzasoleiman et al., 2020).

    Greedily minimises $\sum_i \min_{j \in S} \lVert g_j(w) - g_i(w) \rVert$ with logit gradients. Cost: every example
    through the model once, and greedy over $n_c$ examples of a class without their distance matrix.

    Args:
        balance: `"equal"` keeps as many of each class, `"proportional"` in proportion to their size.
    """

    balance: Balance = "equal"

    State: ClassVar[type | None] = None

    def __post_init__(self) -> None:
        check_balance(self.balance)

    def select(self, view: View, size: int, state: None, generator: torch.Generator) -> tuple[Coreset, None]:
        """Class by class over the whole training set."""
        return select_per_class(view, size, generator, balance=self.balance, score=gradients, choose=cover), None
