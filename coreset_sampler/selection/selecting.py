"""One selection: the strategy chooses, in all processes together, and the model comes back as it was."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import distributed
from ..randomness import SELECT, mixed_seed
from .arguments import length_of
from .coreset import Coreset
from .preserve import preserve_state
from .scoring import ScoringView
from .strategies.uniform import Uniform
from .weighted import plain

if TYPE_CHECKING:
    from .sampler import CoresetSampler


class Selection(NamedTuple):
    """What a selection gave and what it cost."""

    coreset: Coreset
    state: Any
    """Of the strategy, for its next selection."""
    began: float
    forward_examples: int
    figures: dict[str, float]
    """Of the strategy, for `sampler.stats`."""


def select_together(sampler: CoresetSampler, epoch: int, state: Any) -> Selection:
    """Lets the strategy choose and takes the choice of process 0; an error in one process is one in all."""
    with distributed.together():
        labels, began = sampler.read_labels(), time.perf_counter()
        sampler._observing.gather()
        chosen, new_state, view = _choose(sampler, labels, epoch, state)
        coreset = distributed.from_first(chosen)
    coreset = check_coreset(coreset, sampler.size, sampler.n)
    return Selection(coreset, new_state, began, view.forward_examples, dict(view.figures))


def _choose(sampler: CoresetSampler, labels: Tensor, epoch: int, state: Any) -> tuple[Coreset, Any, ScoringView]:
    for name in ("dataset", "selection_dataset"):
        now = length_of(getattr(sampler, name))
        if now != sampler.n:
            raise ValueError(f"{name} had {sampler.n} examples when the sampler was made and has {now} now")
    seed = mixed_seed(sampler.seed, epoch, SELECT)
    hardly_runs = sampler._observing.strategy_reads or isinstance(sampler.strategy, Uniform)  # the model
    with preserve_state(sampler.model, seed=seed, lazily=hardly_runs) as look_after:
        view = ScoringView(
            plain(sampler.selection_dataset),
            sampler.model,
            labels,
            forward_fn=sampler.forward_fn,
            lengths=sampler.lengths,
            dtype=sampler.scoring_dtype,
            collate_fn=sampler.collate_fn,
            batch_size=sampler.scoring_batch_size,
            num_workers=sampler.num_workers,
            progress=sampler.progress,
            seed=seed,
            before_use=look_after,
        )
        view.scores = sampler._observing.fill(view)
        return *sampler.strategy.select(view, sampler.size, state, torch.Generator().manual_seed(seed)), view


def check_coreset(coreset: Any, size: int, n: int) -> Coreset:
    """The coreset, if it is one that a strategy may return: `size` of `n` examples."""
    if not isinstance(coreset, Coreset):
        raise TypeError(f"a strategy must return a Coreset, got {type(coreset).__name__}")
    if len(coreset) != size or int(coreset.indices.max()) >= n or float(coreset.weights.sum()) <= 0:
        raise ValueError(
            f"a strategy must return {size} indices below {n} and weights with a positive sum, got "
            f"{len(coreset)} indices up to {int(coreset.indices.max()) if len(coreset) else None} "
            f"and weights that sum to {float(coreset.weights.sum())}; testing.check_strategy says more"
        )
    return coreset


def left_out_classes(labels: Tensor, size: int) -> str | None:
    """A warning if there are more classes than examples to keep."""
    classes = len(labels.unique()) if size <= int(labels.max()) else 0
    if size >= classes:
        return None
    return (
        f"size={size} is below the number of classes, {classes}: at every selection {classes - size} or more of them get no "
        "example. Pass a larger size."
    )
