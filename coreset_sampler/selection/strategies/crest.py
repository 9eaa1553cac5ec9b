"""CREST: the same pools and covering as stable coresets, at the current weights only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..coreset import Coreset
from ..posterior import PointMass
from ..types import Balance, View
from .stable import InPools, Stable


@dataclass(frozen=True)
class Crest:
    """Keeps the examples whose gradients at the current weights cover those of random pools (Yang et al., 2023).

    This is `Stable` with a point mass for a posterior. The paper's rule for when to select anew, a quadratic model of the
    loss, is left to `reselect_every` and `max_overhead`. Cost: `size * pool_size / keep` candidates through the model.

    Args:
        pool_size: candidates per pool, about.
        keep: how many of them stay.
        balance: `"equal"` keeps as many of each class, `"proportional"` in proportion to their size.
        confidence_exponent: above 0, labels that the model finds unlikely take part less often; see `Stable`.
        rescore_every: selections that one scoring pass serves, each with new pools.
    """

    pool_size: int = 500
    keep: int = 128
    balance: Balance = "equal"
    confidence_exponent: float = 0.0
    rescore_every: int = 1

    State: ClassVar[type | None] = InPools

    def __post_init__(self) -> None:
        self._stable()

    def select(
        self, view: View, size: int, state: InPools | None, generator: torch.Generator
    ) -> tuple[Coreset, InPools]:
        """As `Stable` does, with one draw: the model as it is."""
        return self._stable().select(view, size, state, generator)

    def _stable(self) -> Stable:
        return Stable(
            PointMass(), 1, self.pool_size, self.keep, self.balance, self.confidence_exponent, self.rescore_every
        )
