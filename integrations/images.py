"""Pixels made ready for a model, once: channels, size and normalisation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class ImageConfig:
    """What a model expects of an image. Pixels are first multiplied by `scale`, then `shift` is added.

    Images smaller than the `crop` get a black border; with `bgr` red and blue change places at the end.
    """

    size: tuple[int, int] | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"
    crop: tuple[int, int] | None = None
    scale: float = 1.0
    shift: float = 0.0
    bgr: bool = False

    def __call__(self, pixels: Tensor) -> Tensor:
        """An image `(c, h, w)` in [0, 1] as the model wants it."""
        pixels = self._channels(pixels.float())
        if self.size is not None and tuple(pixels.shape[-2:]) != self.size:
            nearest = self.interpolation == "nearest"  # as pillow takes it, by the centres of pixels
            smooth = {} if nearest else {"antialias": True, "align_corners": False}
            mode = "nearest-exact" if nearest else self.interpolation
            pixels = functional.interpolate(pixels[None], self.size, mode=mode, **smooth)[0]
        if self.crop is not None:
            pixels = _cropped(pixels, *self.crop)
        mean, std = torch.tensor(self.mean)[:, None, None], torch.tensor(self.std)[:, None, None]
        finished = (pixels * self.scale + self.shift - mean) / std
        return finished.flip(0) if self.bgr else finished

    def _channels(self, pixels: Tensor) -> Tensor:
        wanted, have = len(self.mean), len(pixels)
        if have == wanted:
            return pixels
        if have == 1:
            return pixels.expand(wanted, -1, -1)
        raise ValueError(
            f"the model takes {wanted} channel(s), the coreset has {have}: colour cannot be dropped silently"
        )


def _cropped(pixels: Tensor, height: int, width: int) -> Tensor:
    """The middle of an image `(c, h, w)`, with black around it where it is smaller."""
    down, right = max(0, height - pixels.shape[-2]), max(0, width - pixels.shape[-1])
    pixels = functional.pad(pixels, (right // 2, right - right // 2, down // 2, down - down // 2))
    top, left = (pixels.shape[-2] - height) // 2, (pixels.shape[-1] - width) // 2
    return pixels[:, top : top + height, left : left + width]
