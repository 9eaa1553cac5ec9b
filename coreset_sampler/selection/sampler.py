"""CoresetSampler: when to select, and what to yield; it can be saved and resumed at any index."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from .. import distributed
from ..randomness import ORDER, check_default_device, mixed_seed
from . import strategies
from .arguments import (
    check_model,
    check_number,
    check_selection_dataset,
    check_weighting,
    length_of,
    size_of,
    whole_number,
)
from .batch import check_lengths
from .budget import Budget
from .caller import check_caller, find_caller, loaded_frameworks
from .coreset import Coreset
from .epoch import Epoch, Pass
from .forward import check_scoring_dtype
from .history import History
from .labels import check_labels
from .observing import Observing
from .order import Weighting, epoch_order
from .saved_state import compare_processes, read_state, state_of
from .selecting import left_out_classes, select_together
from .types import Forward, Strategy
from .watching_sampler import WatchingSampler
from .weighted import WeightedIndex


class CoresetSampler(WatchingSampler):
    """Draws each epoch from a small subset that the current model would learn the same things from.

    It selects when an epoch begins. Epochs count themselves, one per pass, unless `set_epoch` says otherwise. The order
    depends on the coreset, `seed` and the epoch only, never on global random state. In a process group every process needs
    the sampler: they select together and get the same coreset. Use `DistributedCoresetSampler` where the sampler has to
    split indices over processes (torchrun, timm, Ray), this class where a framework does (Trainer, accelerate, Lightning).

    Example:
        >>> sampler = CoresetSampler(train_set, model, fraction=0.1)
        >>> loader = DataLoader(train_set, batch_size=128, sampler=sampler)

    Args:
        dataset: the training set, with `__len__` and `__getitem__`; the same that the `DataLoader` has.
        model: the model in training. A selection leaves it as it was, and the random states too.
        fraction, size: how many examples to keep, and to yield per epoch: a share in (0, 1], or a number. Pass one of them.
        seed: of all random decisions. Equal seeds give equal indices.
        strategy: how to choose: a name of `strategies.available()`, one with settings such as
            `strategies.Stable(draws=8)`, or a function `(view, size, generator) -> Coreset`.
        reselect_every: epochs that a coreset serves. Each has an order of its own.
        max_overhead: the largest share of the time of selection and training that selection may take, in (0, 1). A
            selection that would exceed it is put off; the first never is. Indices then depend on the clock.
        weighting: `"resample"` yields examples in proportion to their weights, so that a loop needs no change; `"loss"`
            yields each once, with a weight of mean one for `WeightedDataset` to hand to the loss; `"none"` each once.
        selection_dataset: the same examples for scoring, for instance without augmentation. By default `dataset`.
        labels: every example's class, `(n,)`. By default read from the data set at the first selection.
        forward_fn: `(model, batch) -> (logits, labels)`, for batches that are neither `(x, y)` nor a dict.
        lengths: every example's length, `(n,)`, such as its number of tokens: a scoring pass then batches candidates of
            about equal length, and a `collate_fn` that pads to the longest of a batch pads less.
        scoring_dtype: `torch.bfloat16` or `torch.float16` runs scoring passes under autocast, as training in mixed
            precision does. By default as the model is.
        collate_fn: makes the batches of a scoring pass. By default torch's.
        scoring_batch_size, num_workers: of the loader of a scoring pass.
        progress: shows a progress bar when a scoring pass takes more than two seconds.
        watch: notes what the model says of each example while it trains, for `scores` and `suspects`. By default where
            the strategy reads that, or `fraction=1.0` yields everything; False never does.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        model: nn.Module,
        *,
        fraction: float | None = None,
        size: int | None = None,
        seed: int = 0,
        strategy: str | Strategy | Callable[..., Coreset] = "label_confidence",
        reselect_every: int = 1,
        max_overhead: float | None = None,
        weighting: Weighting = "resample",
        selection_dataset: Dataset[Any] | None = None,
        labels: Any = None,
        lengths: Any = None,
        scoring_dtype: torch.dtype | None = None,
        forward_fn: Forward | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        scoring_batch_size: int = 128,
        num_workers: int = 0,
        progress: bool = True,
        watch: bool | None = None,
    ) -> None:
        self.n = length_of(dataset)
        self.size = size_of(self.n, fraction, size)
        self.dataset, self.seed, self.strategy = dataset, whole_number("seed", seed, 0), strategies.resolve(strategy)
        self._observing = Observing(self, watch)
        self.model = check_model(model, self._observing.strategy_reads)
        self.reselect_every = whole_number("reselect_every", reselect_every, 1)
        self.weighting = check_weighting(weighting, dataset)
        self.selection_dataset = check_selection_dataset(selection_dataset, dataset)
        self.lengths, self.scoring_dtype = check_lengths(lengths, self.n), check_scoring_dtype(scoring_dtype)
        self.forward_fn, self.collate_fn = forward_fn, collate_fn
        self.scoring_batch_size = whole_number("scoring_batch_size", scoring_batch_size, 1)
        self.num_workers = whole_number("num_workers", num_workers, 0)
        self._labels = None if labels is None else check_labels(labels, self.n)
        self._label_hash: str | None = None
        check_number("max_overhead", max_overhead)
        self.max_overhead, self.progress = max_overhead, progress
        self._epoch, self._budget, self._history = Epoch(), Budget(max_overhead), History()
        self._compared, self._warn_once = False, distributed.WarnOnce()  # whether all processes have the same settings

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.size} of {self.n}, strategy={self.strategy!r}, epoch={self.epoch})"

    def __len__(self) -> int:
        return self.size

    @property
    def epoch(self) -> int:
        """The epoch whose pass has begun, or that comes next: where a resumed loop starts."""
        return self._epoch.number

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    @property
    def coreset(self) -> Coreset:
        """The coreset in use. An error before the first selection; `select` makes one."""
        if self._history.coreset is None:
            raise RuntimeError("no coreset has been selected yet: iterate over the sampler, or call sampler.select()")
        return self._history.coreset

    @property
    def stats(self) -> dict[str, float]:
        """What selection has cost so far and what the last one gave, as plain numbers to log.

        - `selections` that took place, and those `put_off` because of `max_overhead`
        - `forward_examples`: examples times draws that went through the model
        - `seconds` spent selecting; `last_seconds` of the last selection
        - `share` of selection in the time of selection and training epochs; time between epochs does not count
        - `distinct`: share of an epoch's indices that show an example for the first time, on average
        - `overlap`: share of the coreset that was in the one before, from the second selection on
        - `coverage`: share of the examples that were watched; `score_age`: epochs since each was last seen, on average
        - logged by strategies: `covering_cost`, the mean distance to the nearest kept example; `perturbed_parameters`,
          those that the posterior changes; `estimated_noise_rate`, the share of labels that look wrong, if it can tell
        """
        return {**self._history.counts, **self._budget.stats, **self._history.last, **self._observing.stats()}

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch the next iteration is; calling it more than once does no harm, nor does it after a resume."""
        self._epoch.set(whole_number("epoch", epoch, 0))
        for framework in loaded_frameworks():
            framework.epoch_was_set(self, find_caller())

    def select(self) -> Coreset:
        """Selects now, for the epoch that comes next, whether it is due or not. The model comes back as it was."""
        check_default_device()
        compare_processes(self)
        epoch = self._epoch.coming
        selection = select_together(self, epoch, self._history.state)
        self._warn_once(left_out_classes(self.read_labels(), self.size))
        # Nothing above has changed the sampler: a selection that fails leaves the last coreset in use.
        self._budget.selected(self._history.add(selection, epoch, self.weighting))
        return selection.coreset

    def select_if_due(self) -> Coreset:
        """Selects for the epoch that comes next if `reselect_every` and `max_overhead` say so."""
        compare_processes(self)
        if self._history.is_due(self._epoch.coming, self.reselect_every, self._budget):
            return self.select()
        return self.coreset

    def __iter__(self) -> Iterator[int]:
        return Pass.of(self._epoch, self._begin_pass, self._budget.all_given_out)

    def state_dict(self, position: int | None = None) -> dict[str, Any]:
        """Everything needed to go on with exactly the indices that were still to come.

        Args:
            position: examples of this epoch that the loop has consumed (batches times batch size). Needed for a DataLoader
                with workers, which draw indices ahead; torchdata's StatefulDataLoader keeps count itself. 0 is right for
                frameworks that skip batches themselves. After the last batch the state is the next epoch's beginning.
        """
        return state_of(self, position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up where `state_dict` was called. A state of another data set, strategy or setting changes nothing."""
        history, store, epoch, position = read_state(self, state)
        # Nothing above has changed the sampler, nor can anything below fail.
        self._budget.load_state_dict(state["spent"])
        self._history, self._compared = history, False
        self._epoch.load(epoch, position)
        self._observing.load(state["scores"], store, position)

    def _begin_pass(self, resume: tuple[int, int] | None) -> Iterable[int]:
        check_default_device()
        caller, epoch = find_caller(), self._epoch
        self._warn_once(check_caller(self, caller))
        self._observing.end_pass()
        start = epoch.advance(caller.start_of_pass(self, epoch), resume)
        self.select_if_due()
        order, weights = self._order()
        left = epoch.begin(order, start)
        self._observing.begin_pass(order, start, caller)
        self._budget.epoch_begins(caller.ahead)
        return left if weights is None else map(WeightedIndex, left, weights[start:])

    def _order(self) -> tuple[list[int], list[float] | None]:
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, self.epoch, ORDER))
        return epoch_order(self.coreset, self.weighting, generator)
