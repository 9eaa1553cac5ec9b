"""A coreset as a picture, one row per class."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..extras import need
from .dataset import SyntheticCoreset

_TILE = 72  # pixels on screen that an image gets, about
_GAP = 5
_TOP, _MARGIN = 78, 20
_INK, _FAINT = "#1a1a1a", "#6e6e6e"


def draw(coreset: SyntheticCoreset, path: str | os.PathLike[str], *, rows: int = 20, columns: int = 10) -> None:
    """Writes the images to `path` (.png, .pdf, .svg): at most so many rows, one a class, of so many images.

    Short rows stand in blocks side by side.
    """
    figures = need("matplotlib.figure", extra="plots", what="pictures")
    if rows < 1 or columns < 1:
        raise ValueError(f"rows and columns must be at least 1, got {rows} and {columns}")
    labels = _image_labels(coreset)
    classes = labels.unique().tolist()
    shown = [(labels == c).nonzero().flatten()[:columns] for c in classes[:rows]]
    names = [_name(coreset, c) for c in classes[:rows]]
    title, line = _title(coreset), _line(coreset, _hidden(labels, shown, classes))

    widest = max(len(row) for row in shown)
    depth = _depth(len(shown), widest)
    pixels = coreset.pixels(stored=True)
    blocks = [_canvas(pixels, shown[start : start + depth], widest) for start in range(0, len(shown), depth)]
    (height, block_width), tile = blocks[0].shape[:2], _tile(coreset)[0]
    label = 24 + 9 * max(map(len, names))
    width = max(_MARGIN + len(blocks) * (label + block_width), _MARGIN + 12 * len(title), _MARGIN + 7 * len(line))
    page = _Page(figures, width + _MARGIN, _TOP + height + _MARGIN)
    page.text(_MARGIN, 30, title, fontsize=14, weight="bold", color=_INK)
    page.text(_MARGIN, 54, line, fontsize=9, color=_FAINT)
    for number, block in enumerate(blocks):
        left = number * (label + block_width) + label
        page.image(left, _TOP, block)
        for row, name in enumerate(names[number * depth : (number + 1) * depth]):
            page.text(left - 12, _TOP + row * (tile + _GAP) + tile / 2, name, ha="right", fontsize=10, color=_INK)
    page.figure.savefig(path)


def _depth(rows: int, columns: int) -> int:
    """Rows in a block: as many blocks as keep the page about square, with as few places empty as can be."""
    most = max(1, min(rows // 3, 10 // (columns + 2)))
    blocks = min(range(1, most + 1), key=lambda number: (-rows % number, -number))
    return math.ceil(rows / blocks)


class _Page:
    """A white page measured in pixels from the top left."""

    def __init__(self, figures: Any, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.figure = figures.Figure(figsize=(width / 100, height / 100), dpi=200, facecolor="white")

    def text(self, x: float, y: float, text: str, **style: Any) -> None:
        self.figure.text(x / self.width, 1 - y / self.height, text, va="center", **style)

    def image(self, x: float, y: float, image: np.ndarray) -> None:
        height, width = image.shape[:2]
        box = (x / self.width, 1 - (y + height) / self.height, width / self.width, height / self.height)
        axes = self.figure.add_axes(box)
        axes.imshow(image, interpolation="nearest", aspect="auto")
        axes.set_axis_off()


def uneven(coreset: SyntheticCoreset) -> str:
    """Which classes the examples belong to, where these are not those of `images_per_class` images; empty if they are."""
    if coreset.images_per_class is None or not coreset.num_classes or coreset.targets.ndim > 2:
        return ""
    if coreset.views is not None:
        return ""  # these are mixtures of classes
    present, counts = (values.tolist() for values in _labels(coreset).unique(return_counts=True))
    each = zip(present, counts, strict=True)
    expected = coreset.images_per_class * coreset.examples_per_image
    others = [f"{n} {_name(coreset, label)}" for label, n in each if n != expected]
    others = [*others[:9], "..."] if len(others) > 9 else others
    missing = coreset.num_classes - len(present)
    others += [f"none of {missing} classes"] if missing else []
    by = "their labels" if coreset.target_kind == "hard" else "their largest target, which was learned"
    return f"{', '.join(others)} by {by}" if others else ""


def _title(coreset: SyntheticCoreset) -> str:
    per_class = coreset.images_per_class
    count = f"{per_class} image{'s' * (per_class != 1)} per class" if per_class else coreset.size
    return "  ·  ".join(str(part) for part in (coreset.provenance.get("data"), coreset.method, count) if part)


def _line(coreset: SyntheticCoreset, hidden: str) -> str:
    size = " x ".join(map(str, coreset.stored.shape[-2:]))
    about = [
        f"{coreset.size} of {size}",
        f"{coreset.target_kind} targets",
        _accuracy(coreset),
        uneven(coreset),
        hidden,
    ]
    return "  ·  ".join(part for part in about if part)


def _accuracy(coreset: SyntheticCoreset) -> str:
    measured = coreset.provenance.get("accuracy")
    if not isinstance(measured, dict) or "mean" not in measured:
        return ""
    return f"trains to {measured['mean']:.1%} (n={measured.get('n')})"


def _hidden(labels: Tensor, shown: list[Tensor], classes: list[int]) -> str:
    most = int(labels.unique(return_counts=True)[1].max())
    parts = [f"{len(shown)} of {len(classes)} classes" if len(shown) < len(classes) else ""]
    widest = max(len(row) for row in shown)
    parts += [f"{widest} of {most} a class" if widest < most else ""]
    return "showing " + ", ".join(part for part in parts if part) if any(parts) else ""


def _image_labels(coreset: SyntheticCoreset) -> Tensor:
    """Of each stored image that of most of its examples."""
    labels: Tensor = _labels(coreset).unflatten(0, (-1, coreset.examples_per_image)).mode(1).values
    return labels


def _labels(coreset: SyntheticCoreset) -> Tensor:
    """The class of each example, the likeliest for soft targets; one row for targets that have none."""
    if coreset.target_kind == "regression" and coreset.targets.ndim != 2:
        return torch.zeros(len(coreset), dtype=torch.int64)
    return coreset.with_targets("hard").targets.long()


def _name(coreset: SyntheticCoreset, number: int) -> str:
    return coreset.class_names[number] if coreset.class_names else f"class {number}"


def _tile(coreset: SyntheticCoreset) -> tuple[int, int]:
    """Height and width of an image on the page: enlarged by a whole factor, so that pixels stay square."""
    height, width = coreset.stored.shape[-2:]
    return height * _factor(height, width), width * _factor(height, width)


def _factor(height: int, width: int) -> int:
    return max(1, round(_TILE / max(height, width)))


def _canvas(pixels: Tensor, shown: list[Tensor], columns: int) -> np.ndarray:
    """White with rows of images on it."""
    factor = _factor(*pixels.shape[-2:])
    height, width = (side * factor for side in pixels.shape[-2:])
    canvas = np.ones((len(shown) * (height + _GAP) - _GAP, columns * (width + _GAP) - _GAP, 3), np.float32)
    for r, row in enumerate(shown):
        for c, index in enumerate(row.tolist()):
            image = pixels[index].float().expand(3, -1, -1).permute(1, 2, 0).repeat_interleave(factor, 0)
            y, x = r * (height + _GAP), c * (width + _GAP)
            canvas[y : y + height, x : x + width] = image.repeat_interleave(factor, 1).numpy()
    return canvas
