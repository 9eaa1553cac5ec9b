"""What distillers begin with: targets to be learned, and the bounds of pixels."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from ..checks import on_simplex

Bounds = tuple[tuple[float, ...], tuple[float, ...]]


def learned_targets(targets: Tensor, num_classes: int, scale: float) -> Tensor:
    r"""Class numbers or probabilities as scores `(n, num_classes)` that sum to zero and lie at most `scale` apart.

    Their softmax is $(1 - k\delta) p + \delta$ with $\delta = 1 / (e^s + k - 1)$: the label $p$, smoothed. For a class
    number that is its centred one-hot vector times the scale $s$.
    """
    if targets.ndim == 1 and not targets.is_floating_point():
        if int(targets.min()) < 0 or int(targets.max()) >= num_classes:
            found = f"{int(targets.min())}..{int(targets.max())}"
            raise ValueError(
                f"targets must be classes 0..{num_classes - 1}, which the network has outputs for, got {found}"
            )
        return scale * (functional.one_hot(targets.long(), num_classes).float() - 1 / num_classes)
    if targets.ndim != 2 or targets.shape[1] != num_classes or not on_simplex(targets):
        raise ValueError(
            f"targets must be class numbers (n,) or probabilities (n, {num_classes}), got {targets.dtype} "
            f"{tuple(targets.shape)}"
        )
    lowest = 1 / (math.exp(scale) + num_classes - 1)
    scores = ((1 - num_classes * lowest) * targets.double().clamp(0, 1) + lowest).log()
    return (scores - scores.mean(1, keepdim=True)).to(targets.dtype)


def bounded(inputs: Tensor, bounds: Bounds | None) -> Tensor:
    """Inputs `(n, channels, ...)` clamped to the bounds of their channels, if there are any."""
    if bounds is None:
        return inputs
    low, high = (torch.tensor(each).to(inputs).view(-1, *[1] * (inputs.ndim - 2)) for each in bounds)
    return inputs.clamp(low, high)


def check_bounds(bounds: Bounds | None) -> None:
    """Refuses bounds that are not a lowest and a highest value of each channel."""
    if bounds is None:
        return
    pair = isinstance(bounds, (tuple, list)) and len(bounds) == 2
    low, high = bounds if pair and all(isinstance(each, (tuple, list)) for each in bounds) else ((), ())
    if not low or len(low) != len(high) or not all(one < other for one, other in zip(low, high, strict=True)):
        raise ValueError(
            f"bounds must be the lowest and the highest value of each channel, as in ((-0.8,), (2.0,)), got {bounds!r}"
        )
