"""Random pools of candidates in one flat tensor, each class with its share of every pool, and what is kept of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..types import Balance


@dataclass(frozen=True, eq=False)
class Pools:
    """The candidates of all pools in one flat tensor with offsets: a pool is a run of groups, a group one class of one pool.

    Example: pool 0 keeps one of examples 3, 8 (class 0) and one of 5, 1, 2 (class 1); pool 1 keeps two of 4, 7, 9 (class 0).

        indices    = [3, 8, 5, 1, 2, 4, 7, 9]
        starts     = [0, 2, 5, 8]        group g is indices[starts[g]:starts[g + 1]]
        sizes      = [1, 1, 2]           group g keeps sizes[g] of them
        stands_for = [6.0, 5.0, 6.0]     examples of the full data that one candidate of group g speaks for
        bounds     = [0, 2, 3]           pool p is groups bounds[p]:bounds[p + 1]

    `lengths` is then `[5, 3]`, `take([1])` holds the indices `[4, 7, 9]`, and `batches(5)` is two slices, one pool each.
    """

    indices: Tensor
    starts: Tensor
    sizes: Tensor
    stands_for: Tensor
    bounds: Tensor

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def lengths(self) -> Tensor:
        """Candidates of each pool."""
        return self.starts[self.bounds].diff()

    def take(self, pools: Sequence[int]) -> tuple[Pools, Tensor]:
        """Some of the pools, and the positions of their candidates in `indices`."""
        if len(pools) == len(self):
            return self, torch.arange(len(self.indices))
        chosen = torch.tensor(pools, dtype=torch.int64)
        n_groups = self.bounds.diff()[chosen]
        groups = runs(self.bounds[chosen], n_groups)
        n_rows = self.starts.diff()[groups]
        rows = runs(self.starts[groups], n_rows)
        sizes, stands_for = self.sizes[groups], self.stands_for[groups]
        return Pools(self.indices[rows], offsets(n_rows), sizes, stands_for, offsets(n_groups)), rows

    def batches(self, rows: int) -> list[tuple[Pools, slice]]:
        """Whole pools, a little over `rows` candidates at a time, and where these are in `indices`; all are views."""
        ends = torch.cumsum(self.lengths, 0).tolist()
        found, first = [], 0
        for pool, end in enumerate(ends, 1):
            begin = ends[first - 1] if first else 0
            if end - begin >= rows or pool == len(ends):
                found.append((self._between(first, pool), slice(begin, end)))
                first = pool
        return found

    def _between(self, first: int, last: int) -> Pools:
        groups = slice(int(self.bounds[first]), int(self.bounds[last]))
        starts = self.starts[groups.start : groups.stop + 1]
        return Pools(
            self.indices[int(starts[0]) : int(starts[-1])],
            starts - starts[0],
            self.sizes[groups],
            self.stands_for[groups],
            self.bounds[first : last + 1] - self.bounds[first],
        )


def offsets(lengths: Tensor) -> Tensor:
    """Where each of some runs begins, and the end: `[2, 3]` gives `[0, 2, 5]`."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(lengths, 0)])


def runs(begin: Tensor, lengths: Tensor) -> Tensor:
    """Numbers that rise from each `begin`, so many: `[7, 1]` and `[2, 3]` give `[7, 8, 1, 2, 3]`."""
    starts = offsets(lengths)
    return torch.arange(int(starts[-1])) + torch.repeat_interleave(begin - starts[:-1], lengths)


def quotas(
    labels: Tensor, size: int, balance: Balance, generator: torch.Generator, *, at_most: Tensor | None = None
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
    else:
        share = counts.double() / len(labels) * size
        quota = torch.minimum(share.floor().long(), limit)
        if size >= int(present.sum()):
            quota = torch.maximum(quota, present.long())
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


def first_of_each_class(order: Tensor, labels: Tensor, quota: Tensor) -> Tensor:
    """Of examples in this `order` the first of each class, as many as its `quota` says.

    Example: the order `[1, 3, 0, 2]` of labels `[0, 0, 1, 1]` is by class `[1, 0, 3, 2]` with ranks `[0, 1, 0, 1]`; one of
    each class are those of rank 0: `[1, 3]`.
    """
    first = order[torch.argsort(labels[order], stable=True)]
    counts = torch.bincount(labels, minlength=len(quota))
    rank = torch.arange(len(first)) - (torch.cumsum(counts, 0) - counts)[labels[first]]
    return first[rank < quota[labels[first]]]


def class_weights(labels: Tensor, picks: Tensor, quota: Tensor) -> Tensor:
    """The weights of `picks`, which are `quota` of each class: those of a class sum to its size, all to `n`."""
    counts = torch.bincount(labels, minlength=len(quota))
    weights = (counts / quota.clamp(min=1).double())[labels[picks]]
    return weights * len(labels) / weights.sum()


def fewest_first(times: Tensor, generator: torch.Generator) -> Tensor:
    """All examples `(n,)`, those first that were candidates the fewest `times`, in random order among equals."""
    shuffled = torch.randperm(len(times), generator=generator)
    return shuffled[torch.argsort(times[shuffled], stable=True)]


def draw_pools(
    labels: Tensor, size: int, *, times: Tensor, keep: int, pool_size: int, balance: Balance, generator: torch.Generator
) -> Pools:
    """Deals random examples into `ceil(size / keep)` pools of about `pool_size` candidates, of which `keep` stay.

    No example is in two pools, so nothing is scored twice in one selection. Of each class those are dealt that were
    candidates the fewest `times` `(n,)`: selections go through a class without replacement. Each pool holds every class in
    equal number, or, with more classes than `keep`, a random `keep` of them in turn.
    """
    quota = quotas(labels, size, balance, generator)
    counts = torch.bincount(labels, minlength=len(quota))
    candidates = torch.minimum(counts, (quota.double() * pool_size / keep).round().long()).maximum(quota)
    n_pools = -(-size // keep)
    (own, pool), kept = _cells(quota, size, n_pools, generator)
    before = torch.cumsum(kept, 0) - kept - (torch.cumsum(quota, 0) - quota)[own]  # kept of the class in earlier pools
    take, need = candidates[own], quota[own].clamp(min=1)
    start, stop = before * take // need, (before + kept) * take // need
    in_turn = fewest_first(times, generator)
    by_class = in_turn[torch.argsort(labels[in_turn], stable=True)]
    begin = (torch.cumsum(counts, 0) - counts)[own] + start
    stands_for = counts[own].double() / take.double()
    order = torch.argsort(pool, stable=True)  # the cells by pool, then class
    lengths = (stop - start)[order]
    bounds = offsets(torch.bincount(pool, minlength=n_pools))
    return Pools(by_class[runs(begin[order], lengths)], offsets(lengths), kept[order], stands_for[order], bounds)


def _cells(quota: Tensor, size: int, n_pools: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The classes and pools that have examples to keep `(2, cells)`, by class, then pool; and how many `(cells,)`.

    Tickets, one for each example to keep, are dealt class by class in rounds: cutting the row into pools balances them.
    """
    classes = torch.repeat_interleave(torch.arange(len(quota)), quota)
    turn = runs(torch.zeros_like(quota), quota)
    dealt = torch.argsort(turn.double() + torch.rand(size, generator=generator, dtype=torch.float64))
    pool_of = torch.empty(size, dtype=torch.int64)
    pool_of[dealt] = torch.arange(size) * n_pools // size
    cells, kept = torch.unique(torch.stack([classes, pool_of]), dim=1, return_counts=True)
    return cells, kept
