"""A folder of images, one sub-folder per class: DD-Ranking's and anyone's."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch

from ..preprocessing import Raw
from ..untrusted import CoresetFileError
from . import pictures
from .published import Published
from .source import Source

name = "images"
layout = "a folder of images with one sub-folder per class"

_ENDINGS = {".jpg", ".jpeg", ".png", ".bmp", ".webp"}


def recognise(source: Source) -> bool:
    """True if there are sub-folders, all with images."""
    classes = class_folders(source)
    return len(classes) > 1 and all(any(images_in(folder)) for folder in classes)


def read(source: Source) -> Published:
    """Classes numbered in the order of their names."""
    classes = class_folders(source)
    files = [(path, label) for label, folder in enumerate(classes) for path in images_in(folder)]
    return published(source, files, method=None, class_names=tuple(folder.name for folder in classes))


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
    class_names: tuple[str, ...] | None = None,
) -> Published:
    """Bytes as they are on disk: 8-bit pixels have no preprocessing."""
    if not files:
        raise CoresetFileError(f"{source.path} has no images in its sub-folders")
    paths = [path for path, _ in files]
    on_disk = sum(path.stat().st_size for path in paths)
    return Published(
        pictures.stack(source.path, paths, lambda number: str(paths[number]), on_disk),
        torch.tensor([label for _, label in files]),
        "hard",
        preprocessing=Raw(),
        method=method,
        class_names=class_names,
        provenance={
            "folder": source.path.name,
            "targets": "hard, from the folders; soft labels are published apart",
        },
    )
