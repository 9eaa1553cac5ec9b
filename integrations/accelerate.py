"""accelerate: it wraps loaders without a word to the sampler, so who is asking is found on the call stack."""

from __future__ import annotations

import sys
from typing import Any

from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SkipBatchSampler

from ..distributed import world
from ..selection.sampler import CoresetSampler, DistributedCoresetSampler


def start_of_pass(sampler: CoresetSampler, start: int) -> int:
    """Where a pass that begins now starts: under accelerate at 0, since it skips what was done itself.

    accelerate reads ahead of the loop, so whether that is at the end of its epoch is asked of accelerate's loader.
    """
    loader = _iterated_loader()
    if loader is None:
        return start
    if isinstance(sampler, DistributedCoresetSampler) and sampler.num_replicas > 1:
        raise TypeError(
            "accelerate shares out what a sampler yields: the share of a DistributedCoresetSampler would be shared out "
            "again and most of the coreset never be seen. Use CoresetSampler with accelerator.prepare."
        )
    if start and not loader.use_stateful_dataloader and not _skips(loader):
        raise RuntimeError(
            f"the state was saved in the middle of epoch {sampler.epoch}, {start} indices in. accelerate reads ahead, so "
            "where the loop stood is not known. Begin this epoch with accelerator.skip_first_batches(loader, batches "
            "already done), or save at the end of epochs."
        )
    epoch = loader.iteration
    sampler._epoch.set(epoch)  # a loader that takes up a finished pass begins two, of which the first is thrown away
    sampler._epoch.loop_is_over = lambda: _is_over(loader, epoch)
    return 0


def select_everywhere(sampler: CoresetSampler) -> None:
    """With `dispatch_batches` only process 0 reads the sampler: all select when accelerate tells them the epoch."""
    if world()[1] > 1 and isinstance(_iterated_loader(), DataLoaderDispatcher):
        sampler.select_if_due()


def check_load(sampler: CoresetSampler, position: int) -> None:
    """Refuses, in all processes, a state from the middle of an epoch where batches are dispatched to several."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != "accelerate.accelerator":
        frame = frame.f_back  # type: ignore[assignment]
    loaders = [] if frame is None else getattr(frame.f_locals.get("self"), "_dataloaders", [])
    dispatched = [loader for loader in loaders if isinstance(loader, DataLoaderDispatcher) and not loader.split_batches]
    if position and world()[1] > 1 and any(loader.get_sampler() is sampler for loader in dispatched):
        raise RuntimeError(
            f"the state was saved in the middle of an epoch, {position} indices in. With dispatch_batches=True on several "
            "processes skip_first_batches skips too few. Save at the end of epochs, or use "
            "DataLoaderConfiguration(dispatch_batches=False)."
        )


def _iterated_loader() -> Any:
    """The loader of accelerate that is in its `__iter__` now, or None."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "accelerate.data_loader" and frame.f_code.co_name == "__iter__":
            loader = frame.f_locals.get("self")
            if isinstance(loader, (DataLoaderShard, DataLoaderDispatcher)):
                return loader
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _skips(loader: Any) -> bool:
    """Whether it was made by `skip_first_batches`."""
    return isinstance(loader.batch_sampler, SkipBatchSampler) or isinstance(loader.sampler, SkipBatchSampler)


def _is_over(loader: Any, epoch: int) -> bool:
    """Whether the loop has done with the epoch.

    In the loop's body at the last batch it has not, and `skip_first_batches` of them all leaves nothing. A stateful loader
    counts that as the end and goes on with the next epoch.
    """
    return bool(loader.end_of_dataloader) if loader.use_stateful_dataloader else loader.iteration != epoch
