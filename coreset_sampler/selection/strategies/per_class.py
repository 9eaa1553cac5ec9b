"""Selection class by class over the whole training set: the frame that Craig, KCenter and Herding share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from ..coreset import Coreset
from ..types import Balance, View
from .pools import quotas


def select_per_class(
    view: View,
    size: int,
    generator: torch.Generator,
    *,
    balance: Balance,
    score: Callable[[View, Iterable[Tensor]], Iterator[Tensor]],
    choose: Callable[[Tensor, int], Coreset],
) -> Coreset:
    """Applies `choose(vectors of one class, how many)` to each class; classes are shared out over processes."""
    quota = quotas(view.labels, size, balance, generator)
    classes = view.shard(quota.nonzero().flatten().tolist())
    members = [(view.labels == c).nonzero().flatten() for c in classes]
    parts = []
    for c, indices, vectors in zip(classes, members, score(view, members), strict=True):
        _check_finite(vectors, indices)
        chosen = choose(vectors, int(quota[c]))
        parts.append(Coreset(indices[chosen.indices], chosen.weights))
    return Coreset.merge(view.gather(parts))


def _check_finite(vectors: Tensor, indices: Tensor) -> None:
    bad = ~torch.isfinite(vectors).all(1)
    if bool(bad.any()):
        raise ValueError(
            f"the model gives NaN or infinite numbers for {int(bad.sum())} of {len(indices)} examples of a class (the first "
            f"is example {int(indices[int(bad.nonzero()[0])])}). Has training diverged?"
        )


def gradients(view: View, groups: Iterable[Tensor]) -> Iterator[Tensor]:
    """Scores: the logit gradients at the current weights."""
    return (vectors[0] for vectors in view.gradients(groups))


def embeddings(view: View, groups: Iterable[Tensor]) -> Iterator[Tensor]:
    """Scores: what the head receives."""
    return view.embeddings(groups)
