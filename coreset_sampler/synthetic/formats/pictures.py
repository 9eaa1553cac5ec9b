"""Opens untrusted pictures: four formats that Pillow decodes itself, sizes checked before a pixel is unpacked."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...extras import need
from ..untrusted import LIMITS, CoresetFileError, reading

# Left to itself Pillow tries all it knows, by content, and hands EPS to Ghostscript.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP")


def stack(path: Path, files: Sequence[Any], name: Callable[[int], str], on_disk: int) -> Tensor:
    """All pictures, `(n, 1 or 3, h, w)` bytes. `files` are paths or bytes, `name(i)` is for messages."""
    images: list[Tensor] = []
    for number, file in enumerate(files):
        images.append(read_picture(file, name(number)))
        if number == 0:
            LIMITS.check_unpacked(path, len(files) * images[0].numel(), on_disk)
        if images[-1].shape != images[0].shape:
            raise CoresetFileError(
                f"all images must have one size and mode: {name(0)} is {tuple(images[0].shape)}, "
                f"{name(number)} {tuple(images[-1].shape)}"
            )
    return torch.stack(images)


def read_picture(file: Path | bytes, name: str) -> Tensor:
    """Bytes `(1 or 3, h, w)`, grey kept grey, 16 bits scaled to 8."""
    image = need("PIL.Image", extra="formats", what="images")
    with (
        reading(name, f"is truncated or no image of {', '.join(FORMATS)}"),
        image.open(io.BytesIO(file) if isinstance(file, bytes) else file, formats=FORMATS) as picture,
    ):
        if picture.width * picture.height > LIMITS.image_pixels:
            raise CoresetFileError(f"{name} is refused: {picture.width} x {picture.height} pixels unpack to too much")
        array = np.array(in_bytes(picture, name))
        return torch.from_numpy(array).reshape(*array.shape[:2], -1).permute(2, 0, 1).contiguous()


def in_bytes(picture: Any, name: str) -> Any:
    """A picture of Pillow with 8 bits, grey kept grey and all others RGB; 16 bits are scaled, floats refused."""
    if picture.mode == "F":
        raise CoresetFileError(f"{name} is refused: float pixels have no range that is known; store 8 or 16 bits")
    if picture.mode.startswith("I"):  # grey of 16 bits, which `convert` would clip at 255
        array = np.asarray(picture).astype(np.float64)
        if not 0 <= array.min() <= array.max() < 2**16:
            raise CoresetFileError(f"{name} is refused: {picture.mode} pixels beyond 16 bits; store 8 or 16 bits")
        return need("PIL.Image", extra="formats", what="images").fromarray(np.rint(array / 257).astype(np.uint8))
    return picture.convert("L" if picture.mode in ("1", "L") else "RGB")
