"""Random pools of candidates, each class with its share of every pool, and what is kept of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BALANCES = ("equal", "proportional")


class Pool(NamedTuple):
    """Candidates of one pool, sorted by class: its class `g` has rows `starts[g]:starts[g + 1]` and keeps `sizes[g]`."""

    indices: Tensor
    starts: Tensor
    sizes: Tensor
    stands_for: Tensor
    """How many examples of the full data one candidate of class `g` speaks for."""


class Row(NamedTuple):
    """Pools one after the other, as few tensors: what is done to all of them is as fast for many as for one."""

    indices: Tensor
    lengths: Tensor
    """Candidates of each class of each pool."""
    sizes: Tensor
    stands_for: Tensor
    classes: Tensor
    """How many classes each pool has."""

    @classmethod
    def of(cls, pools: Sequence[Pool]) -> Row:
        """These pools in a row."""
        indices, starts, sizes, stands_for = (torch.cat(column) for column in zip(*pools, strict=True))
        classes = torch.tensor([len(pool.sizes) for pool in pools])
        within = torch.ones(len(starts) - 1, dtype=torch.bool)
        within[(torch.cumsum(classes + 1, 0) - 1)[:-1]] = False  # from the end of a pool to the start of the next
        return cls(indices, starts.diff()[within], sizes, stands_for, classes)

    @property
    def starts(self) -> Tensor:
        """Where each class of each pool begins, and the end."""
        return torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(self.lengths, 0)])

    def pools(self) -> list[Pool]:
        """Cut apart again."""
        ends, starts = torch.cumsum(self.classes, 0), self.starts
        begin = starts[ends - self.classes]
        pool = torch.repeat_interleave(torch.arange(len(self.classes)), self.classes)
        own_starts = torch.zeros(len(pool) + len(self.classes), dtype=torch.int64)
        own_starts[torch.arange(len(pool)) + pool + 1] = starts[1:] - begin[pool]
        classes = self.classes.tolist()
        columns = (
            self.indices.split((starts[ends] - begin).tolist()),
            own_starts.split([count + 1 for count in classes]),
            self.sizes.split(classes),
            self.stands_for.split(classes),
        )
        return [Pool(*parts) for parts in zip(*columns, strict=True)]


def quotas(
    labels: Tensor, size: int, balance: str, generator: torch.Generator, *, at_most: Tensor | None = None
) -> Tensor:
    """`(classes,)` how many examples of each class to keep; they add up to `size`.

    `"equal"`: the same of each class, as the papers do; a class that has fewer gives all it has, and the others make up
    for it. `"proportional"`: in proportion to the class, but at least one. No class gives more than `at_most` `(classes,)`,
    by default the examples that it has.
    """
    counts = torch.bincount(labels)
    limit = counts if at_most is None else at_most
    present = limit > 0
    if balance == "equal":
        level = _level(limit, size)
        share, quota = present.double() / present.sum() * size, limit.clamp(max=level)
    elif balance == "proportional":
        share = counts.double() / len(labels) * size
        quota = torch.minimum(share.floor().long(), limit)
        if size >= int(present.sum()):
            quota = torch.maximum(quota, present.long())
    else:
        raise ValueError(f"balance must be one of {BALANCES}, got {balance!r}")
    # What is left over goes to the largest remainders, ties at random; a surplus is taken back from the largest.
    remainder = share - share.floor() + 1e-6 * torch.rand(len(share), generator=generator, dtype=torch.float64)
    while int(quota.sum()) > size:
        quota[quota.argmax()] -= 1
    while left := size - int(quota.sum()):
        remainder[quota >= limit] = -1  # a class that already gives all it has gives no more
        takers = torch.argsort(remainder, descending=True)[: min(left, int((remainder >= 0).sum()))]
        quota[takers] += 1
    return quota


def _level(counts: Tensor, size: int) -> int:
    """The most that every class can give, as far as it goes, without exceeding `size` together."""
    low, high = 0, size
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if int(counts.clamp(max=middle).sum()) <= size else (low, middle - 1)
    return low


def draw_pools(
    labels: Tensor, size: int, *, keep: int, pool_size: int, balance: str, generator: torch.Generator
) -> list[Pool]:
    """Deals random examples into `ceil(size / keep)` pools of about `pool_size` candidates, of which `keep` stay.

    No example is in two pools, so nothing is looked at twice in one selection. Each pool holds every class in equal
    number, or, with more classes than `keep`, a random `keep` of them in turn.
    """
    quota = quotas(labels, size, balance, generator)
    counts = torch.bincount(labels, minlength=len(quota))
    candidates = torch.minimum(counts, (quota.double() * pool_size / keep).round().long()).maximum(quota)
    n_pools = -(-size // keep)
    # Tickets, one for each example to keep, dealt class by class in rounds: cutting the row into pools balances them.
    classes = torch.repeat_interleave(torch.arange(len(quota)), quota)
    turn = torch.cat([torch.arange(int(q)) for q in quota]) if size else torch.empty(0, dtype=torch.int64)
    dealt = torch.argsort(turn.double() + torch.rand(size, generator=generator, dtype=torch.float64))
    pool_of = torch.empty(size, dtype=torch.int64)
    pool_of[dealt] = torch.arange(size) * n_pools // size
    cells, kept = torch.unique(torch.stack([classes, pool_of]), dim=1, return_counts=True)  # sorted by class, then pool
    before = torch.cumsum(kept, 0) - kept
    first_of_class = (torch.cumsum(quota, 0) - quota)[cells[0]]
    take, need = candidates[cells[0]], quota[cells[0]].clamp(min=1)
    start = (before - first_of_class) * take // need
    stop = (before - first_of_class + kept) * take // need
    shuffled = torch.randperm(len(labels), generator=generator)
    by_class = shuffled[torch.argsort(labels[shuffled], stable=True)]
    class_start = (torch.cumsum(counts, 0) - counts)[cells[0]]
    stands_for = counts[cells[0]].double() / take.double()
    order = torch.argsort(cells[1], stable=True)
    lengths = (stop - start)[order]
    rows = torch.arange(int(lengths.sum())) + torch.repeat_interleave(
        (class_start + start)[order] - (torch.cumsum(lengths, 0) - lengths), lengths
    )
    row = Row(by_class[rows], lengths, kept[order], stands_for[order], torch.bincount(cells[1], minlength=n_pools))
    return row.pools()
