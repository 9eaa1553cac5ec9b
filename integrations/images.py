"""Pixels made ready for a model, once: channels, size and normalisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from ..synthetic.dataset import SyntheticCoreset

Targets = Literal["hard", "soft", "own"]


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


def targets_as(coreset: SyntheticCoreset, kind: Targets) -> Tensor:
    """Class numbers (`"hard"`), probabilities that plain cross-entropy takes (`"soft"`), or as stored (`"own"`).

    Scores and learned regression targets `(n, classes)` become probabilities by softmax.
    """
    if kind not in get_args(Targets):
        raise ValueError(f"targets must be 'hard', 'soft' or 'own', got {kind!r}")
    if kind == "own" or coreset.target_kind == kind:
        return coreset.targets
    if coreset.target_kind == "regression":
        if coreset.targets.ndim != 2:
            shape = tuple(coreset.targets.shape)
            raise ValueError(f"targets {shape} to be regressed on have no classes: pass targets='own' and coreset.loss")
        return coreset.targets.argmax(-1) if kind == "hard" else coreset.targets.softmax(-1)
    return coreset.with_targets(kind).targets


def loss_of(
    coreset: SyntheticCoreset, kind: Targets, outputs: Tensor, targets: Tensor, *, reduction: str = "mean"
) -> Tensor:
    """The coreset's own loss on its stored targets, else cross-entropy; class numbers are taken in any case.

    Targets of another shape than the outputs' are refused, because squared error would broadcast them.
    """
    if outputs.ndim == 2 and targets.shape == outputs.shape[:1] and not targets.is_floating_point():
        return functional.cross_entropy(outputs, targets.long(), reduction=reduction)
    if not targets.is_floating_point() or targets.shape != outputs.shape:
        raise ValueError(
            f"labels must be class numbers ({len(outputs)},) or floats {tuple(outputs.shape)} like the outputs, got "
            f"{str(targets.dtype).removeprefix('torch.')} {tuple(targets.shape)}"
        )
    if kind == "own":
        return coreset.loss(outputs, targets, reduction=reduction)
    return functional.cross_entropy(outputs, targets.to(outputs.dtype), reduction=reduction)
