"""Ray Train: a loader on this worker's device that keeps its coreset sampler."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from ..distributed import world
from ..extras import need
from ..selection.distributed_sampler import DistributedCoresetSampler
from ..selection.sampler import CoresetSampler

__all__ = ["prepare_data_loader"]


def prepare_data_loader(loader: DataLoader[Any], **options: Any) -> DataLoader[Any]:
    """What `ray.train.torch.prepare_data_loader` gives, or an error where that would drop the sampler.

    Ray puts a `DistributedSampler` over all the data in the place of any sampler that is none, without a word. It leaves a
    `DistributedCoresetSampler` alone, so with that one Ray's own function does the same as this.
    """
    sampler = loader.sampler
    if isinstance(sampler, CoresetSampler) and not isinstance(sampler, DistributedCoresetSampler) and world()[1] > 1:
        raise TypeError(
            f"Ray would put a sampler of all {len(loader.dataset)} examples in the place of CoresetSampler on "  # type: ignore[arg-type]
            f"{world()[1]} workers. Use DistributedCoresetSampler, made inside the training function."
        )
    return need("ray.train.torch", extra="ray", what="loaders of Ray Train").prepare_data_loader(loader, **options)
