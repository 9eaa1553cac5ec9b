"""Pixels made ready for a model, once: channels, size and normalisation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class ImageConfig:
    """What a model expects of an image. Pixels are first multiplied by `scale`, then `shift` is added."""

    size: tuple[int, int] | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"
    crop: tuple[int, int] | None = None
    scale: float = 1.0
    shift: float = 0.0

    def __call__(self, pixels: Tensor) -> Tensor:
        """An image `(c, h, w)` in [0, 1] as the model wants it."""
        pixels = self._channels(pixels.float())
        if self.size is not None and tuple(pixels.shape[-2:]) != self.size:
            smooth = {} if self.interpolation == "nearest" else {"antialias": True, "align_corners": False}
            pixels = functional.interpolate(pixels[None], self.size, mode=self.interpolation, **smooth)[0]
        if self.crop is not None:
            top, left = ((have - want) // 2 for have, want in zip(pixels.shape[-2:], self.crop, strict=True))
            pixels = pixels[:, top : top + self.crop[0], left : left + self.crop[1]]
        mean, std = torch.tensor(self.mean)[:, None, None], torch.tensor(self.std)[:, None, None]
        return (pixels * self.scale + self.shift - mean) / std

    def _channels(self, pixels: Tensor) -> Tensor:
        wanted, have = len(self.mean), len(pixels)
        if have == wanted:
            return pixels
        if have == 1:
            return pixels.expand(wanted, -1, -1)
        raise ValueError(
            f"the model takes {wanted} channel(s), the coreset has {have}: colour cannot be dropped silently"
        )
