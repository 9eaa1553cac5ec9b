"""How a coreset came to be, as a picture: one row per class, one column per step."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from ...extras import need
from ..preprocessing import Preprocessing


def draw_film(
    frames: Mapping[int, Tensor], path: str | os.PathLike[str], *, preprocessing: Preprocessing, title: str = ""
) -> None:
    """Writes frames `(num_classes, channels, h, w)` by step to `path` (.png, .pdf, .svg), oldest on the left."""
    figures = need("matplotlib.figure", extra="plots", what="pictures")
    if not frames:
        raise ValueError("frames must hold at least one step, got none: only images are filmed")
    steps = sorted(frames)
    columns = [_column(preprocessing.look(frames[step].float().cpu())) for step in steps]
    canvas = torch.cat(columns, 2).permute(1, 2, 0).numpy()
    height, width = canvas.shape[:2]
    inches = 0.55 * len(steps)
    figure = figures.Figure(figsize=(inches, inches * height / width + 0.6), dpi=200, facecolor="white")
    top = 0.6 / (inches * height / width + 0.6)
    axes = figure.add_axes((0, 0, 1, 1 - top))
    axes.imshow(canvas, interpolation="nearest", aspect="auto")
    axes.set_axis_off()
    figure.text(0.01, 1 - 0.3 * top, title, fontsize=8, weight="bold", va="center", color="#1a1a1a")
    for column, step in enumerate(steps):
        x = (column + 0.5) / len(steps)
        figure.text(x, 1 - 0.8 * top, str(step), fontsize=6, ha="center", va="center", color="#6e6e6e")
    figure.savefig(path)


def _column(images: Tensor) -> Tensor:
    """Images one below the other, in colour, a white line around each."""
    images = functional.pad(images.expand(-1, 3, -1, -1), (1, 1, 1, 1), value=1.0)
    return torch.cat(list(images), 1)
