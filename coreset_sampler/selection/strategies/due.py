"""A queue by label confidence that watches the model train: who is shown next, by what training's forward passes said."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from ..coreset import Coreset
from ..noise import NoiseModel, noise_model, quality_of
from ..scores import ScoreStore
from ..types import Balance, View
from .pools import class_weights, first_of_each_class, quotas
from .uniform import Place, next_of_pass

_LEAST_RATE = 0.08  # of wrong labels; below it all are trusted: to weak networks some right ones look as wrong
_FIRST_AGAIN = 2  # passes after which the labels are judged anew, then at every power of 2
_LEAST_CHANCE = 0.02  # so that each example is shown again
_MOST_OFTEN = 2.0  # times that the qualities of a class may be raised, to make up for its share


@dataclass(frozen=True, eq=False)
class Watched:
    """Who was shown when, and what is known of the labels.

    `selections` were made, the uniform ones up to `place` of a pass. `clock` is the time in passes over what is trusted,
    `shown` `(n,)` when each example was shown last. `noise` is what is known of the labels, `chance` `(n,)` how often to
    show each example; empty while all are trusted.
    """

    selections: int = 0
    place: Place | None = None
    clock: float = 0.0
    shown: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))
    chance: Tensor = field(default_factory=lambda: torch.empty(0))
    noise: NoiseModel | None = None


def select_watched(
    view: View,
    size: int,
    state: Watched | None,
    generator: torch.Generator,
    *,
    exponent: float,
    balance: Balance | None,
) -> tuple[Coreset, Watched]:
    """Everything once; then uniform passes, or, where labels are doubted, each example 1 / chance after it was shown last.

    An example that was held back is not owed anything: its time counts from when it was shown.
    """
    n = len(view.labels)
    state = state or Watched(shown=torch.full((n,), -1.0, dtype=torch.float64))
    state = learned(state, view.scores, -(-n // size), exponent)
    if state.noise is not None and state.noise.competent:
        view.log(estimated_noise_rate=state.noise.rate)
    if balance is None and not len(state.chance):
        picks, place = next_of_pass(n, size, state.place, generator)
        return equal(picks, n), replace(_after(state, picks, None), place=place)
    due = state.shown + (1 / state.chance if len(state.chance) else 1.0)
    ties = torch.rand(n, generator=generator, dtype=torch.float64)
    if balance is None:
        picks = _first(due, ties, size)
        return equal(picks, n), _after(state, picks, generator)
    quota = quotas(view.labels, size, balance, generator)
    picks = first_of_each_class(_first(due, ties, n), view.labels, quota)
    return Coreset(picks, class_weights(view.labels, picks, quota)), _after(state, picks, generator)


def _first(due: Tensor, ties: Tensor, size: int) -> Tensor:
    """The `size` examples that are due first, in this order; of those due at once the one with the smaller tie."""
    times = due.numpy()
    rows = np.flatnonzero(times <= np.partition(times, size - 1)[size - 1])  # sorting all would take most of the time
    return torch.from_numpy(rows[np.lexsort((ties.numpy()[rows], times[rows]))][:size])


def equal(picks: Tensor, n: int) -> Coreset:
    """All of the same weight."""
    return Coreset(picks, torch.full((len(picks),), n / len(picks), dtype=torch.float64))


def _after(state: Watched, picks: Tensor, generator: torch.Generator | None) -> Watched:
    """The state when `picks` were shown, in this order or, with a generator, in a random one."""
    size = len(picks)
    turn = torch.arange(size) if generator is None else torch.randperm(size, generator=generator)
    step = size / float(state.chance.sum() if len(state.chance) else len(state.shown))
    shown = state.shown.index_put((picks,), state.clock + step * turn.double() / size)
    return replace(state, selections=state.selections + 1, clock=state.clock + step, shown=shown)


def learned(state: Watched, store: ScoreStore | None, per_pass: int, exponent: float) -> Watched:
    """The state with chances by all that was seen: after the first pass, then twice a pass."""
    done = state.selections - per_pass  # selections since everything was shown once
    if done < 0 or store is None or store.coverage == 0:
        return state
    if state.noise is None:
        at, logits = store.first_visits()
        state = replace(state, noise=noise_model(logits, store.labels[at]))
    elif _is_time(state.selections, per_pass) and not store.projected:
        state = replace(state, noise=_judged_again(store, state.noise))
    elif done % max(1, per_pass // 2):
        return state
    noise = state.noise
    if noise is None or noise.rate < _LEAST_RATE:
        return state
    power = exponent * (1 + noise.coherence)  # wrong labels that are all of one class outvote right ones soonest
    chance = label_chance(quality_of(store, noise), store.labels, exponent=power)
    return replace(state, chance=chance.clamp(_LEAST_CHANCE, 1.0))


def _is_time(selections: int, per_pass: int) -> bool:
    """Whether 2, 4, 8, 16, ... passes have just been shown."""
    passes, rest = divmod(selections, per_pass)
    return rest == 0 and passes >= _FIRST_AGAIN and passes & (passes - 1) == 0


def _judged_again(store: ScoreStore, before: NoiseModel) -> NoiseModel:
    """The noise model of all visits, where that of `before` found nothing.

    What a network says of an example before it was trained on it is the best evidence. One that knew little then says more
    by its later visits; but later on labels are learned with their mistakes, so what was found stays.
    """
    if before.rate >= _LEAST_RATE:
        return before
    now = noise_model(store.log_probabilities, store.labels)
    return now if now.rate > before.rate else before


def label_chance(quality: Tensor, labels: Tensor, *, exponent: float = 1.5) -> Tensor:
    """How often to show each example `(n,)`, the surest 1: its quality to a power, with every class at its own share.

    A power above 1 tells right labels from wrong ones more sharply, and would take most from the classes that are hard to
    tell apart. So the chances of the examples labelled `c` are in proportion to the sum of their qualities, the expected
    number of right labels among them; but no quality is raised to more than 2. Chances count relative to each other: none
    is cut off at 1, where wrong labels that were learned by heart would be shown as often as right ones.

    Args:
        quality: `(n,)` probabilities that labels are right, of `quality_of`.
        labels: `(n,)` int64, as given.
        exponent: 1 shows labels by the odds that they are right, 0 shows all examples of a class equally often.
    """
    if not (math.isfinite(exponent) and exponent >= 0):
        raise ValueError(f"exponent must be 0 or more and finite, got {exponent}. To trust every label pass 0.")
    if quality.shape != labels.shape or quality.ndim != 1:
        raise ValueError(
            f"quality must have one entry for each label, got shapes {tuple(quality.shape)} and {tuple(labels.shape)}. "
            "Pass what quality_of returns for the same labels."
        )
    if not len(labels):
        return quality
    powers = quality.double() ** exponent
    sums = [
        torch.zeros(int(labels.max()) + 1, dtype=torch.float64).index_add_(0, labels, of)
        for of in (quality.double(), powers)
    ]
    chance = (powers * (sums[0] / sums[1].clamp(min=1e-300))[labels]).clamp(max=_MOST_OFTEN)
    return (chance / chance.max().clamp(min=1e-300)).to(quality.dtype)
