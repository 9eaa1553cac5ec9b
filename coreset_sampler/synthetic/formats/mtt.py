"""MTT (Cazenavette et al. 2022) and BPC (Kim et al. 2022): `images_best.pt` with `labels_best.pt`.

BPC counts steps instead (`images_5000.pt`); large sets come in parts (`images_best_0.pt` to `_4.pt`).
Point at the folder or at one of the images' files.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from ..untrusted import CoresetFileError, inside
from . import ask
from .published import Published
from .source import Source, load

name = "mtt"
layout = "images_best.pt and labels_best.pt (also images_5000.pt, or in parts images_best_0.pt ...) of MTT or BPC"

_IMAGES = re.compile(r"images_(?P<tag>best|\d+)(?:_(?P<part>\d+))?\.pt")


def recognise(source: Source) -> bool:
    """True if the labels are class numbers."""
    tag = tag_of(source)
    return tag is not None and not load_parts(source.folder, "labels", tag).is_floating_point()


def read(source: Source) -> Published:
    """Images and class numbers; the preprocessing is not in the files."""
    tag = tag_of(source) or ""
    images, labels = load_parts(source.folder, "images", tag), load_parts(source.folder, "labels", tag)
    return Published(
        images,
        labels.long(),
        "hard",
        ask=ask_for(source.path, images, "MTT and BPC"),
        method="MTT or BPC",
        learning_rate=load_rate(source.folder / f"lr_{tag}.pt"),
        provenance={"file": source.path.name, "tag": tag},
    )


def ask_for(path: Path, images: Tensor, makers: str) -> str:
    """The two ways these were made."""
    lines = [
        f"{makers} save tensors without a word about it. Made without --zca:",
        ask.normalize(path, images),
    ]
    return "\n".join([*lines, "Made with --zca:", ask.zca(path, images, "A")])


def tag_of(source: Source) -> str | None:
    """`best` or the number of steps; None if no such files are there."""
    if not source.path.is_dir():
        found = _IMAGES.fullmatch(source.path.name)
        tags = {found["tag"]} if found else set()
    else:
        tags = {m["tag"] for entry in source.path.iterdir() if (m := _IMAGES.fullmatch(entry.name))}
    tags = {tag for tag in tags if _parts(source.folder, "labels", tag)}
    if len(tags) > 1 and "best" not in tags:
        steps = ", ".join(sorted(tags, key=int))
        raise CoresetFileError(f"{source.path} holds images of several steps, {steps}: point at one file of images")
    return "best" if "best" in tags else next(iter(tags), None)


def load_parts(folder: Path, kind: str, tag: str) -> Tensor:
    """One file, or all parts in order joined."""
    parts = _parts(folder, kind, tag)
    numbers = [number for number, _ in parts]
    if len(numbers) > 1 and numbers != list(range(len(numbers))):
        raise CoresetFileError(f"{folder} holds parts {numbers} of {kind}_{tag}: some are missing")
    values = [load(inside(folder, path.name)) for _, path in parts]
    if not values or not all(isinstance(value, Tensor) and value.ndim for value in values):
        raise CoresetFileError(f"{folder} has no tensor in {kind}_{tag}.pt or its parts")
    try:
        return torch.cat([value.detach() for value in values])
    except RuntimeError as error:
        raise CoresetFileError(f"{folder}: the parts of {kind}_{tag} do not fit together: {error}") from error


def load_rate(path: Path) -> float | None:
    """The learned learning rate, if it was saved."""
    if not path.is_file():
        return None
    value = load(inside(path.parent, path.name))
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise CoresetFileError(f"{path} must hold one learning rate")
    return float(value)


def _parts(folder: Path, kind: str, tag: str) -> list[tuple[int, Path]]:
    """Number and path of each part; a file that is whole counts as part 0."""
    whole = folder / f"{kind}_{tag}.pt"
    if whole.is_file():
        return [(0, whole)]
    pattern = re.compile(rf"{kind}_{re.escape(tag)}_(\d+)\.pt")
    return sorted((int(m[1]), entry) for entry in folder.iterdir() if (m := pattern.fullmatch(entry.name)))
