"""CREST: the same pools and covering as stable coresets, at the current weights only."""

from __future__ import annotations

from ..posterior import PointMass
from ..types import Strategy
from .stable import stable


def crest(
    *,
    pool_size: int = 500,
    keep: int = 128,
    per_class: bool = True,
    balance: str = "equal",
    doubt: float = 0.0,
    reuse: int = 1,
) -> Strategy:
    """Keeps the examples whose gradients at the current weights cover those of random pools (Yang et al., 2023).

    This is `stable` with a point mass for a posterior. The paper's rule for when to select anew, a quadratic model of the
    loss, is left to `reselect_every` and `max_overhead`. Cost: `size * pool_size / keep` candidates through the model.
    """
    return stable(
        posterior=PointMass(),
        draws=1,
        pool_size=pool_size,
        keep=keep,
        per_class=per_class,
        balance=balance,
        doubt=doubt,
        reuse=reuse,
    )
