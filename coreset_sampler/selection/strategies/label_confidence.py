"""Label confidence: random examples, the less often the less the model trusts their labels."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..coreset import Coreset
from ..posterior import PointMass
from ..types import Balance, Posterior, View
from .confidence import Predictions, knows_labels, label_confidence, noise_rate
from .pools import quotas
from .scores import CHUNK, random_of_each_class
from .settings import check_at_least, check_balance, check_exponent
from .uniform import Place, Uniform

_CURRENT = PointMass()
_LEAST_CHANCE = 1e-6  # of an example whose label the model finds impossible


@dataclass(frozen=True, eq=False)
class Queue:
    """The candidates of a scoring pass and when each is due: an example is due again after the inverse of its chance.

    `warmed_up` counts the uniform selections at the start, which are at `place` of a pass. `candidates`, `chance` and
    `due` are `(k,)`, empty before the first scoring pass, which serves `uses_left` more selections and estimated a
    `noise_rate`, if the model could tell.
    """

    warmed_up: int = 0
    place: Place | None = None
    uses_left: int = 0
    candidates: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    chance: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))
    due: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))
    noise_rate: float | None = None


@dataclass(frozen=True)
class LabelConfidence:
    r"""Keeps random examples of each class, with chances that go by the model's confidence in their labels.

    A label that is right with probability $r$, by what the model predicts (see `confidence.py`), has a chance in
    proportion to $r^{\text{exponent}}$. While the model knows nothing, all have the same chance. What was kept goes to the
    end of a queue, so that between two scoring passes examples of equal confidence are shown equally often: where all
    labels are trusted, that is a pass over the data. `estimated_noise_rate` in the sampler's stats is the estimated share
    of wrong labels, unless the model cannot tell.

    The defaults are what the CIFAR-10 table measured at `fraction=0.1` in 100 epochs. Cost of a scoring pass: `min(n,
    rescore_every * size * candidates)` examples through the model, `draws` times, and two numbers each between selections.

    Args:
        exponent: 0 trusts all labels, 1 goes by the odds, 2 allows for a model that has learned some wrong labels.
        candidates: examples to score for each one to keep.
        rescore_every: selections that one scoring pass serves.
        warm_up: uniform selections at the start, while the model has little to say; a tenth of the run is a good value.
        posterior: at which weights to score, by default the current ones.
        draws: samples of the posterior.
        balance: `"equal"` keeps as many of each class, `"proportional"` in proportion to their size.
    """

    exponent: float = 2.0
    candidates: int = 4
    rescore_every: int = 10
    warm_up: int = 10
    posterior: Posterior = _CURRENT
    draws: int = 1
    balance: Balance = "equal"

    State: ClassVar[type | None] = Queue

    def __post_init__(self) -> None:
        check_at_least(1, draws=self.draws)
        check_balance(self.balance)
        check_exponent(exponent=self.exponent)
        check_at_least(1, " selection", rescore_every=self.rescore_every)
        check_at_least(1, " for each example to keep", candidates=self.candidates)
        check_at_least(0, " selections", warm_up=self.warm_up)

    def select(
        self, view: View, size: int, state: Queue | None, generator: torch.Generator
    ) -> tuple[Coreset, Queue | None]:
        """The examples that are due first, class by class; scores anew when the last scoring pass has served."""
        queue = state or Queue()
        if queue.warmed_up < self.warm_up:
            coreset, place = Uniform().select(view, size, queue.place, generator)
            return coreset, replace(queue, warmed_up=queue.warmed_up + 1, place=place)
        if queue.uses_left == 0:
            queue = self._score(view, size, queue, generator)
        if queue.noise_rate is not None:
            view.log(estimated_noise_rate=queue.noise_rate)
        picks, weights = self._first(view, size, queue, generator)
        due = queue.due.index_add(0, picks, 1 / queue.chance[picks])
        return Coreset(queue.candidates[picks], weights), replace(queue, uses_left=queue.uses_left - 1, due=due)

    def _first(self, view: View, size: int, queue: Queue, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Positions among the candidates `(size,)` and their weights.

        Example: `due` is `[0.4, 0.1, 0.9, 0.3]` for labels `[0, 0, 1, 1]`. By class, then time, that is the order
        `[1, 0, 3, 2]` with ranks `[0, 1, 0, 1]`, and to keep one of each class are those of rank 0: `[1, 3]`.
        """
        labels = view.labels[queue.candidates]
        counts = torch.bincount(view.labels)
        scored = torch.bincount(labels, minlength=len(counts))
        quota = quotas(view.labels, size, self.balance, generator, at_most=scored)
        first = torch.argsort(queue.due, stable=True)
        first = first[torch.argsort(labels[first], stable=True)]
        rank = torch.arange(len(first)) - (torch.cumsum(scored, 0) - scored)[labels[first]]
        picks = first[rank < quota[labels[first]]]
        weights = (counts / quota.clamp(min=1).double())[labels[picks]]
        return picks, weights * len(view.labels) / weights.sum()

    def _score(self, view: View, size: int, queue: Queue, generator: torch.Generator) -> Queue:
        wanted = min(len(view.labels), self.rescore_every * size * self.candidates)
        chosen = random_of_each_class(view.labels, wanted, self.balance, generator)
        right, rate = self._confidence(view, chosen, generator)
        chance = (right**self.exponent).clamp(min=_LEAST_CHANCE)
        due = torch.rand(len(chosen), generator=generator, dtype=torch.float64) / chance
        return Queue(queue.warmed_up, queue.place, self.rescore_every, chosen, chance, due, rate)

    def _confidence(self, view: View, chosen: Tensor, generator: torch.Generator) -> tuple[Tensor, float | None]:
        """How likely each candidate's label is right `(k,)`, and the share of wrong ones, if the model can tell."""
        draws = self.posterior.draw(view, self.draws, generator)
        chunks = view.shard(list(chosen.split(CHUNK)))
        scored = zip(chunks, view.gradients(chunks, draws), strict=True)
        parts = view.gather([(Predictions.of(g, view.labels[rows]), g.shape[-1]) for rows, g in scored])
        predicted, labels = Predictions.joined([part for part, _ in parts]), view.labels[chosen]
        if not knows_labels(predicted, labels):
            return torch.ones_like(predicted.label), None
        classes = parts[0][1]  # of the model, not only of the labels
        right = label_confidence(predicted.label, torch.tensor([len(chosen)]), classes)
        return right, noise_rate(float(1 - right.mean()), predicted, labels)
