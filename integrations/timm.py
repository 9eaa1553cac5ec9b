"""Synthetic coresets for timm models."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from ..formats.extras import need
from ..synthetic import SyntheticCoreset
from .images import ImageConfig

__all__ = ["for_timm"]

_KNOWN_INTERPOLATION = ("bicubic", "bilinear", "nearest")


def for_timm(coreset: SyntheticCoreset, model: nn.Module, *, size: int | None = None) -> TimmDataset:
    """The coreset as this model's data config asks: resized, grey made RGB, re-normalised exactly once.

    Feed it to a plain `DataLoader`. timm's `create_loader` would normalise a second time and, with its
    prefetcher, truncate floats to bytes; handed this dataset it raises. `size` overrides the config's.

    Example:
        >>> loader = DataLoader(for_timm(coreset, model), batch_size=32, shuffle=True)
    """
    return TimmDataset(coreset, _config(model, size))


class TimmDataset(Dataset[list[Tensor]]):
    """What `for_timm` gives: finished images and their targets."""

    def __init__(self, coreset: SyntheticCoreset, config: ImageConfig) -> None:
        self.pixels, self.targets, self.config = coreset.exact_pixels(), coreset.targets, config
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
