"""What forward passes said, batch by batch, before it goes into the store."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    """What one forward pass said."""

    indices: Tensor
    logits: Tensor
    epoch: int
    gradients: Tensor | None = None
    """Under noise in the head, in place of the logits' own."""
    rows: slice = slice(None)
    """Which of the `indices`. They are cut out later, many at once: between two steps of training each operation is slow."""


def joined(batches: list[Batch]) -> Iterator[Batch]:
    """Neighbours of the same epoch as one batch: a store takes in a thousand rows at once as fast as thirty."""
    for (epoch, _, noisy), alike in groupby(batches, lambda b: (b.epoch, b.logits.shape[1], b.gradients is not None)):
        indices, logits, _, gradients, rows = zip(*alike, strict=True)
        indices = [of[own] for of, own in zip(indices, rows, strict=True)]
        yield Batch(torch.cat(indices), torch.cat(logits), epoch, torch.cat(gradients) if noisy else None)


def copied(logits: Tensor) -> Tensor:
    """Logits in float32, without a graph; a loop may write into its own."""
    logits = logits.detach()  # `to` would be the same, and takes twice as long
    return logits.clone() if logits.dtype is torch.float32 else logits.to(torch.float32)
