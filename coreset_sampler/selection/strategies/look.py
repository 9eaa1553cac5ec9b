"""What the model says of candidates: asked now, pool by pool, or at one look that serves several selections."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..types import Draw, Posterior, View
from .belief import Said, knows_labels, label_belief, label_probability
from .pools import BALANCES, Pool, Row

Deal = Callable[[Tensor], list[Pool]]
"""Deals examples with these labels into pools."""

ROWS_A_SHARE = 256  # small enough to share a look out evenly over processes


def check_settings(*, draws: int, balance: str, doubt: float, reuse: int) -> None:
    """What strategies that look at candidates have in common."""
    if draws < 1:
        raise ValueError(f"draws must be at least 1, got {draws}")
    if balance not in BALANCES:
        raise ValueError(f"balance must be one of {BALANCES}, got {balance!r}")
    if not 0 <= doubt < math.inf:
        raise ValueError(f"doubt must be 0 or more, 0 to trust all labels, got {doubt}")
    if reuse < 1:
        raise ValueError(f"reuse must be at least 1 selection, got {reuse}")


class PoolByPool:
    """Asks the model when the gradients of a pool are wanted and keeps nothing."""

    def __init__(self, view: View, deal: Deal, *, posterior: Posterior, draws: int, generator: torch.Generator) -> None:
        self._view = view
        self.pools = deal(view.labels)
        self._samples: list[Draw] = posterior.draw(view, draws, generator)

    def gradients(self, groups: Sequence[Tensor]) -> Iterator[Tensor]:
        """For each group of indices `(k,)` the gradients `(draws, k, classes)`."""
        return self._view.gradients(groups, self._samples)

    def belief(self, pools: Sequence[Pool], indices: Tensor, gradients: Tensor) -> Tensor:
        """How likely each label is right `(k,)`, judged within its pool."""
        lengths = torch.tensor([len(pool.indices) for pool in pools])
        q = label_probability(gradients, self._view.labels[indices])
        return label_belief(q, lengths, gradients.shape[-1])


class AtOnce:
    """Asks for enough candidates at once to deal them into new pools `reuse` times; they stay in `view.memory`."""

    def __init__(
        self,
        view: View,
        deal: Deal,
        *,
        posterior: Posterior,
        draws: int,
        generator: torch.Generator,
        wanted: int,
        balance: str,
        reuse: int,
    ) -> None:
        left = int(view.memory.get("uses_left", torch.zeros(())))
        if left == 0:
            candidates = random_of_each_class(view.labels, min(wanted, len(view.labels)), balance, generator)
            samples = posterior.draw(view, draws, generator)
            chunks = list(candidates.split(ROWS_A_SHARE))
            parts = view.gather(list(view.gradients(view.mine(chunks), samples)))
            view.memory.update(candidates=candidates, gradients=torch.cat(parts, 1))
            left = reuse
        view.memory["uses_left"] = torch.tensor(left - 1)
        self._labels, self._candidates, self._table = view.labels, view.memory["candidates"], view.memory["gradients"]
        self._row = torch.full((len(view.labels),), -1).scatter_(
            0, self._candidates, torch.arange(len(self._candidates))
        )
        self._beliefs: Tensor | None = None
        self.pools = self._of_all(deal(view.labels[self._candidates]))

    def _of_all(self, dealt: list[Pool]) -> list[Pool]:
        """Pools of positions among the candidates as pools of examples, each of which speaks for more of them."""
        counts = torch.bincount(self._labels)
        looked = torch.bincount(self._labels[self._candidates], minlength=len(counts))
        share = counts / looked.double()  # examples a candidate
        row = Row.of(dealt)
        indices = self._candidates[row.indices]
        stands_for = row.stands_for * share[self._labels[indices[row.starts[:-1]]]]
        return row._replace(indices=indices, stands_for=stands_for).pools()

    def gradients(self, groups: Sequence[Tensor]) -> Iterator[Tensor]:
        """For each group of indices `(k,)` the gradients `(draws, k, classes)`."""
        return (self._table[:, self._row[group]] for group in groups)

    def belief(self, pools: Sequence[Pool], indices: Tensor, gradients: Tensor) -> Tensor:
        """How likely each label is right `(k,)`, judged among all candidates: more to go by than a pool."""
        if self._beliefs is None:
            everyone = torch.tensor([len(self._candidates)])
            labels = self._labels[self._candidates]
            said = Said.of(self._table, labels)
            self._beliefs = label_belief(said.label, everyone, self._table.shape[-1])
            if not knows_labels(said, labels):
                self._beliefs = torch.ones_like(self._beliefs)
        return self._beliefs[self._row[indices]]


def random_of_each_class(labels: Tensor, wanted: int, balance: str, generator: torch.Generator) -> Tensor:
    """`wanted` random examples: classes in equal number as far as they go, or in proportion; one of each first.

    With fewer wanted than there are classes it is one of each of some classes, at random.
    """
    shuffled = torch.randperm(len(labels), generator=generator)
    order = shuffled[torch.argsort(labels[shuffled], stable=True)]
    counts = torch.bincount(labels)
    own = labels[order]
    rank = torch.arange(len(labels)) - (torch.cumsum(counts, 0) - counts)[own]
    turn = rank + torch.rand(len(labels), generator=generator, dtype=torch.float64) * (rank > 0)
    if balance == "proportional":
        turn = turn / counts[own]
    if wanted < int((counts > 0).sum()):
        turn -= torch.rand(len(counts), generator=generator, dtype=torch.float64)[own] * (rank == 0)
    return order[torch.argsort(turn)[:wanted]]
