"""Label confidence: random examples, the less often the less the model trusts their labels."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from ..coreset import Coreset
from ..posterior import Trajectory
from ..types import Balance, Posterior, View
from .confidence import Predictions, knows_labels, label_confidence, noise_rate
from .due import Watched, select_watched
from .pools import class_weights, first_of_each_class, quotas
from .scores import CHUNK, random_of_each_class
from .settings import check_at_least, check_balance, check_exponent, check_posterior
from .uniform import Place, Uniform

_WATCH = Trajectory()
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
    r"""Keeps random examples, the less often the less the model trusts their labels.

    By default it watches the model train, and no forward pass is run for selection. Everything is shown once, in a uniform
    pass. What the network said of examples before it was trained on them tells how many labels are wrong, and which classes
    are taken for which (`noise.py`). If that is under 8 %, or the network cannot tell, all further passes are uniform too,
    and it is asked again after 2, 4, 8, ... passes. Else a label that is right with probability $r$, by the mean over all
    visits and as many of them as were found to be right, has a chance in proportion to $r^p$, at least 0.02, and is due
    again 1 / chance passes after it was shown; $p$ is the exponent, and up to twice as much, the more the wrong labels of a
    class are of one other class. Chances are computed anew twice a pass. Cost: three numbers per example, and fitting a
    noise model: a tenth of a second for 10 classes, seconds for hundreds.

    With another posterior a scoring pass runs `min(n, rescore_every * size * candidates)` examples through the model,
    `draws` times, and serves `rescore_every` selections (see `confidence.py`). What was kept goes to the end of a queue.

    `estimated_noise_rate` in the sampler's stats is the estimated share of wrong labels, unless the model cannot tell.

    Args:
        exponent: 0 trusts all labels, 1 goes by the odds, more allows for a model that has learned some wrong labels.
        candidates: examples to score for each one to keep. This and the next two are of scoring passes alone.
        rescore_every: selections that one scoring pass serves.
        warm_up: uniform selections at the start, while the model has little to say; a tenth of the run is a good value.
        posterior: where to score. `Trajectory()` watches; `PointMass()` scores at the current weights.
        draws: samples of the posterior.
        balance: `"equal"` keeps as many of each class, `"proportional"` in proportion to their size. None shows classes by
            how many of their labels are right, and with scoring passes is `"equal"`.
    """

    exponent: float = 1.5
    candidates: int = 4
    rescore_every: int = 10
    warm_up: int = 10
    posterior: Posterior = _WATCH
    draws: int = 1
    balance: Balance | None = None

    def __post_init__(self) -> None:
        check_posterior(self.posterior)
        check_at_least(1, draws=self.draws)
        if self.balance is not None:
            check_balance(self.balance)
        check_exponent(exponent=self.exponent)
        check_at_least(1, " selection", rescore_every=self.rescore_every)
        check_at_least(1, " for each example to keep", candidates=self.candidates)
        check_at_least(0, " selections", warm_up=self.warm_up)
        for setting in fields(self) if self.observes else ():
            value = getattr(self, setting.name)
            if setting.name in ("candidates", "rescore_every", "warm_up") and value != setting.default:
                raise ValueError(
                    f"{setting.name} must be left out with posterior=Trajectory(), which runs no scoring passes, got "
                    f"{value}. For scoring passes pass posterior=PointMass()."
                )

    @property
    def observes(self) -> bool:
        """Whether it reads what training said, so that the sampler has to watch."""
        return isinstance(self.posterior, Trajectory)

    @property
    def State(self) -> type[Watched | Queue]:  # noqa: N802, as of other strategies, whose class has it
        """What it keeps between selections."""
        return Watched if self.observes else Queue

    def select(
        self, view: View, size: int, state: Queue | Watched | None, generator: torch.Generator
    ) -> tuple[Coreset, Queue | Watched | None]:
        """The examples that are due first; by scoring passes: class by class, scored anew when the last one has served."""
        if not isinstance(state, Queue) and self.observes:
            return select_watched(view, size, state, generator, exponent=self.exponent, balance=self.balance)
        queue = state if isinstance(state, Queue) else Queue()
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
        """Positions among the candidates `(size,)`, those that are due first in each class, and their weights."""
        labels = view.labels[queue.candidates]
        scored = torch.bincount(labels, minlength=int(view.labels.max()) + 1)
        quota = quotas(view.labels, size, self.balance or "equal", generator, at_most=scored)
        picks = first_of_each_class(torch.argsort(queue.due, stable=True), labels, quota)
        return picks, class_weights(view.labels, queue.candidates[picks], quota)

    def _score(self, view: View, size: int, queue: Queue, generator: torch.Generator) -> Queue:
        wanted = min(len(view.labels), self.rescore_every * size * self.candidates)
        chosen = random_of_each_class(view.labels, wanted, self.balance or "equal", generator)
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
