"""Stable coresets: examples whose gradients stand for the rest, also around the current weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..coreset import Coreset
from ..posterior import SphericalGaussian, Trajectory
from ..types import Balance, Posterior, View
from .covering import cover_pools
from .pools import Pools, draw_pools
from .scores import CHUNK, FreshScores, KeptScores, ObservedScores, ScoredCandidates, random_of_each_class
from .settings import check_at_least, check_balance, check_exponent, check_posterior
from .uniform import Place, Uniform

_AROUND = SphericalGaussian(layers="auto")


@dataclass(frozen=True, eq=False)
class InPools:
    """What selections from pools keep: `times` `(n,)` that each example was a candidate.

    `scored` is the last scoring pass, if that serves more than one selection; `place` that of the uniform passes with which
    watching begins.
    """

    times: Tensor
    scored: ScoredCandidates | None = None
    place: Place | None = None


@dataclass(frozen=True)
class Stable:
    r"""Keeps the examples whose gradients cover those of all candidates, also around the current weights.

    For each random pool $V$ of about `pool_size` candidates, `keep` of them minimise greedily
    $\sum_{i \in V} \min_{j \in S} \mathbb E_\delta \lVert g_j(w + \delta) - g_i(w + \delta) \rVert$ with
    $g = \mathrm{softmax}(\text{logits}) - \mathrm{onehot}(y)$ (Chang and Khanna, 2025). The expectation is the mean over
    `draws` draws of the posterior, which serve all pools of a selection. Within a pool each class is covered by its own
    examples. Candidates are drawn without replacement over selections: none is one again before all others of its class
    were.

    Cost of a scoring pass: `min(n, rescore_every * size * pool_size / keep)` candidates through the model, `draws` times
    each less what the draws share. With `rescore_every=1` gradients are dropped as soon as their pools are done; else
    `draws * classes` numbers per candidate stay. One number per example stays in any case.

    Args:
        posterior: where to take the gradients. By default `SphericalGaussian(0.1, "norm")`, as in the paper, in a network
            without norm layers `SphericalGaussian(0.1, "head")`; `perturbed_parameters` in the sampler's stats says how
            many parameters it perturbs. `Trajectory()` takes the means over all visits in training, and runs nothing.
        draws: samples of the posterior that the expectation is taken over.
        pool_size: candidates per pool, about.
        keep: how many of them stay.
        balance: `"equal"` keeps as many of each class, `"proportional"` in proportion to their size.
        confidence_exponent: above 0, a candidate whose label is right with probability $r$, by the draws, takes part with
            probability $r$ to this power: 1 goes by the odds, 2 allows for a model that has learned some wrong labels. The
            sampler's stats then have `estimated_noise_rate`, unless the model cannot tell.
        rescore_every: selections that one scoring pass serves, each with new pools.
    """

    posterior: Posterior = _AROUND
    draws: int = 4
    pool_size: int = 500
    keep: int = 128
    balance: Balance = "equal"
    confidence_exponent: float = 0.0
    rescore_every: int = 1

    State: ClassVar[type | None] = InPools

    def __post_init__(self) -> None:
        check_posterior(self.posterior)
        check_at_least(1, draws=self.draws)
        check_balance(self.balance)
        check_exponent(confidence_exponent=self.confidence_exponent)
        check_at_least(1, " selection", rescore_every=self.rescore_every)
        if not 1 <= self.keep <= self.pool_size:
            raise ValueError(f"keep must be between 1 and pool_size={self.pool_size}, got {self.keep}")
        if self.observes and (self.rescore_every != 1 or self.confidence_exponent):
            name = "rescore_every" if self.rescore_every != 1 else "confidence_exponent"
            raise ValueError(
                f"{name} must be left out with posterior=Trajectory(), which runs no scoring passes, got "
                f"{getattr(self, name)}. For confidence in labels take strategies.LabelConfidence()."
            )

    @property
    def observes(self) -> bool:
        """Whether it reads what training said, so that the sampler has to watch."""
        return isinstance(self.posterior, Trajectory)

    def select(
        self, view: View, size: int, state: InPools | None, generator: torch.Generator
    ) -> tuple[Coreset, InPools]:
        """Deals pools, scores their candidates, or finds the scores of an earlier pass, and covers the pools."""
        state = state or InPools(torch.zeros(len(view.labels), dtype=torch.int32))
        if self.observes:
            return self._observed(view, size, state, generator)
        if self.rescore_every > 1:
            return self._kept(view, size, state, generator)
        dealt = self._deal(view.labels, size, state.times, generator)
        draws = self.posterior.draw(view, self.draws, generator)
        return self._cover(view, dealt, FreshScores(view, draws), generator), _after(state, dealt)

    def _kept(self, view: View, size: int, state: InPools, generator: torch.Generator) -> tuple[Coreset, InPools]:
        """By the scores of a pass that serves several selections."""
        scored = state.scored
        if scored is None or scored.uses_left == 0:
            scored = self._score(view, size, state.times, generator)
        kept, at = KeptScores(view.labels, scored), scored.candidates
        dealt = kept.of_examples(self._deal(view.labels[at], size, state.times[at], generator))
        after = replace(_after(state, dealt), scored=replace(scored, uses_left=scored.uses_left - 1))
        return self._cover(view, dealt, kept, generator), after

    def _observed(self, view: View, size: int, state: InPools, generator: torch.Generator) -> tuple[Coreset, InPools]:
        """Uniform passes until everything was seen; then pools, covered by the mean gradients of all visits."""
        if view.scores is None or int(view.scores.counts.min()) == 0:
            coreset, place = Uniform().select(view, size, state.place, generator)
            return coreset, replace(state, place=place)
        dealt = self._deal(view.labels, size, state.times, generator)
        return self._cover(view, dealt, ObservedScores(view.scores), generator), _after(state, dealt)

    def _deal(self, labels: Tensor, size: int, times: Tensor, generator: torch.Generator) -> Pools:
        keep, pool_size, balance = min(self.keep, size), self.pool_size, self.balance
        return draw_pools(
            labels, size, times=times, keep=keep, pool_size=pool_size, balance=balance, generator=generator
        )

    def _cover(
        self, view: View, dealt: Pools, scores: FreshScores | KeptScores | ObservedScores, generator: torch.Generator
    ) -> Coreset:
        return cover_pools(view, dealt, scores, exponent=self.confidence_exponent, generator=generator)

    def _score(self, view: View, size: int, times: Tensor, generator: torch.Generator) -> ScoredCandidates:
        wanted = min(len(view.labels), round(self.rescore_every * size * self.pool_size / min(self.keep, size)))
        candidates = random_of_each_class(view.labels, wanted, self.balance, generator, times)
        draws = self.posterior.draw(view, self.draws, generator)
        parts = view.gather(list(view.gradients(view.shard(list(candidates.split(CHUNK))), draws)))
        return ScoredCandidates(candidates, torch.cat(parts, 1), self.rescore_every)


def _after(state: InPools, dealt: Pools) -> InPools:
    return replace(
        state, times=state.times.index_add(0, dealt.indices, torch.ones_like(dealt.indices, dtype=torch.int32))
    )
