"""Stable coresets: examples whose gradients stand for the rest, also around the current weights."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from ..coreset import Coreset
from ..facility_location import cover_groups
from ..posterior import SphericalGaussian
from ..types import Posterior, Strategy, View
from .belief import label_belief
from .pools import BALANCES, Pool, draw_pools

_ROWS_AT_ONCE = 4096  # candidates whose gradients are in memory together
_ROWS_A_SHARE = 256  # small enough to share a look out evenly over processes


def stable(
    *,
    posterior: Posterior | None = None,
    draws: int = 4,
    pool_size: int = 500,
    keep: int = 128,
    per_class: bool = True,
    root_mean_square: bool = False,
    balance: str = "equal",
    doubt: float = 0.0,
    reuse: int = 1,
) -> Strategy:
    r"""Keeps the examples whose gradients cover those of all candidates under draws of the posterior.

    For each random pool $V$ of about `pool_size` candidates, `keep` of them minimise greedily
    $\sum_{i \in V} \min_{j \in S} \mathbb E_\delta \lVert g_j(w + \delta) - g_i(w + \delta) \rVert$ with
    $g = \mathrm{softmax}(\text{logits}) - \mathrm{onehot}(y)$ (Chang and Khanna, 2025). The expectation is the mean over
    `draws` draws of the posterior (default: `SphericalGaussian(0.1, "norm")`), which serve all pools of a selection.

    Within a pool each class is covered by its own examples, or with `per_class=False` all by all. `root_mean_square`
    takes the root of the mean square over draws for the mean, as the authors' code does. `balance="proportional"` keeps
    classes in proportion to their size instead of in equal number.

    With `doubt` a candidate whose label is right with probability $r$, by what the draws say, takes part with probability
    $r^{\text{doubt}}$: 0 trusts all labels, 1 goes by the odds, 2 allows for a model that already believes some of the
    wrong ones. The share of wrong labels is estimated on the way (`wrong_labels` in the sampler's stats); see `belief.py`.

    `reuse` is the number of selections, each with new pools, that one look through the model serves. Cost of a look:
    `min(n, reuse * size * pool_size / keep)` candidates through the model, `draws` times each less what the draws share.
    With `reuse=1` gradients are dropped as soon as their pools are done; else `draws * classes` numbers a candidate stay.
    """
    if draws < 1:
        raise ValueError(f"draws must be at least 1, got {draws}")
    if not 1 <= keep <= pool_size:
        raise ValueError(f"keep must be between 1 and pool_size={pool_size}, got {keep}")
    if balance not in BALANCES:
        raise ValueError(f"balance must be one of {BALANCES}, got {balance!r}")
    if not 0 <= doubt < math.inf:
        raise ValueError(f"doubt must be 0 or more, 0 to trust all labels, got {doubt}")
    if reuse < 1:
        raise ValueError(f"reuse must be at least 1 selection, got {reuse}")
    return partial(
        cover_pools,
        posterior=SphericalGaussian() if posterior is None else posterior,
        draws=draws,
        pool_size=pool_size,
        keep=keep,
        per_class=per_class,
        root_mean_square=root_mean_square,
        balance=balance,
        doubt=doubt,
        reuse=reuse,
    )


def cover_pools(
    view: View,
    size: int,
    generator: torch.Generator,
    *,
    posterior: Posterior,
    draws: int,
    pool_size: int,
    keep: int,
    per_class: bool,
    root_mean_square: bool,
    balance: str,
    doubt: float,
    reuse: int,
) -> Coreset:
    """The selection itself: pools, draws, gradients, facility location; pools are shared out over processes."""
    keep = min(keep, size)
    draw = partial(draw_pools, keep=keep, pool_size=pool_size, balance=balance, generator=generator)
    if reuse == 1:
        pools = draw(view.labels, size)
        batches = _together(view.mine(pools))
        indices = (torch.cat([pool.indices for pool in some]) for some in batches)
        gradients = view.gradients(indices, posterior.draw(view, draws, generator))
    else:
        wanted = min(len(view.labels), round(reuse * size * pool_size / keep))
        candidates, table = _looked_at(
            view, wanted, generator, posterior=posterior, draws=draws, balance=balance, reuse=reuse
        )
        pools = draw(view.labels[candidates], size)  # positions among the candidates
        counts = torch.bincount(view.labels)
        looked = (
            counts / torch.bincount(view.labels[candidates], minlength=len(counts)).double()
        )  # examples a candidate
        batches = _together(view.mine(pools))
        gradients = (table[:, torch.cat([pool.indices for pool in some])] for some in batches)
        if doubt:  # over all that was looked at: more to estimate the share of wrong labels from than a pool
            all_right = label_belief(table, view.labels[candidates], torch.tensor([len(candidates)]))
    if doubt:  # drawn for the pools of all processes, so that it does not matter whose they are
        draws_of_all = [torch.rand(len(pool.indices), generator=generator, dtype=torch.float64) for pool in pools]
        lucks = iter(view.mine(draws_of_all))
    parts: list[tuple[Coreset, Tensor]] = []
    for some, vectors in zip(batches, gradients, strict=True):
        pool = _joined(some)
        if doubt and reuse > 1:
            right = all_right[pool.indices]
        elif doubt:
            right = label_belief(vectors, view.labels[pool.indices], torch.tensor([len(p.indices) for p in some]))
        if reuse > 1:
            pool = pool._replace(indices=candidates[pool.indices])
            share = looked[view.labels[pool.indices[pool.starts[:-1]]]]
            pool = pool._replace(stands_for=pool.stands_for * share)
        looked_at, doubted = len(pool.indices), 0.0
        if doubt:
            doubted = float((1 - right).sum())
            luck = torch.cat([next(lucks) for _ in some])
            pool, vectors = _believed(pool, vectors, right**doubt - luck)
        speaks_for = torch.repeat_interleave(pool.stands_for, pool.starts.diff())
        if not per_class:
            pool = _whole_pools(pool, [len(p.sizes) for p in some])
        where, counts, cost = cover_groups(vectors, pool.starts, pool.sizes, rms=root_mean_square)
        if per_class:
            weights = counts * speaks_for[where]
        else:
            weights = _stood_for(vectors, pool, where, speaks_for, rms=root_mean_square)
        figures = torch.tensor([float(cost.sum()), len(pool.indices), doubted, looked_at], dtype=torch.float64)
        parts.append((Coreset(pool.indices[where], weights), figures))
    parts = view.gather(parts)
    cost_in_all, covered, doubts, candidates_seen = torch.stack([figures for _, figures in parts]).sum(0).tolist()
    view.report(covering_cost=cost_in_all / covered)
    if doubt:
        view.report(wrong_labels=doubts / candidates_seen)
    coreset = Coreset.merge(part for part, _ in parts)
    return Coreset(coreset.indices, coreset.weights * len(view.labels) / coreset.weights.sum())


def _looked_at(
    view: View,
    wanted: int,
    generator: torch.Generator,
    *,
    posterior: Posterior,
    draws: int,
    balance: str,
    reuse: int,
) -> tuple[Tensor, Tensor]:
    """Candidates `(k,)` and their gradients `(draws, k, classes)`: those of the last look, or of a new one if due."""
    left = int(view.memory.get("uses_left", torch.zeros(())))
    if left == 0:
        candidates = _random_of_each_class(view.labels, wanted, balance, generator)
        samples = posterior.draw(view, draws, generator)
        chunks = list(candidates.split(_ROWS_A_SHARE))
        parts = view.gather(list(view.gradients(view.mine(chunks), samples)))
        view.memory.update(candidates=candidates, gradients=torch.cat(parts, 1))
        left = reuse
    view.memory["uses_left"] = torch.tensor(left - 1)
    return view.memory["candidates"], view.memory["gradients"]


def _random_of_each_class(labels: Tensor, wanted: int, balance: str, generator: torch.Generator) -> Tensor:
    """`wanted` random examples: classes in equal number as far as they go, or in proportion; one of each first."""
    shuffled = torch.randperm(len(labels), generator=generator)
    order = shuffled[torch.argsort(labels[shuffled], stable=True)]
    counts = torch.bincount(labels)
    own = labels[order]
    rank = torch.arange(len(labels)) - (torch.cumsum(counts, 0) - counts)[own]
    turn = rank + torch.rand(len(labels), generator=generator, dtype=torch.float64) * (rank > 0)
    if balance == "proportional":
        turn = turn / counts[own]
    return order[torch.argsort(turn)[:wanted]]


def _together(pools: list[Pool]) -> list[list[Pool]]:
    """Whole pools in batches of about `_ROWS_AT_ONCE` candidates."""
    batches: list[list[Pool]] = []
    rows = _ROWS_AT_ONCE
    for pool in pools:
        if rows >= _ROWS_AT_ONCE:
            batches.append([])
            rows = 0
        batches[-1].append(pool)
        rows += len(pool.indices)
    return batches


def _joined(pools: list[Pool]) -> Pool:
    """Several pools as one list of groups, a class of a pool each."""
    lengths = torch.cat([pool.starts.diff() for pool in pools])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(lengths, 0)])
    indices, _, sizes, stands_for = (torch.cat(column) for column in zip(*pools, strict=True))
    return Pool(indices, starts, sizes, stands_for)


def _whole_pools(pool: Pool, classes: list[int]) -> Pool:
    """The groups of each pool, so many classes, put together to one."""
    ends = torch.cumsum(torch.tensor([0, *classes]), 0)
    sizes = torch.stack([part.sum() for part in pool.sizes.split(classes)])
    return Pool(pool.indices, pool.starts[ends], sizes, torch.ones(len(classes), dtype=torch.float64))


def _stood_for(vectors: Tensor, pool: Pool, where: Tensor, speaks_for: Tensor, *, rms: bool) -> Tensor:
    """The examples that each pick stands for where candidates of several classes speak for different numbers of them."""
    weights = []
    picked = where.split(pool.sizes.tolist())
    for picks, begin, end in zip(picked, pool.starts[:-1].tolist(), pool.starts[1:].tolist(), strict=True):
        norms = torch.cdist(vectors[:, begin:end].double(), vectors[:, picks].double())
        owner = (norms.square().mean(0) if rms else norms.mean(0)).argmin(1)
        owner[picks - begin] = torch.arange(len(picks))
        weights.append(torch.zeros(len(picks), dtype=torch.float64).index_add_(0, owner, speaks_for[begin:end]))
    return torch.cat(weights)


def _believed(pool: Pool, vectors: Tensor, margin: Tensor) -> tuple[Pool, Tensor]:
    """The candidates with a margin over 0 and their gradients; in each group at least as many as it keeps, by margin."""
    lengths = pool.starts.diff()
    group = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    order = torch.argsort(margin, descending=True, stable=True)
    order = order[torch.argsort(group[order], stable=True)]
    kept = torch.zeros_like(lengths).index_add_(0, group, (margin > 0).long()).maximum(pool.sizes)
    rank = torch.arange(len(group)) - pool.starts[:-1][group]
    chosen = order[rank < kept[group]].sort().values
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(kept, 0)])
    stands_for = pool.stands_for * lengths / kept
    return Pool(pool.indices[chosen], starts, pool.sizes, stands_for), vectors[:, chosen]
