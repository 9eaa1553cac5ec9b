"""timm: its loaders around a coreset sampler, and synthetic coresets for its models."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler

from ..distributed import world
from ..extras import need
from ..selection.distributed_sampler import DistributedCoresetSampler
from ..selection.sampler import CoresetSampler
from ..selection.weighted import WeightedDataset
from ..synthetic.checks import check_positive
from ..synthetic.dataset import SyntheticCoreset
from ..synthetic.targets import Targets, loss_of, targets_as
from .images import ImageConfig

__all__ = ["for_timm", "with_sampler"]

_KNOWN_INTERPOLATION = ("bicubic", "bilinear", "nearest")


def with_sampler(loader: Any, sampler: CoresetSampler) -> Any:
    """The loader that `timm.data.create_loader` made, with everything it does, around a coreset sampler.

    Mixup, workers, the prefetcher and its random erasing stay as they are. With the prefetcher images leave the data set as
    bytes and are normalised on the device: selection then does the same, unless the sampler has a `forward_fn` of its own.
    While mixup is on, a sampler that watches the model does not, and scores by passes of its own.
    Under several processes pass a `DistributedCoresetSampler`. Call `loader.sampler.set_epoch(epoch)` or do not: epochs
    count themselves.

    Example:
        >>> loader = with_sampler(timm.data.create_loader(train_set, 224, 128, is_training=True), sampler)
    """
    timm_loader = need("timm.data.loader", extra="timm", what="loaders of timm")
    prefetcher = loader if isinstance(loader, timm_loader.PrefetchLoader) else None
    plain = loader if prefetcher is None else prefetcher.loader
    _check_loader(plain, sampler, timm_loader, prefetcher is not None)
    rebuilt = _around(plain, sampler)
    _watch_unless_mixed(sampler, rebuilt.collate_fn)
    if prefetcher is None:
        return rebuilt
    if sampler.forward_fn is None:
        sampler.forward_fn = partial(_forward_of_bytes, prefetcher.mean, prefetcher.std, prefetcher.img_dtype)
    changed = copy.copy(prefetcher)
    changed.loader = rebuilt
    return changed


def _around(loader: DataLoader[Any], sampler: CoresetSampler) -> DataLoader[Any]:
    names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
    more = ("generator", "prefetch_factor", "persistent_workers", "pin_memory_device", "batch_size", "drop_last")
    settings = {name: getattr(loader, name) for name in (*names, *more) if hasattr(loader, name)}
    dataset: Any = sampler.dataset if isinstance(sampler.dataset, WeightedDataset) else loader.dataset
    return DataLoader(dataset, sampler=sampler, **settings)


def _watch_unless_mixed(sampler: CoresetSampler, collate: Any) -> None:
    observing = sampler._observing
    observing.mixes = partial(_mixes, collate)
    if observing.mixes() and (observing.strategy_reads or observing.watch):
        instead = " and scoring passes take over" if observing.strategy_reads else ""
        sampler._warn_once(
            "mixup is on, and what the model says of mixed images belongs to no single example: passes that begin while "
            f"loader.mixup_enabled are not watched{instead}."
        )


def _mixes(collate: Any) -> bool:
    return bool(getattr(collate, "mixup_enabled", False))


def _forward_of_bytes(mean: Tensor, std: Tensor, dtype: Any, model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """What timm's prefetcher does to a batch of bytes, then the model."""
    images, labels = batch[0], batch[1]
    return model(images.to(mean.device).to(dtype).sub(mean).div(std)), labels


def _check_loader(loader: Any, sampler: CoresetSampler, timm_loader: Any, prefetched: bool) -> None:
    """Refuses loaders around which a sampler would be left out, come an epoch early, or lose its weights."""
    if isinstance(loader, timm_loader.MultiEpochsDataLoader):
        raise TypeError(
            "MultiEpochsDataLoader begins the next epoch before this one is over, so it would select with the model of an "
            "epoch ago. Leave use_multi_epochs_loader=True out; persistent_workers=True saves the same time."
        )
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        kind = type(loader).__name__ if not isinstance(loader, DataLoader) else type(loader.dataset).__name__
        raise TypeError(
            f"loader must be what timm.data.create_loader makes of a data set with a length, got {kind}; a stream has no "
            "coreset. Read the data as an ImageDataset."
        )
    if type(loader.sampler) not in (RandomSampler, DistributedSampler) or loader.batch_size is None:
        raise TypeError(
            f"loader must draw at random from its data, but it uses {type(loader.sampler).__name__} and "
            f"{type(loader.batch_sampler).__name__}, which would be lost. Make it by create_loader(..., is_training=True) "
            "without num_aug_repeats and input_size_choices."
        )
    _check_sampler(loader, sampler, prefetched)


def _check_sampler(loader: Any, sampler: CoresetSampler, prefetched: bool) -> None:
    if not isinstance(sampler, CoresetSampler):
        raise TypeError(f"sampler must be a CoresetSampler or DistributedCoresetSampler, got {type(sampler).__name__}")
    if world()[1] > 1 and not isinstance(sampler, DistributedCoresetSampler):
        raise TypeError(
            f"timm leaves it to the sampler to share examples out, and there are {world()[1]} processes: a "
            "CoresetSampler would give each of them all. Pass a DistributedCoresetSampler."
        )
    if len(sampler.dataset) != len(loader.dataset):
        raise ValueError(
            f"sampler and loader must have the same data set, got {len(sampler.dataset)} and "
            f"{len(loader.dataset)} examples"
        )
    if sampler.weighting == "loss" and prefetched:
        raise ValueError(
            'weighting="loss" does not go with timm\'s prefetcher and mixup: they make (image, label) batches and drop the '
            'weight. Pass create_loader(..., use_prefetcher=False), or weighting="resample", which needs no change to the '
            "loop."
        )


def for_timm(
    coreset: SyntheticCoreset, model: nn.Module, *, size: int | None = None, targets: Targets | None = None
) -> TimmDataset:
    """The coreset as this model's data config asks: resized, grey made RGB, re-normalised exactly once.

    Train on it with `fit`, or with any loop and `CrossEntropyLoss` from a plain `DataLoader`. timm's
    `create_loader` would normalise a second time and, with its prefetcher, truncate floats to bytes; handed this dataset it
    raises.

    Args:
        coreset: its images are taken before its own preprocessing.
        model: a model of timm, also inside DistributedDataParallel or torch.compile. A module of another kind has no data
            config: then `size` must be said, and images are normalised by the means and deviations of ImageNet.
        size: pixels of a side, over the config's.
        targets: `"hard"` gives class numbers, `"soft"` probabilities, both for `CrossEntropyLoss`; `"own"` the targets as
            stored, for `coreset.loss`. By default class numbers where the coreset has them, else probabilities.

    Example:
        >>> train_set = for_timm(coreset, model)
        >>> fit(model, train_set)  # as recipe_for(coreset, model) says; or a loop of your own:
        >>> for x, y in DataLoader(train_set, batch_size=50, shuffle=True):
        ...     loss = torch.nn.functional.cross_entropy(model(x), y)
    """
    if size is not None:
        check_positive("size", size, whole=True)
    return TimmDataset(coreset, _config(model, size), targets)


class TimmDataset(Dataset[list[Tensor]]):
    """What `for_timm` gives: finished images and their targets."""

    def __init__(self, coreset: SyntheticCoreset, config: ImageConfig, asked: Targets | None) -> None:
        self.coreset, self.asked = coreset, asked
        kind: Targets = asked or ("hard" if coreset.target_kind == "hard" else "soft")
        self.pixels, self.targets, self.config = coreset.exact_pixels(), targets_as(coreset, kind), config
        self.loss = partial(loss_of, coreset, kind)
        config(self.pixels[0])  # an image that does not fit is an error now, not in a worker

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> list[Tensor]:
        # A list, not a tuple: default_collate treats both alike, timm's byte-making fast_collate asserts a
        # tuple, so it cannot corrupt these images even through a wrapper such as Subset.
        return [self.config(self.pixels[index]), self.targets[index]]

    @property
    def transform(self) -> None:
        """None: nothing is left to be done to these images."""
        return None

    @transform.setter
    def transform(self, value: Any) -> None:
        raise TypeError(
            "for_timm's images are resized and normalised already; a transform (create_loader sets one) "
            "would do it again. Use torch.utils.data.DataLoader(train_set, batch_size=..., shuffle=True)"
        )


def _config(model: nn.Module, size: int | None) -> ImageConfig:
    timm_data = need("timm.data", extra="timm", what="data configs of timm models")
    known = bool(getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None))
    if not known and isinstance(inner := getattr(model, "module", None), nn.Module):
        return _config(inner, size)  # DistributedDataParallel and its kind
    if not known and size is None:
        raise ValueError(
            f"size must be said for {type(model).__name__}, which is no model of timm and has no data config: "
            "for_timm(coreset, model, size=32) for one that takes 32 pixels"
        )
    found = timm_data.resolve_model_data_config(model)
    height, width = found["input_size"][-2:]
    embedding = getattr(model, "patch_embed", None)
    if getattr(embedding, "img_size", None) is not None and getattr(embedding, "strict_img_size", True):
        height, width = embedding.img_size  # type: ignore[union-attr]  # built for another size than the config's
    mean, std = tuple(found["mean"]), tuple(found["std"])
    if _channels(model) == 1:
        mean, std = (sum(mean) / len(mean),), (sum(std) / len(std),)  # as timm does for grey models
    interpolation = found["interpolation"] if found["interpolation"] in _KNOWN_INTERPOLATION else "bicubic"
    return ImageConfig((size, size) if size else (int(height), int(width)), mean, std, interpolation)


def _channels(model: nn.Module) -> int:
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    return 3 if first is None else first.in_channels
