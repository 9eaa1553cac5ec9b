"""Anyone's `.pt` or `.npz`: inputs and targets under the usual names, or a pair of tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checks import TargetKind, on_simplex
from ..preprocessing import Raw
from ..untrusted import CoresetFileError
from . import ask
from .published import Published
from .source import Source

name = "plain"
layout = "a .pt or .npz with 'images' (or inputs, x, data) and 'labels' (or targets, y), or a pair of tensors"

_INPUTS = ("images", "inputs", "x", "data", "X")
_TARGETS = ("labels", "targets", "y", "target", "label", "Y")


def recognise(source: Source) -> bool:
    """True if there is one tensor of each."""
    return _pair(source.content) is not None


def read(source: Source) -> Published:
    """Channels first; bytes are pixels, the preprocessing of floats must be said."""
    pair = _pair(source.content)
    if pair is None:
        raise CoresetFileError(f"{source.path} has no inputs and targets: it holds {source.describe()}")
    inputs, targets = _channels_first(source, pair[0]), pair[1]
    lines = [
        "If they were normalised:",
        ask.normalize(source.path, inputs),
        "If they were not:",
        ask.raw(source.path),
    ]
    return Published(
        inputs,
        targets if targets.is_floating_point() else targets.long(),
        kind_of(targets),
        preprocessing=Raw() if inputs.dtype == torch.uint8 else None,
        ask="\n".join(lines),
        provenance={"file": source.path.name},
    )


def _pair(content: Any) -> tuple[Tensor, Tensor] | None:
    if isinstance(content, dict):
        found = [[content[key] for key in keys if key in content] for keys in (_INPUTS, _TARGETS)]
        pair: tuple[Any, ...] = tuple(values[0] if len(values) == 1 else None for values in found)
    else:
        pair = tuple(content) if isinstance(content, (list, tuple)) else ()
    if len(pair) != 2 or not all(isinstance(part, Tensor) for part in pair):
        return None
    inputs, targets = pair
    return (inputs, targets) if inputs.ndim >= 2 and targets.ndim and len(inputs) == len(targets) else None


def kind_of(targets: Tensor) -> TargetKind | None:
    """Floats that are no probabilities may be logits or regression targets: not ours to say."""
    if not targets.is_floating_point():
        return "hard"
    return "soft" if targets.ndim == 2 and on_simplex(targets) else None


def _channels_first(source: Source, inputs: Tensor) -> Tensor:
    if inputs.ndim != 4:
        return inputs
    first, last = inputs.shape[1] in (1, 3), inputs.shape[3] in (1, 3)
    if first and last:
        raise CoresetFileError(
            f"{source.path}: images {tuple(inputs.shape)} may have their channels first or last; build the "
            "coreset yourself: SyntheticCoreset(inputs, targets, preprocessing=...)"
        )
    return inputs.permute(0, 3, 1, 2).contiguous() if last else inputs
