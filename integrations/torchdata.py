"""torchdata: its StatefulDataLoader needs no adapter, but has to see the sampler whose state it keeps."""

from __future__ import annotations

from torch.utils.data import BatchSampler, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import BatchSampler as StatefulBatches

from ..selection.caller import Caller, Framework, unknown_order
from ..selection.epoch import Epoch
from ..selection.sampler import CoresetSampler

__all__ = ["FRAMEWORK"]


def reads(caller: Caller) -> bool:
    """Whether a StatefulDataLoader is on the way."""
    return any(frame.module == "torchdata.stateful_dataloader.stateful_dataloader" for frame in caller.frames)


def start_of_pass(sampler: CoresetSampler, epoch: Epoch, caller: Caller) -> int:
    """Refuses a StatefulDataLoader that reads the sampler through a batch sampler that has no state.

    It would save how many batches were drawn and not of which epoch.
    """
    owners = [frame.owner for frame in caller.frames if isinstance(frame.owner, Sampler)]
    between = [owner for owner in owners if owner is not sampler and not hasattr(owner, "state_dict")]
    if between:
        raise TypeError(
            f"StatefulDataLoader does not save a sampler that is inside a {type(between[-1]).__module__}."
            f"{type(between[-1]).__qualname__}, which has no state_dict: a resumed run would repeat another epoch's "
            "batches. Pass sampler= and batch_size= to StatefulDataLoader, or use BatchSampler of "
            "torchdata.stateful_dataloader.sampler."
        )
    return int(epoch.start)


def share(sampler: CoresetSampler, order: list[int], start: int, caller: Caller) -> list[int] | str | None:
    """With `snapshot_every_n_steps` a resumed loader with workers reads some batches again and throws them away."""
    loaders = (frame.owner for frame in caller.frames if isinstance(frame.owner, StatefulDataLoader))
    loader = next(loaders, None)
    between: str | None = unknown_order(
        sampler, getattr(caller.loader, "_index_sampler", sampler), (BatchSampler, StatefulBatches)
    )
    steps = ((loader and loader.next_iter_state) or {}).get("_steps_since_snapshot", 0)
    if between is not None or not steps or loader is None:
        return between
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", 1)
    return order[start + steps * size :]


FRAMEWORK = Framework(reads=reads, start_of_pass=start_of_pass, share=share)
