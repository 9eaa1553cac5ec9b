"""Differentiable siamese augmentation (Zhao and Bilen 2021): a batch is changed in one random way, all of it alike.

What real and synthetic images go through must be the same draw, or their gradients differ for no good reason: hand both
a generator with the same seed, or concatenate them. Pixels are as a network sees them, zero being their mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn import functional

Augmentation = Callable[[Tensor, Generator], Tensor]
"""Images `(n, c, h, w)` to images of the same shape, differentiably; the draw comes from the generator."""


def colour(images: Tensor, generator: Generator) -> Tensor:
    """Brightness by up to 0.5 either way, saturation by 0 to 2, contrast by 0.5 to 1.5."""
    brightness, saturation, contrast = _uniform(3, generator)
    images = images + (brightness - 0.5)
    grey = images.mean(1, keepdim=True)
    images = grey + (images - grey) * (2 * saturation) if images.shape[1] > 1 else images
    mean = images.mean((1, 2, 3), keepdim=True)
    return mean + (images - mean) * (contrast + 0.5)


def crop(images: Tensor, generator: Generator) -> Tensor:
    """Moved by up to an eighth of its sides; zeros come in."""
    height, width = images.shape[-2:]
    furthest = [math.floor(side / 8 + 0.5) for side in (height, width)]
    down, right = (int(u * (2 * most + 1)) - most for u, most in zip(_uniform(2, generator), furthest, strict=True))
    padded = functional.pad(images, (max(right, 0), max(-right, 0), max(down, 0), max(-down, 0)))
    top, left = max(-down, 0), max(-right, 0)
    return padded[..., top : top + height, left : left + width]


def cutout(images: Tensor, generator: Generator) -> Tensor:
    """A rectangle of half the sides, centred anywhere, becomes zero."""
    keep = torch.ones(images.shape[-2:], dtype=images.dtype, device=images.device)
    spans = []
    for u, side in zip(_uniform(2, generator), images.shape[-2:], strict=True):
        length = max(1, round(side / 2))
        start = math.floor(u * side) - length // 2
        spans.append(slice(max(start, 0), start + length))
    keep[spans[0], spans[1]] = 0
    return images * keep


def flip(images: Tensor, generator: Generator) -> Tensor:
    """Left and right change sides, every other time."""
    return images.flip(-1) if _uniform(1, generator)[0] < 0.5 else images


def scale(images: Tensor, generator: Generator) -> Tensor:
    """Stretched by 1/1.2 to 1.2, each side by its own factor."""
    low, high = 1 / 1.2, 1.2
    horizontal, vertical = (low + (high - low) * u for u in _uniform(2, generator))
    return _warp(images, [[horizontal, 0.0, 0.0], [0.0, vertical, 0.0]])


def rotate(images: Tensor, generator: Generator) -> Tensor:
    """Turned by up to 15 degrees either way."""
    angle = (2 * _uniform(1, generator)[0] - 1) * math.radians(15)
    # coordinates run from -1 to 1 over both sides, so a turn of an oblong image needs their ratio
    ratio = images.shape[-2] / images.shape[-1]
    cos, sin = math.cos(angle), math.sin(angle)
    return _warp(images, [[cos, -sin * ratio, 0.0], [sin / ratio, cos, 0.0]])


ALL: tuple[Augmentation, ...] = (colour, crop, cutout, flip, scale, rotate)


def augment(images: Tensor, generator: Generator, *, ways: Sequence[Augmentation] = ALL) -> Tensor:
    """Images `(n, c, h, w)` changed in one of these ways, drawn from the generator, all images alike.

    Differentiable in the images. Leave `flip` out where it changes the class, as for digits.
    """
    if images.ndim != 4 or not images.is_floating_point():
        raise ValueError(
            f"augment takes float images (n, channels, height, width), got {images.dtype} {tuple(images.shape)}; "
            "for other data pass augmentation=None"
        )
    if not ways:
        raise ValueError("ways must name at least one augmentation, got none; for none at all pass augmentation=None")
    way = ways[int(torch.randint(len(ways), (), generator=generator))]
    return way(images, generator)


@dataclass(frozen=True)
class Moves:
    """Shifted, stretched and mirrored at random, in one interpolation; pixels at the edge go on beyond it.

    Args:
        shift: as a share of the sides, either way.
        stretch: by up to this factor either way, each side by its own.
        mirror: left and right change sides, every other time. Not for digits, whose class it changes.
        each: a draw for every image; else one for the whole batch.
    """

    shift: float = 0.125
    stretch: float = 1.2
    mirror: bool = True
    each: bool = False

    def __call__(self, images: Tensor, generator: Generator) -> Tensor:
        """Images of the same shape, differentiable in the images."""
        draws = torch.rand(len(images) if self.each else 1, 5, generator=generator)
        factors = 1 / self.stretch + (self.stretch - 1 / self.stretch) * draws[:, :2]
        if self.mirror:
            factors = factors * torch.where(draws[:, 4:] < 0.5, torch.tensor([-1.0, 1.0]), torch.ones(2))
        offsets = 2 * self.shift * (2 * draws[:, 2:4] - 1)  # coordinates run from -1 to 1
        matrix = torch.cat([torch.diag_embed(factors), offsets[:, :, None]], 2).to(images)
        grid = functional.affine_grid(matrix.expand(len(images), 2, 3), list(images.shape), align_corners=False)
        return functional.grid_sample(images, grid, padding_mode="border", align_corners=False)


def _uniform(count: int, generator: Generator) -> list[float]:
    values: list[float] = torch.rand(count, generator=generator).tolist()
    return values


def _warp(images: Tensor, matrix: list[list[float]]) -> Tensor:
    theta = torch.tensor(matrix, dtype=images.dtype, device=images.device).expand(len(images), 2, 3)
    grid = functional.affine_grid(theta, list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, align_corners=False)
