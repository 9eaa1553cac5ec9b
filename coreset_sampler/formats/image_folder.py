"""A folder of images, one sub-folder per class: DD-Ranking's and anyone's."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..coreset_file import CoresetFileError
from ..preprocessing import Raw
from .extras import need
from .published import Published
from .source import Source

name = "images"
layout = "a folder of images with one sub-folder per class"

_ENDINGS = {".jpg", ".jpeg", ".png", ".bmp", ".webp"}
_MOST_PIXELS = 1 << 26  # of one image: 8192 x 8192


def recognise(source: Source) -> bool:
    """True if there are sub-folders, all with images."""
    classes = class_folders(source)
    return len(classes) > 1 and all(any(images_in(folder)) for folder in classes)


def read(source: Source) -> Published:
    """Classes numbered in the order of their names."""
    classes = class_folders(source)
    files = [(path, label) for label, folder in enumerate(classes) for path in images_in(folder)]
    return published(source, files, method=None, classes=tuple(folder.name for folder in classes))


def class_folders(source: Source) -> list[Path]:
    """The sub-folders in order; links and hidden ones are not followed."""
    if not source.path.is_dir():
        return []
    found = [e for e in source.path.iterdir() if e.is_dir() and not e.is_symlink() and not e.name.startswith(".")]
    return sorted(found)


def images_in(folder: Path) -> Iterable[Path]:
    """The image files in order; links are not followed, so nothing outside the folder is read."""
    for entry in sorted(folder.iterdir()):
        if entry.suffix.lower() in _ENDINGS and entry.is_file() and not entry.is_symlink():
            yield entry


def numbered(source: Source, folders: re.Pattern[str], names: re.Pattern[str]) -> list[tuple[Path, int]]:
    """Each image with the class that its folder and its own name agree on: group 1 of both patterns."""
    files = []
    for folder in class_folders(source):
        in_folder = folders.fullmatch(folder.name)
        for path in images_in(folder) if in_folder else ():
            in_name = names.fullmatch(path.name)
            if in_folder is None or in_name is None or int(in_folder[1]) != int(in_name[1]):
                raise CoresetFileError(f"{path} must name the class of its folder, {folder.name}")
            files.append((path, int(in_name[1])))
    return files


def published(
    source: Source,
    files: list[tuple[Path, int]],
    *,
    method: str | None,
    classes: tuple[str, ...] | None = None,
) -> Published:
    """Bytes as they are on disk: 8-bit pixels have no preprocessing."""
    if not files:
        raise CoresetFileError(f"{source.path} has no images in its sub-folders")
    images = [read_image(path) for path, _ in files]
    for (path, _), image in zip(files, images, strict=True):
        if image.shape != images[0].shape:
            raise CoresetFileError(
                f"all images must have one size and mode: {files[0][0]} is {tuple(images[0].shape)}, "
                f"{path} {tuple(image.shape)}"
            )
    return Published(
        torch.stack(images),
        torch.tensor([label for _, label in files]),
        "hard",
        preprocessing=Raw(),
        method=method,
        classes=classes,
        provenance={
            "folder": source.path.name,
            "targets": "hard, from the folders; soft labels are published apart",
        },
    )


def read_image(path: Path) -> Tensor:
    """Bytes `(1 or 3, h, w)`."""
    image = need("PIL.Image", extra="formats", what="folders of images")
    try:
        with image.open(path) as picture:
            if picture.width * picture.height > _MOST_PIXELS:
                raise CoresetFileError(
                    f"{path} is refused: {picture.width} x {picture.height} pixels unpack to too much"
                )
            return from_picture(picture)
    except (OSError, ValueError, SyntaxError, image.DecompressionBombError) as error:
        if isinstance(error, CoresetFileError):
            raise
        raise CoresetFileError(f"{path} is truncated or no image: {error}") from error


def from_picture(picture: object) -> Tensor:
    """A PIL image as bytes, grey kept grey."""
    mode = "L" if picture.mode in ("1", "L") else "RGB"  # type: ignore[attr-defined]
    array = np.array(picture.convert(mode))  # type: ignore[attr-defined]
    return torch.from_numpy(array).reshape(*array.shape[:2], -1).permute(2, 0, 1).contiguous()
