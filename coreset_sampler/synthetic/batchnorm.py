"""`calibrate_batchnorm`: statistics of real images for a network that was trained on learned ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, Dataset

from .fitting import as_taken_by
from .labelling import evaluating


def calibrate_batchnorm(model: nn.Module, images: Any, *, batch_size: int = 250) -> int:
    """Re-estimates what BatchNorm layers believe of their inputs on real images, which need no labels.

    A network trained on learned images carries their means and variances; on real images these are wrong, by 30 to
    50 points of accuracy in the worst case seen. Running statistics become the average over all batches given. Weights,
    modes, momenta and everything else stay as they were, and no gradient is computed. Costs one forward pass.

    Args:
        model: with BatchNorm layers that keep running statistics.
        images: as the model takes them: a tensor `(n, ...)`, a data set or a `DataLoader`. Labels are ignored.
        batch_size: images in a pass; a `DataLoader` has its own. Larger is better for the variance of small maps.

    Returns:
        How many images were used.

    Example:
        >>> fit(model, train_set)
        >>> calibrate_batchnorm(model, some_real_images)
    """
    layers = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    if not layers:
        raise ValueError(
            f"model must have BatchNorm layers with running statistics, {type(model).__name__} has none: its outputs do not "
            "depend on statistics, so there is nothing to calibrate"
        )
    used = 0
    with torch.no_grad(), evaluating(model), _estimating(layers):
        for batch in _batches(images, batch_size):
            model(as_taken_by(model, batch))
            used += len(batch)
        if not used:
            raise ValueError("images must hold at least one image, got none")
    return used


def _batches(images: Any, batch_size: int) -> Iterator[Tensor]:
    """Batches of about one size: a last one of three images would count as much as the others."""
    if batch_size < 2:
        raise ValueError(f"batch_size must be at least 2, one image has no variance over images, got {batch_size}")
    if isinstance(images, (Tensor, Dataset)):
        count = len(images)  # type: ignore[arg-type]
        size = max(1, math.ceil(count / max(1, math.ceil(count / batch_size))))
        images = (
            images.split(size) if isinstance(images, Tensor) else DataLoader(images, size, generator=torch.Generator())
        )
    if not isinstance(images, Iterable) or isinstance(images, (str, dict)):
        raise TypeError(f"images must be a tensor, a data set or a DataLoader, got a {type(images).__name__}")
    for batch in images:
        yield batch if isinstance(batch, Tensor) else batch["pixel_values"] if isinstance(batch, dict) else batch[0]


@contextmanager
def _estimating(layers: list[_BatchNorm]) -> Iterator[None]:
    """In a model in evaluation mode these layers start anew and average cumulatively."""
    momenta = [layer.momentum for layer in layers]
    kept = [{name: value.clone() for name, value in layer.named_buffers(recurse=False)} for layer in layers]
    try:
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # the plain average over batches
            layer.training = True
        yield
    except BaseException:
        for layer, values in zip(layers, kept, strict=True):
            for name, value in values.items():
                getattr(layer, name).copy_(value)
        raise
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
