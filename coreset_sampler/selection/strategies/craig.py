"""CRAIG: facility location over the whole training set at the current weights."""

from __future__ import annotations

from functools import partial

from ..facility_location import cover
from ..types import Strategy
from .per_class import gradients, select_per_class


def craig(*, balance: str = "equal") -> Strategy:
    r"""Keeps in each class the examples whose gradients cover those of all its others (Mirzasoleiman et al., 2020).

    Greedily minimises $\sum_i \min_{j \in S} \lVert g_j(w) - g_i(w) \rVert$ with logit gradients. Cost: every example
    through the model once, and greedy over $n_c$ examples of a class without their distance matrix.
    """
    return partial(
        select_per_class,
        balance=balance,
        look=gradients,
        choose=cover,
    )
