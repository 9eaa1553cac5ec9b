"""Several examples in one stored image (multi-formation, Kim et al. 2022): cut into tiles, each enlarged to the full size.

With `tiles=2` a hundred stored images are four hundred examples to train on, at half the resolution. What is stored is
what counts as the size of a set; what a network sees are the examples.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def unpack(images: Tensor, tiles: int) -> Tensor:
    """The examples in stored images: `(n, c, h, w)` to `(n * tiles**2, c, h, w)`, differentiable in the images.

    Example `i * tiles**2 + k` is tile `k` of image `i`, row by row, enlarged bilinearly. Where `tiles` does not divide a
    side, tiles have the next smaller size and the rest at the right and lower edge is not used.

    Example:
        >>> unpack(torch.rand(100, 3, 32, 32), tiles=2).shape
        torch.Size([400, 3, 32, 32])
    """
    height, width = tile_size(images, tiles)
    if tiles == 1:
        return images
    n, channels = images.shape[:2]
    used = images[..., : tiles * height, : tiles * width].reshape(n, channels, tiles, height, tiles, width)
    small = used.permute(0, 2, 4, 1, 3, 5).reshape(n * tiles**2, channels, height, width)
    return functional.interpolate(small, size=images.shape[-2:], mode="bilinear", align_corners=False)


def pack(images: Tensor, tiles: int) -> Tensor:
    """Stored images that hold these examples, shrunk with antialiasing: `(n * tiles**2, c, h, w)` to `(n, c, h, w)`.

    What is left at the right and lower edge where `tiles` does not divide a side repeats the last pixel.
    """
    height, width = tile_size(images, tiles)
    if len(images) % tiles**2:
        raise ValueError(f"images must be a multiple of tiles**2 = {tiles**2}, so that none is left, got {len(images)}")
    if tiles == 1:
        return images
    n, (channels, *full) = len(images) // tiles**2, images.shape[1:]
    small = functional.interpolate(images, size=(height, width), mode="bilinear", align_corners=False, antialias=True)
    grid = small.reshape(n, tiles, tiles, channels, height, width).permute(0, 3, 1, 4, 2, 5)
    whole = grid.reshape(n, channels, tiles * height, tiles * width)
    return functional.pad(whole, (0, full[1] - tiles * width, 0, full[0] - tiles * height), mode="replicate")


def tile_size(images: Tensor, tiles: int) -> tuple[int, int]:
    """Height and width of a tile of these images; refuses what cannot be cut."""
    if images.ndim != 4 or not images.is_floating_point():
        raise ValueError(
            f"only float images (n, channels, height, width) can be cut into tiles, got {images.dtype} "
            f"{tuple(images.shape)}"
        )
    smallest = min(images.shape[-2:])
    if isinstance(tiles, bool) or not isinstance(tiles, int) or not 1 <= tiles <= smallest:
        raise ValueError(f"tiles must be an integer from 1 to {smallest}, the pixels of a side, got {tiles!r}")
    return images.shape[-2] // tiles, images.shape[-1] // tiles
