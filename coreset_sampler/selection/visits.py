"""How visits add up to means: one visit of each example at a time, and what a later one counts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor


def visits(indices: Tensor) -> Iterator[Tensor | slice]:
    """Rows in groups in which no index is twice: the first time of each, then the second, and so on.

    Example: indices `[7, 3, 7, 7]` give the rows `[0, 1]`, `[2]` and `[3]`.
    """
    found = np.sort(indices.numpy())
    if not (found[1:] == found[:-1]).any():
        if len(indices):
            yield slice(None)
        return
    order = torch.argsort(indices, stable=True)
    ranked = indices[order]
    new = torch.ones(len(ranked), dtype=torch.bool)
    new[1:] = ranked[1:] != ranked[:-1]
    place = torch.arange(len(ranked))
    start = torch.where(new, place, 0).cummax(0).values
    times = torch.empty_like(place).index_put_((order,), place - start)  # that an index came before
    for time in range(int(times.max()) + 1):
        yield (times == time).nonzero()[:, 0]


def later_more(k: Tensor) -> Tensor:
    """The weight `(b,)` of a k-th visit among k when the j-th counts min(j, 3)² times: 1, 4/5, 9/14, 9/23, ..."""
    return k.clamp(max=3).square() / (9 * k - 13).clamp(min=1)


def to_mean(mean: Tensor, at: Tensor, new: Tensor, weight: Tensor, first: Tensor | None) -> None:
    """Moves the means at `at`, all different; those of a `first` visit, if there are any, are what is new."""
    old = mean.index_select(0, at)
    if new.ndim == 2:
        weight, first = weight[:, None], None if first is None else first[:, None]
    moved = (new - old).mul_(weight).add_(old)
    mean.index_copy_(0, at, moved if first is None else torch.where(first, new, moved))
