"""What the model says of candidates: asked while pools are covered, or in a scoring pass that serves several selections."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..scores import ScoreStore
from ..types import Balance, Draw, View
from .confidence import Predictions, knows_labels, label_confidence, label_probability
from .pools import Pools, fewest_first

CHUNK = 256  # candidates; small enough to share a scoring pass out evenly over processes


@dataclass(frozen=True, eq=False)
class FreshScores:
    """Asks the model when the gradients of a batch are wanted and keeps nothing."""

    view: View
    draws: Sequence[Draw]

    def gradients(self, groups: Sequence[Tensor]) -> Iterator[Tensor]:
        """For each group of indices `(k,)` the gradients `(draws, k, classes)`."""
        return self.view.gradients(groups, self.draws)

    def confidence(self, pools: Pools, gradients: Tensor) -> Tensor:
        """How likely each label is right `(k,)`, judged within its pool."""
        q = label_probability(gradients, self.view.labels[pools.indices])
        return label_confidence(q, pools.lengths, gradients.shape[-1])


@dataclass(frozen=True, eq=False)
class ObservedScores:
    """What training's own forward passes said, over all visits: one draw, for which nothing is run."""

    store: ScoreStore

    def gradients(self, groups: Sequence[Tensor]) -> Iterator[Tensor]:
        """For each group of indices `(k,)` the mean gradients `(1, k, classes)`, or `(1, k, 40)` of many classes."""
        return (self.store.gradients(group)[None] for group in groups)

    def confidence(self, pools: Pools, gradients: Tensor) -> Tensor:
        """How likely each label is right `(k,)`, judged within its pool."""
        return label_confidence(self.store.label_probability[pools.indices].double(), pools.lengths, self.store.classes)


@dataclass(frozen=True, eq=False)
class ScoredCandidates:
    """What one scoring pass gave, kept for the selections that it serves.

    `candidates` `(k,)` are examples, `gradients` `(draws, k, classes)` theirs, `uses_left` the selections still to come.
    """

    candidates: Tensor
    gradients: Tensor
    uses_left: int


class KeptScores:
    """Finds the gradients of `labels`' examples again in what a scoring pass gave."""

    def __init__(self, labels: Tensor, scored: ScoredCandidates) -> None:
        self._labels, self._scored = labels, scored
        positions = torch.arange(len(scored.candidates))
        self._position = torch.full((len(labels),), -1).scatter_(0, scored.candidates, positions)

    def of_examples(self, dealt: Pools) -> Pools:
        """Pools of positions among the candidates as pools of examples, each of which speaks for more of them."""
        counts = torch.bincount(self._labels)
        scored = torch.bincount(self._labels[self._scored.candidates], minlength=len(counts))
        share = counts / scored.double()  # examples for each candidate
        indices = self._scored.candidates[dealt.indices]
        stands_for = dealt.stands_for * share[self._labels[indices[dealt.starts[:-1]]]]
        return replace(dealt, indices=indices, stands_for=stands_for)

    def gradients(self, groups: Sequence[Tensor]) -> Iterator[Tensor]:
        """For each group of indices `(k,)` the gradients `(draws, k, classes)`."""
        return (self._scored.gradients[:, self._position[group]] for group in groups)

    def confidence(self, pools: Pools, gradients: Tensor) -> Tensor:
        """How likely each label is right `(k,)`, judged among all candidates: more to go by than a pool."""
        return self._confidence[self._position[pools.indices]]

    @cached_property
    def _confidence(self) -> Tensor:
        gradients, labels = self._scored.gradients, self._labels[self._scored.candidates]
        predicted = Predictions.of(gradients, labels)
        if not knows_labels(predicted, labels):
            return torch.ones(len(labels), dtype=torch.float64)
        return label_confidence(predicted.label, torch.tensor([len(labels)]), gradients.shape[-1])


def random_of_each_class(
    labels: Tensor, wanted: int, balance: Balance, generator: torch.Generator, times: Tensor | None = None
) -> Tensor:
    """`wanted` random examples: classes in equal number as far as they go, or in proportion; one of each first.

    With fewer wanted than there are classes it is one of each of some classes, at random. Of a class those come first that
    were candidates the fewest `times` `(n,)`.
    """
    in_turn = fewest_first(torch.zeros_like(labels) if times is None else times, generator)
    order = in_turn[torch.argsort(labels[in_turn], stable=True)]
    counts = torch.bincount(labels)
    own = labels[order]
    rank = torch.arange(len(labels)) - (torch.cumsum(counts, 0) - counts)[own]
    turn = rank + torch.rand(len(labels), generator=generator, dtype=torch.float64) * (rank > 0)
    if balance == "proportional":
        turn = turn / counts[own]
    if wanted < int((counts > 0).sum()):
        turn -= torch.rand(len(counts), generator=generator, dtype=torch.float64)[own] * (rank == 0)
    return order[torch.argsort(turn)[:wanted]]
