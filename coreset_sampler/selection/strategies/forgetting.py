"""Forgetting: the examples that the model keeps unlearning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..coreset import Coreset
from ..types import View
from .scores import CHUNK


@dataclass(frozen=True, eq=False)
class Forgotten:
    """Of each example `(n,)`: whether it was classified rightly last time, and ever, and how often it was forgotten."""

    right: Tensor
    ever_right: Tensor
    forgotten: Tensor


@dataclass(frozen=True)
class Forgetting:
    """Keeps the examples most often classified rightly at one selection and wrongly at the next (Toneva et al., 2019).

    Examples never classified rightly come first, ties are broken at random, all weigh the same. The original counts over
    every training step of a full run; here an event is seen when it shows at a selection. Under label noise this seeks
    out wrong labels: it is here to compare with. Cost: every example through the model once per selection.
    """

    State: ClassVar[type | None] = Forgotten

    def select(
        self, view: View, size: int, state: Forgotten | None, generator: torch.Generator
    ) -> tuple[Coreset, Forgotten]:
        """Classifies every example and keeps those forgotten most often."""
        n = len(view.labels)
        right = _right(view)
        never = torch.zeros(n, dtype=torch.bool)
        state = state or Forgotten(never, never, torch.zeros(n, dtype=torch.int64))
        ever, forgotten = state.ever_right | right, state.forgotten + (state.right & ~right)
        score = forgotten.double() + torch.rand(n, generator=generator, dtype=torch.float64)
        score[~ever] += n
        picks = torch.argsort(score, descending=True)[:size]
        coreset = Coreset(picks, torch.full((size,), n / size, dtype=torch.float64))
        return coreset, Forgotten(right, ever, forgotten)


def _right(view: View) -> Tensor:
    """`(n,)` whether the model puts each example into its class."""
    chunks = list(torch.arange(len(view.labels)).split(CHUNK))
    shard = view.shard(chunks)
    parts = []
    for indices, gradients in zip(shard, view.gradients(shard), strict=True):
        probabilities = gradients[0].clone()
        probabilities[torch.arange(len(indices)), view.labels[indices]] += 1
        parts.append(probabilities.argmax(1) == view.labels[indices])
    return torch.cat(view.gather(parts))
