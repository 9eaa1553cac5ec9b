"""torchdata: its StatefulDataLoader needs no adapter, but has to see the sampler whose state it keeps."""

from __future__ import annotations

import sys

from torch.utils.data import Sampler

from ..selection.sampler import CoresetSampler


def check_that_state_is_seen(sampler: CoresetSampler) -> None:
    """Refuses a StatefulDataLoader that reads the sampler through a batch sampler that has no state.

    It would save how many batches were drawn and not of which epoch. accelerate saves the sampler itself.
    """
    between, stateful, frame = None, False, sys._getframe(1)
    while frame is not None:
        name, owner = frame.f_globals.get("__name__"), frame.f_locals.get("self")
        if name == "accelerate.data_loader":
            return
        if isinstance(owner, Sampler) and owner is not sampler and not hasattr(owner, "state_dict"):
            between = owner
        stateful |= name == "torchdata.stateful_dataloader.stateful_dataloader"
        frame = frame.f_back  # type: ignore[assignment]
    if between is None or not stateful:
        return
    raise TypeError(
        f"StatefulDataLoader does not save a sampler that is inside a {type(between).__module__}."
        f"{type(between).__qualname__}, which has no state_dict: a resumed run would repeat another epoch's batches. Pass "
        "sampler= and batch_size= to StatefulDataLoader, or use BatchSampler of torchdata.stateful_dataloader.sampler."
    )
