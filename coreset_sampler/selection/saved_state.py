"""What a sampler's state holds, and what a state, the sampler that loads it and all processes must have in common."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .. import distributed
from ..layers import innermost
from . import strategies
from .arguments import whole_number
from .caller import find_caller, loaded_frameworks
from .history import History
from .scores import ScoreStore

if TYPE_CHECKING:
    from .sampler import CoresetSampler

VERSION = 5


def settings_of(sampler: CoresetSampler) -> dict[str, Any]:
    """What decides which indices come, in numbers and words that can be compared."""
    if sampler._label_hash is None:
        sampler._label_hash = short_hash(sampler.read_labels().numpy().tobytes())
    return {
        "version": VERSION,
        "n": sampler.n,
        "size": sampler.size,
        "length": len(sampler),  # of one process's share: a position means nothing among another number of them
        "seed": sampler.seed,
        "labels": sampler._label_hash,
        "strategy": strategies.state_dict(sampler.strategy, None)["strategy"],
        "weighting": sampler.weighting,
        "reselect_every": sampler.reselect_every,
    }


def state_of(sampler: CoresetSampler, position: int | None) -> dict[str, Any]:
    """The state, for `position` indices of this epoch consumed, or as many as were yielded."""
    if position is not None:
        whole_number("position", position, 0)
    epoch, position = sampler._epoch.saved(position, len(sampler))
    history, budget = sampler._history, sampler._budget
    spent = {**history.counts, **budget.state_dict()}
    own = history.state_dict(sampler.strategy)
    scores = sampler._observing.state_dict()
    return {**settings_of(sampler), "epoch": epoch, "position": position, "spent": spent, "scores": scores, **own}


def read_state(sampler: CoresetSampler, state: Mapping[str, Any]) -> tuple[History, ScoreStore | None, int, int]:
    """History, scores, epoch and position of a state that this sampler may load, or an error. Changes nothing."""
    settings = settings_of(sampler)
    if state.get("version") != VERSION:
        raise ValueError(
            f"this is not a state of CoresetSampler that this version reads: version {state.get('version')}"
        )
    own = state_of(sampler, None)
    if missing := own.keys() - state.keys():
        raise ValueError(f"the state lacks {sorted(missing)}; it was not made by state_dict()")
    for key, value in settings.items():
        if state[key] != value:
            what = "other labels" if key == "labels" else f"{key}={state[key]}, here it is {value}"
            raise ValueError(f"the state was saved with {what}; it belongs to another data set or setting")
    for key, needed in (("spent", own["spent"].keys()), ("last", set())):
        found = state[key]
        good = isinstance(found, Mapping) and all(isinstance(value, (int, float)) for value in found.values())
        if not good or needed - found.keys():
            raise ValueError(f"the state's {key} is damaged; it was not made by state_dict(): {found!r:.200}")
    history = History.loaded(state, sampler.strategy, sampler.size, sampler.n)
    epoch, position = (whole_number(key, state[key], 0) for key in ("epoch", "position"))
    if position > len(sampler):
        raise ValueError(f"position must be between 0 and {len(sampler)}, got {position}")
    store = sampler._observing.check_state(state["scores"])
    for framework in loaded_frameworks():
        framework.check_load(sampler, position, find_caller())
    return history, store, epoch, position


def compare_processes(sampler: CoresetSampler) -> None:
    """Raises in all processes if they were given different things: they would choose different things, or wait for ever.

    Once per run is enough, and again after a state was loaded.
    """
    if sampler._compared or distributed.world()[1] == 1:
        return
    with distributed.together():
        model, coreset = innermost(sampler.model), sampler._history.coreset
        shapes = [(name, *value.shape) for name, value in model.named_parameters()]
        distributed.compare(
            {
                "class": type(sampler).__name__,
                **settings_of(sampler),
                "max_overhead": sampler.max_overhead,
                "watch": sampler._observing.watch,
                "model": f"{type(model).__name__} {short_hash(repr(shapes).encode())}",
                "epoch": sampler._epoch.coming,
                "coreset": None if coreset is None else short_hash(coreset.indices.numpy().tobytes()),
            }
        )
    sampler._compared = True


def short_hash(data: bytes) -> str:
    """What a state keeps of labels, to know them again."""
    return hashlib.sha256(data).hexdigest()[:16]
