"""Loss pruning: hard examples, and a random part of the learned ones with more weight."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..coreset import Coreset
from ..order import comb
from ..posterior import Trajectory
from ..scores import ScoreStore
from ..types import Posterior, View
from .due import Watched, equal, learned
from .settings import check_at_least, check_exponent
from .uniform import next_of_pass

_WATCH = Trajectory()


@dataclass(frozen=True)
class LossPruning:
    r"""Keeps hard examples and fewer of the learned ones, with weights under which the expected gradient is the full one.

    An example is learned if its loss, $-\log$ of its label's mean probability over all visits, is below the mean. Within
    either group examples are drawn at random, those of the learned with `ratio` times the chance of the others, and weigh
    the inverse of their chance: for `weighting="loss"`, which keeps hard examples frequent and the gradient unbiased
    (InfoBatch, Qin et al. 2024, of fixed size). Everything is seen once first. An epoch has fewer steps than of full data:
    scale the learning rate by 1 / fraction.

    With a `confidence_exponent` neither what is learned nor what is probably wrong is shown often: chances go by the
    confidence in the labels, as in `LabelConfidence`, and the expected gradient is that of the labels by their confidence.

    Cost: nothing; scores come from the training itself.

    Args:
        ratio: chance of a learned example against that of a hard one.
        confidence_exponent: above 0, labels that are right with probability $r$ count $r$ to this power.
        selections: of the whole run; needed for the end of it. None goes on to prune.
        anneal: share of these at the end in which learned and hard examples are shown alike: in uniform passes, or by the
            confidence in the labels where these are doubted.
        posterior: `Trajectory()`; there are no scoring passes.
    """

    ratio: float = 0.5
    confidence_exponent: float = 0.0
    selections: int | None = None
    anneal: float = 0.125
    posterior: Posterior = _WATCH

    State: ClassVar[type | None] = Watched
    observes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_exponent(confidence_exponent=self.confidence_exponent)
        if self.selections is not None:
            check_at_least(1, " selection", selections=self.selections)
        for name, value in (("ratio", self.ratio), ("anneal", self.anneal)):
            if not (0 < value <= 1 or (name == "anneal" and value == 0)):
                rule = "above 0 and at most 1" if name == "ratio" else "between 0 and 1"
                raise ValueError(f"{name} must be {rule}, got {value}. The default is {getattr(LossPruning, name)}.")
        if not isinstance(self.posterior, Trajectory):
            raise TypeError(
                f"posterior must be a Trajectory(), got {self.posterior!r}: losses come from the training itself. For "
                "scoring passes take strategies.LabelConfidence or strategies.Stable."
            )

    def select(
        self, view: View, size: int, state: Watched | None, generator: torch.Generator
    ) -> tuple[Coreset, Watched | None]:
        """Uniform passes at first and at the end; in between by loss."""
        n, store, state = len(view.labels), view.scores, state or Watched()
        per_pass, ends = -(-n // size), self._ends(state.selections)
        if self.confidence_exponent:
            state = learned(state, store, per_pass, self.confidence_exponent)
            if state.noise is not None and state.noise.competent:
                view.log(estimated_noise_rate=state.noise.rate)
        after, trusted = replace(state, selections=state.selections + 1), not len(state.chance)
        if store is None or store.coverage == 0 or state.selections < per_pass or (ends and trusted):
            picks, place = next_of_pass(n, size, state.place, generator)
            return equal(picks, n), replace(after, place=place)
        mass = torch.ones(n, dtype=torch.float64) if trusted else state.chance.double()
        hard = torch.ones(n, dtype=torch.bool) if ends else is_hard(store)
        return pruned(hard, mass, size, self.ratio, generator), after

    def _ends(self, selections: int) -> bool:
        return self.selections is not None and selections >= math.ceil(self.selections * (1 - self.anneal))


def is_hard(store: ScoreStore) -> Tensor:
    """`(n,)` whether the loss is above the mean; so is what was never seen."""
    loss = -store.label_probability.double().clamp(min=1e-12).log()
    return ~(loss <= loss.nanmean())


def pruned(hard: Tensor, mass: Tensor, size: int, ratio: float, generator: torch.Generator) -> Coreset:
    """`size` examples, the learned ones with `ratio` times the chance, both in proportion to `mass` `(n,)`.

    Weights sum to n, and the expected weighted sum over any values is that of `mass` times the values, times n over the
    sum of `mass`: each group has a fixed number of places, inclusion probabilities $p$ that sum to it, and weights
    `mass` / $p$, whose sum over the group does not depend on the draw.
    """
    groups = [rows for rows in (hard.nonzero().flatten(), (~hard).nonzero().flatten()) if len(rows)]
    places = _places(groups, mass, size, ratio, generator)
    parts = [_drawn(rows, mass[rows], k, generator) for rows, k in zip(groups, places, strict=True) if k]
    indices, weights = (torch.cat(column) for column in zip(*parts, strict=True))
    return Coreset(indices, weights * len(hard) / weights.sum())


def _places(groups: list[Tensor], mass: Tensor, size: int, ratio: float, generator: torch.Generator) -> list[int]:
    """How many of each group: at least one where there are two places or more, at most all. A single one is drawn."""
    if len(groups) == 1:
        return [size]
    hard, easy = (float(mass[rows].sum()) for rows in groups)
    if size == 1:
        first = int(float(torch.rand((), generator=generator, dtype=torch.float64)) < hard / (hard + easy))
        return [first, 1 - first]
    easy *= ratio
    first = min(max(round(size * hard / (hard + easy)), 1, size - len(groups[1])), len(groups[0]), size - 1)
    return [first, size - first]


def inclusion(mass: Tensor, size: int) -> Tensor:
    """Probabilities `(k,)` in proportion to `mass`, none above 1, that sum to `size`.

    Example: masses `[4, 1, 1, 2]` and `size=3` give `[1, 0.5, 0.5, 1]`.
    """
    sure = torch.zeros(len(mass), dtype=torch.bool)
    while True:
        left = size - int(sure.sum())
        p = torch.where(sure, 1.0, mass * (left / mass[~sure].sum().clamp(min=1e-300)))
        over = ~sure & (p > 1)
        if not bool(over.any()):
            return p.clamp(max=1.0)
        sure |= over


def _drawn(rows: Tensor, mass: Tensor, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`size` of the rows by systematic sampling in a random order, and their weights `mass / p`."""
    order = torch.randperm(len(rows), generator=generator)
    p = inclusion(mass[order], size)
    chosen = comb(p, size, generator) > 0
    return rows[order][chosen], (mass[order] / p)[chosen]
