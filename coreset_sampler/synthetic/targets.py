"""A coreset's targets in the form that a loss takes: class numbers, probabilities, or as they were learned."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor
from torch.nn import functional

from .dataset import SyntheticCoreset

Targets = Literal["hard", "soft", "own"]
"""Class numbers, probabilities that plain cross-entropy takes, or targets as stored."""


def targets_as(coreset: SyntheticCoreset, kind: Targets) -> Tensor:
    """Class numbers (`"hard"`), probabilities that plain cross-entropy takes (`"soft"`), or as stored (`"own"`).

    Scores and learned regression targets `(n, classes)` become probabilities by softmax.
    """
    if kind not in get_args(Targets):
        raise ValueError(f"targets must be 'hard', 'soft' or 'own', got {kind!r}")
    if kind == "own" or coreset.target_kind == kind:
        return coreset.targets
    if coreset.target_kind == "regression":
        if coreset.targets.ndim != 2:
            shape = tuple(coreset.targets.shape)
            raise ValueError(f"targets {shape} to be regressed on have no classes: pass targets='own' and coreset.loss")
        return coreset.targets.argmax(-1) if kind == "hard" else coreset.targets.softmax(-1)
    return coreset.with_targets(kind).targets


def loss_of(
    coreset: SyntheticCoreset, kind: Targets, outputs: Tensor, targets: Tensor, *, reduction: str = "mean"
) -> Tensor:
    """The coreset's own loss on its stored targets, else cross-entropy; class numbers are taken in any case.

    Targets of another shape than the outputs' are refused, because squared error would broadcast them.
    """
    if outputs.ndim == 2 and targets.shape == outputs.shape[:1] and not targets.is_floating_point():
        return functional.cross_entropy(outputs, targets.long(), reduction=reduction)
    if not targets.is_floating_point() or targets.shape != outputs.shape:
        raise ValueError(
            f"labels must be class numbers ({len(outputs)},) or floats {tuple(outputs.shape)} like the outputs, got "
            f"{str(targets.dtype).removeprefix('torch.')} {tuple(targets.shape)}"
        )
    if kind == "own":
        return coreset.loss(outputs, targets, reduction=reduction)
    return functional.cross_entropy(outputs, targets.to(outputs.dtype), reduction=reduction)
