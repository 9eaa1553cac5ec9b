"""Covers the pools of a selection: facility location within each class of each pool, a batch of pools at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..coreset import Coreset
from ..facility_location import cover_groups
from ..types import View
from .confidence import Predictions, noise_rate
from .pools import Pools, offsets
from .scores import FreshScores, KeptScores, ObservedScores

_ROWS_AT_ONCE = 4096  # candidates whose gradients are in memory together


class _Part(NamedTuple):
    """What a batch of pools gave."""

    kept: Coreset
    figures: (
        Tensor  # the sum of distances, the candidates covered, the labels that are wrong by expectation, all candidates
    )
    predicted: Predictions | None
    labels: Tensor


def cover_pools(
    view: View,
    pools: Pools,
    scores: FreshScores | KeptScores | ObservedScores,
    *,
    exponent: float,
    generator: torch.Generator,
) -> Coreset:
    """What covers each class of each pool best; pools are shared out over processes.

    With an `exponent` a candidate whose label is right with probability `r` takes part with probability `r ** exponent`.
    """
    # Drawn for the pools of all processes, so that it does not matter whose they are.
    thresholds = torch.rand(len(pools.indices) if exponent else 0, generator=generator, dtype=torch.float64)
    own, rows = pools.take(view.shard(range(len(pools))))
    batches = own.batches(_ROWS_AT_ONCE)
    parts = []
    vectors_of = scores.gradients([batch.indices for batch, _ in batches])
    for (batch, where), vectors in zip(batches, vectors_of, strict=True):
        labels = view.labels[batch.indices]
        if exponent:
            right = scores.confidence(batch, vectors)
            chance = right**exponent - thresholds[rows[where]]
            parts.append(_cover_trusted(batch, vectors, labels, right, chance))
        else:
            kept, cost = _cover(batch, vectors)
            k = len(batch.indices)
            parts.append(_Part(kept, torch.tensor([cost, k, 0.0, k], dtype=torch.float64), None, labels[:0]))
    parts = view.gather(parts)
    _log(view, parts)
    coreset = Coreset.merge(part.kept for part in parts)
    return Coreset(coreset.indices, coreset.weights * len(view.labels) / coreset.weights.sum())


def _cover(pools: Pools, vectors: Tensor) -> tuple[Coreset, float]:
    """What stays of each group, and the sum of distances to it."""
    where, counts, cost = cover_groups(vectors, pools.starts, pools.sizes)
    stands_for = torch.repeat_interleave(pools.stands_for, pools.starts.diff())
    return Coreset(pools.indices[where], counts * stands_for[where]), float(cost.sum())


def _cover_trusted(pools: Pools, vectors: Tensor, labels: Tensor, right: Tensor, margin: Tensor) -> _Part:
    trusted, chosen = _trusted(pools, margin)
    kept, cost = _cover(trusted, vectors[:, chosen])
    figures = [cost, len(chosen), float((1 - right).sum()), len(labels)]
    return _Part(kept, torch.tensor(figures, dtype=torch.float64), Predictions.of(vectors, labels), labels)


def _trusted(pools: Pools, margin: Tensor) -> tuple[Pools, Tensor]:
    """The candidates with a margin over 0, and their rows; in each group at least as many as it keeps, by margin.

    Example: of a group of five that keeps two, the margins `[-0.5, 0.1, -0.2, 0.7, 0.3]` leave rows 1, 3 and 4, and each
    speaks for 5 / 3 of what it did. `[-0.5, -0.4, -0.2, 0.7, -0.3]` leave rows 2 and 3.
    """
    lengths = pools.starts.diff()
    group = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    order = torch.argsort(margin, descending=True, stable=True)
    order = order[torch.argsort(group[order], stable=True)]
    left = torch.zeros_like(lengths).index_add_(0, group, (margin > 0).long()).maximum(pools.sizes)
    rank = torch.arange(len(group)) - pools.starts[:-1][group]
    chosen = order[rank < left[group]].sort().values
    stands_for = pools.stands_for * lengths / left
    return replace(pools, indices=pools.indices[chosen], starts=offsets(left), stands_for=stands_for), chosen


def _log(view: View, parts: list[_Part]) -> None:
    cost, covered, wrong, candidates = torch.stack([part.figures for part in parts]).sum(0).tolist()
    view.log(covering_cost=cost / covered)
    predicted = [part.predicted for part in parts if part.predicted is not None]
    if predicted:
        rate = noise_rate(wrong / candidates, Predictions.joined(predicted), torch.cat([part.labels for part in parts]))
        view.log(**({} if rate is None else {"estimated_noise_rate": rate}))
