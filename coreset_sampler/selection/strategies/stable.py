"""Stable coresets: examples whose gradients stand for the rest, also around the current weights."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..coreset import Coreset
from ..facility_location import cover_groups
from ..posterior import SphericalGaussian
from ..types import Posterior, Strategy, View
from .belief import Said, wrong_share
from .look import AtOnce, PoolByPool, check_settings
from .pools import Pool, Row, draw_pools

_ROWS_AT_ONCE = 4096  # candidates whose gradients are in memory together


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
    `draws` draws of the posterior, which serve all pools of a selection. The default is `SphericalGaussian(0.1, "norm")`,
    in a network without norm layers `SphericalGaussian(0.1, "head")`; `perturbed_parameters` in the sampler's stats says
    how many parameters it perturbs.

    Within a pool each class is covered by its own examples, or with `per_class=False` all by all. `root_mean_square`
    takes the root of the mean square over draws for the mean, as the authors' code does. `balance="proportional"` keeps
    classes in proportion to their size instead of in equal number.

    With `doubt` a candidate whose label is right with probability $r$, by what the draws say, takes part with probability
    $r^{\text{doubt}}$: 0 trusts all labels, 1 goes by the odds, 2 allows for a model that already believes some of the
    wrong ones. The share of wrong labels is estimated on the way (`wrong_labels` in the sampler's stats, unless the model
    cannot tell); see `belief.py`.

    `reuse` is the number of selections, each with new pools, that one look through the model serves. Cost of a look:
    `min(n, reuse * size * pool_size / keep)` candidates through the model, `draws` times each less what the draws share.
    With `reuse=1` gradients are dropped as soon as their pools are done; else `draws * classes` numbers a candidate stay.
    """
    check_settings(draws=draws, balance=balance, doubt=doubt, reuse=reuse)
    if not 1 <= keep <= pool_size:
        raise ValueError(f"keep must be between 1 and pool_size={pool_size}, got {keep}")
    return partial(
        cover_pools,
        posterior=SphericalGaussian(layers="auto") if posterior is None else posterior,
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
    deal = partial(draw_pools, size=size, keep=keep, pool_size=pool_size, balance=balance, generator=generator)
    look: PoolByPool | AtOnce
    if reuse == 1:
        look = PoolByPool(view, deal, posterior=posterior, draws=draws, generator=generator)
    else:
        ask = partial(AtOnce, wanted=round(reuse * size * pool_size / keep), balance=balance, reuse=reuse)
        look = ask(view, deal, posterior=posterior, draws=draws, generator=generator)
    # Luck is drawn for the pools of all processes, so that it does not matter whose they are.
    lucks = [torch.rand(len(pool.indices), generator=generator, dtype=torch.float64) for pool in look.pools if doubt]
    luck = torch.cat([torch.zeros(0, dtype=torch.float64), *view.mine(lucks)])
    batches = _together(view.mine(look.pools))
    groups = [torch.cat([pool.indices for pool in some]) for some in batches]
    parts: list[tuple[Coreset, Tensor, tuple[Said, Tensor] | None]] = []
    for some, indices, vectors in zip(batches, groups, look.gradients(groups), strict=True):
        pool, doubted, said = _joined(some), 0.0, None
        if doubt:
            said = Said.of(vectors, view.labels[indices]), view.labels[indices]
            right = look.belief(some, indices, vectors)
            doubted = float((1 - right).sum())
            pool, vectors = _believed(pool, vectors, right**doubt - luck[: len(indices)])
            luck = luck[len(indices) :]
        classes = None if per_class else [len(p.sizes) for p in some]
        kept, cost = _covered(pool, vectors, classes, rms=root_mean_square)
        figures = [cost, len(pool.indices), doubted, len(indices)]
        parts.append((kept, torch.tensor(figures, dtype=torch.float64), said))
    parts = view.gather(parts)
    cost, covered, doubted, seen = torch.stack([figures for _, figures, _ in parts]).sum(0).tolist()
    view.report(covering_cost=cost / covered)
    asked = [said for _, _, said in parts if said is not None]
    if asked:
        everyone, labels = Said.joined([said for said, _ in asked]), torch.cat([own for _, own in asked])
        wrong = wrong_share(doubted / seen, everyone, labels)
        view.report(**({} if wrong is None else {"wrong_labels": wrong}))
    coreset = Coreset.merge(part for part, _, _ in parts)
    return Coreset(coreset.indices, coreset.weights * len(view.labels) / coreset.weights.sum())


def _covered(pool: Pool, vectors: Tensor, classes: list[int] | None, *, rms: bool) -> tuple[Coreset, float]:
    """What stays of each group, or with `classes`, so many to a pool, of each pool; and the sum of distances to it."""
    speaks_for = torch.repeat_interleave(pool.stands_for, pool.starts.diff())
    if classes is not None:
        pool = _whole_pools(pool, classes)
    where, counts, cost = cover_groups(vectors, pool.starts, pool.sizes, rms=rms)
    weights = counts * speaks_for[where]
    if classes is not None:  # candidates of several classes speak for different numbers of examples
        weights = _stood_for(vectors, pool, where, speaks_for, rms=rms)
    return Coreset(pool.indices[where], weights), float(cost.sum())


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
    row = Row.of(pools)
    return Pool(row.indices, row.starts, row.sizes, row.stands_for)


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
