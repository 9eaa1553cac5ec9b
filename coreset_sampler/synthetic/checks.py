"""What the tensors of a coreset must be, checked once where one is made."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from .preprocessing import Preprocessing

TargetKind = Literal["hard", "soft", "logits", "regression"]

MOST_TILES = 8
"""Of a side. A file of a megabyte must not ask for gigabytes."""

MOST_PIXELS = 2**30
"""Of all views of a set, which are in memory together: 4 GiB."""

DESCRIBED: dict[str, tuple[type, ...]] = {
    "classes": (list, tuple),
    "num_classes": (int,),
    "method": (str,),
    "images_per_class": (int,),
    "learning_rate": (int, float),
    "last_layer": (dict,),
    "provenance": (dict,),
    "tiles": (int,),
    "views": (dict,),
}
"""What a file may say of a set, or leave out."""


def plain(name: str, value: Any) -> Any:
    """The value, numbers of numpy and torch as Python's, if a file may say it of `name`: what is made can be saved."""
    value = value.item() if isinstance(value, (np.generic, Tensor)) and value.ndim == 0 else value
    kinds = DESCRIBED[name]
    if value is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"{name} must be {wanted} or left out, got {str(value)[:80]!r}, a {type(value).__name__}")
    return value


def kind_of(targets: Tensor) -> TargetKind:
    """Class numbers if they are integers; floats may be anything."""
    if targets.is_floating_point():
        raise ValueError("target_kind must be said for float targets: 'soft', 'logits' or 'regression'")
    return "hard"


def check_tiles(inputs: Tensor, tiles: int, preprocessing: Preprocessing) -> None:
    """Refuses what cannot be cut into examples, or must not be."""
    if isinstance(tiles, bool) or not isinstance(tiles, int) or not 1 <= tiles <= MOST_TILES:
        raise ValueError(f"tiles must be an integer from 1 to {MOST_TILES}, got {tiles!r}")
    if tiles > 1 and (inputs.ndim != 4 or min(inputs.shape[-2:]) < tiles):
        raise ValueError(f"tiles must be 1 for inputs that are no images of so many pixels, got {tuple(inputs.shape)}")
    if tiles > 1 and preprocessing.kind not in ("raw", "normalize"):
        raise ValueError(
            f"tiles must be 1 with {preprocessing.kind} preprocessing, which mixes the pixels of a whole image, got "
            f"{tiles}; normalise by channel"
        )


def check_views(inputs: Tensor, count: int, tiles: int, preprocessing: Preprocessing) -> None:
    """Refuses inputs that views cannot be made of, or must not be."""
    if tiles > 1:
        raise ValueError(f"views and tiles do not go together: pass one of them, got tiles={tiles}")
    if inputs.ndim != 4:
        raise ValueError(f"views need images (n, channels, height, width), got {tuple(inputs.shape)}")
    if preprocessing.kind not in ("raw", "normalize"):
        raise ValueError(
            f"views move pixels, which {preprocessing.kind} preprocessing has mixed over the whole image; normalise by "
            "channel"
        )
    if count > most_views(inputs):
        size = count * inputs.numel() * 4 / 2**30
        raise ValueError(
            f"{count} views of {len(inputs)} images would take {size:.1f} GiB of memory; make fewer of each, "
            f"{most_views(inputs)} at most"
        )


def most_views(inputs: Tensor) -> int:
    """Of each of these images, as memory allows."""
    return MOST_PIXELS // max(1, inputs.numel())


def check_inputs(inputs: Tensor, targets: Tensor, preprocessing: Preprocessing, each: int = 1) -> None:
    """Refuses inputs that do not go with their targets, or are no numbers."""
    if inputs.ndim < 2 or len(inputs) == 0:
        raise ValueError(f"inputs must hold at least one example, (n, ...), got shape {tuple(inputs.shape)}")
    if targets.ndim == 0 or len(inputs) * each != len(targets):
        needs = "each input needs one target" if each == 1 else f"each image needs {each} targets, one for each example"
        raise ValueError(f"{needs}, got {len(inputs)} inputs and targets {tuple(targets.shape)}")
    if inputs.dtype == torch.uint8 and preprocessing.kind != "raw":
        raise ValueError(f"bytes are raw pixels: pass preprocessing=Raw(), or floats already {preprocessing.kind}d")
    if inputs.is_complex() or inputs.dtype == torch.bool:
        raise ValueError(f"inputs must be floats, integers or bytes, got {inputs.dtype}")
    if inputs.is_floating_point() and not bool(torch.isfinite(inputs).all()):
        where = (~torch.isfinite(inputs.flatten(1)).all(1)).nonzero().flatten().tolist()
        raise ValueError(f"inputs must be finite; NaN or infinity in {len(where)} example(s), first {where[0]}")


def check_targets(
    targets: Tensor, kind: TargetKind, class_names: tuple[str, ...] | None, num_classes: int | None
) -> int | None:
    """The number of classes, None where there are none."""
    if kind not in get_args(TargetKind):
        raise ValueError(f"target_kind must be one of {', '.join(get_args(TargetKind))}, got {kind!r}")
    if class_names is not None and num_classes not in (None, len(class_names)):
        raise ValueError(f"num_classes must be the number of class names, {len(class_names)}, got {num_classes}")
    known = len(class_names) if class_names is not None else num_classes
    if kind == "hard":
        if targets.ndim != 1 or targets.is_floating_point() or targets.dtype == torch.bool:
            raise ValueError(f"hard targets must be integers (n,), got {targets.dtype} {tuple(targets.shape)}")
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or (known is not None and high >= known):
            raise ValueError(f"hard targets must be classes 0..{'' if known is None else known - 1}, got {low}..{high}")
        return high + 1 if known is None else known
    if not targets.is_floating_point() or not bool(torch.isfinite(targets).all()):
        raise ValueError(f"{kind} targets must be finite floats, got {targets.dtype}")
    if kind == "regression" and (targets.ndim != 2 or known is None):
        return known
    if targets.ndim != 2 or (known is not None and targets.shape[1] != known):
        raise ValueError(f"{kind} targets must be (n, {known or 'num_classes'}), got {tuple(targets.shape)}")
    if kind == "soft" and not on_simplex(targets):
        raise ValueError(
            "soft targets must be probabilities, each row summing to 1; for scores say target_kind='logits'"
        )
    return targets.shape[1]


def check_outputs(kind: TargetKind, outputs: Tensor, targets: Tensor) -> None:
    """Refuses targets that do not go with a model's outputs: squared error would broadcast them without a word."""
    numbers = kind == "hard" and not targets.is_floating_point()  # floats are class numbers that somebody has mixed
    if targets.shape != (outputs.shape[:1] if numbers else outputs.shape):
        needed = "one class number for each output" if numbers else "of the shape of the outputs"
        raise ValueError(
            f"{kind} targets must be {needed}, got targets {tuple(targets.shape)} and outputs {tuple(outputs.shape)}; "
            "reshape one of them"
        )


def on_simplex(targets: Tensor) -> bool:
    """True if every row is a probability vector, up to rounding: it may have been bfloat16 before it was cast."""
    rows = targets.double()
    return bool((rows >= -1e-6).all()) and bool(((rows.sum(1) - 1).abs() < torch.finfo(torch.bfloat16).eps).all())


def check_positive(name: str, value: Any, *, whole: bool = False) -> None:
    """Refuses what is no positive and finite number, or no whole one."""
    if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
        raise ValueError(f"{name} must be a {'whole number' if whole else 'number'}, got {value!r}")
    if not 0 < value < math.inf:  # type: ignore[operator]  # Real has no order that mypy knows
        raise ValueError(f"{name} must be positive, got {value}")
