"""accelerate: it wraps loaders without a word to the sampler, so its loader is found among the sampler's callers."""

from __future__ import annotations

import copy
import sys
from typing import Any

from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, DataLoaderShard, SkipBatchSampler
from torch.utils.data import BatchSampler

from ..distributed import world
from ..selection.caller import Caller, Framework, unknown_order
from ..selection.distributed_sampler import DistributedCoresetSampler
from ..selection.epoch import Epoch
from ..selection.sampler import CoresetSampler

__all__ = ["FRAMEWORK"]


def reads(caller: Caller) -> bool:
    """Whether a loader of accelerate is on the way."""
    return any(frame.module == "accelerate.data_loader" for frame in caller.frames)


def shards(caller: Caller) -> bool:
    """Yes, whatever part of accelerate is on the way."""
    return any(frame.module.startswith("accelerate.") for frame in caller.frames)


def start_of_pass(sampler: CoresetSampler, epoch: Epoch, caller: Caller) -> int:
    """0, since accelerate skips what was done itself.

    It reads ahead of the loop, so whether that is at the end of its epoch is asked of accelerate's loader.
    """
    loader, start = _iterated_loader(caller), epoch.start
    if loader is None:
        return int(start)
    if isinstance(sampler, DistributedCoresetSampler) and sampler.num_replicas > 1:
        raise TypeError(
            "accelerate shares out what a sampler yields: the share of a DistributedCoresetSampler would be shared out "
            "again and most of the coreset never be seen. Use CoresetSampler with accelerator.prepare."
        )
    if start and not loader.use_stateful_dataloader and not _skips(loader):
        raise RuntimeError(
            f"the state was saved in the middle of epoch {sampler.epoch}, {start} indices in. accelerate reads ahead, "
            "so where the loop stood is not known. Begin this epoch with accelerator.skip_first_batches(loader, "
            "batches already done), or save at the end of epochs."
        )
    number = loader.iteration
    epoch.set(number)  # a loader that takes up a finished pass begins two, of which the first is thrown away
    epoch.loop_is_over = lambda: _is_over(loader, number)
    return 0


def share(sampler: CoresetSampler, order: list[int], start: int, caller: Caller) -> list[int] | str | None:
    """What accelerate's samplers make of the order in this process: they are run once more, over the order itself."""
    loader = _iterated_loader(caller)
    if loader is None:
        return None
    if world()[1] > 1 and isinstance(loader, DataLoaderDispatcher):
        return "with dispatch_batches=True accelerate cuts batches up on process 0, which alone reads the sampler"
    read = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    batches = _over(read, sampler, order)
    if batches is None:
        return f"accelerate reads its indices through a {type(read).__name__}, whose batches are not known"
    done = 0 if start else getattr(caller.loader, "_sampler_iter_yielded", 0)  # a stateful loader that was resumed
    return [index for batch in list(batches)[done:] for index in batch][start:]


def epoch_was_set(sampler: CoresetSampler, caller: Caller) -> None:
    """With `dispatch_batches` only process 0 reads the sampler: all select when accelerate tells them the epoch."""
    if world()[1] > 1 and isinstance(_iterated_loader(caller), DataLoaderDispatcher):
        sampler.select_if_due()


def check_load(sampler: CoresetSampler, position: int, caller: Caller) -> None:
    """Refuses, in all processes, a state from the middle of an epoch where batches are dispatched to several."""
    if not position or world()[1] == 1:
        return
    owner = next((frame.owner for frame in caller.frames if frame.module == "accelerate.accelerator"), None)
    loaders = [loader for loader in getattr(owner, "_dataloaders", []) if isinstance(loader, DataLoaderDispatcher)]
    if any(not loader.split_batches and loader.get_sampler() is sampler for loader in loaders):
        raise RuntimeError(
            f"the state was saved in the middle of an epoch, {position} indices in. With dispatch_batches=True on "
            "several processes skip_first_batches skips too few. Save at the end of epochs, or use "
            "DataLoaderConfiguration(dispatch_batches=False)."
        )


def _iterated_loader(caller: Caller) -> Any:
    """The loader of accelerate that is in its `__iter__` now, or None."""
    for frame in caller.frames:
        iterated = frame.module == "accelerate.data_loader" and frame.function == "__iter__"
        if iterated and isinstance(frame.owner, (DataLoaderShard, DataLoaderDispatcher)):
            return frame.owner
    return None


def _over(batches: Any, sampler: CoresetSampler, order: list[int]) -> Any:
    """The same batch sampler over these indices, or None if it, or what it reads, is of a kind that is not known."""
    if isinstance(batches, (SkipBatchSampler, BatchSamplerShard)):
        inner = _over(batches.batch_sampler, sampler, order)
        again = None if inner is None else copy.copy(batches)
        if again is not None:
            again.batch_sampler = inner
        return again
    stateful = getattr(sys.modules.get("torchdata.stateful_dataloader.sampler"), "BatchSampler", BatchSampler)
    known = batches is not sampler and unknown_order(sampler, batches, (BatchSampler, stateful)) is None
    return BatchSampler(order, batches.batch_size, batches.drop_last) if known else None


def _skips(loader: Any) -> bool:
    """Whether it was made by `skip_first_batches`."""
    return isinstance(loader.batch_sampler, SkipBatchSampler) or isinstance(loader.sampler, SkipBatchSampler)


def _is_over(loader: Any, epoch: int) -> bool:
    """Whether the loop has done with the epoch.

    In the loop's body at the last batch it has not, and `skip_first_batches` of them all leaves nothing. A stateful loader
    counts that as the end and goes on with the next epoch.
    """
    return bool(loader.end_of_dataloader) if loader.use_stateful_dataloader else loader.iteration != epoch


FRAMEWORK = Framework(
    reads=reads,
    shards=shards,
    start_of_pass=start_of_pass,
    share=share,
    epoch_was_set=epoch_was_set,
    check_load=check_load,
)
"""accelerate splits what a sampler yields, reads ahead, counts epochs and skips batches itself."""
