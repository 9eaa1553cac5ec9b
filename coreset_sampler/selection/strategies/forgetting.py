"""Forgetting: the examples that the model keeps unlearning."""

from __future__ import annotations

import torch
from torch import Tensor

from ..coreset import Coreset
from ..types import Strategy, View

_ROWS_A_SHARE = 256  # small enough to share the work out evenly over processes


def forgetting() -> Strategy:
    """Keeps the examples most often classified rightly at one selection and wrongly at the next (Toneva et al., 2019).

    Examples never classified rightly come first, ties are broken at random, all weigh the same. The original counts over
    every training step of a full run; here an event is seen when it shows at a selection. Under label noise this seeks
    out wrong labels: it is here to compare with. Cost: every example through the model once a selection.
    """
    return most_forgotten


def most_forgotten(view: View, size: int, generator: torch.Generator) -> Coreset:
    """The selection itself; what was right last time and how often each was forgotten stay in `view.memory`."""
    n = len(view.labels)
    right = _right(view)
    before = view.memory.get("right", torch.zeros(n, dtype=torch.bool))
    ever = view.memory.get("ever_right", torch.zeros(n, dtype=torch.bool)) | right
    forgotten = view.memory.get("forgotten", torch.zeros(n, dtype=torch.int64)) + (before & ~right)
    view.memory.update(right=right, ever_right=ever, forgotten=forgotten)
    score = forgotten.double() + torch.rand(n, generator=generator, dtype=torch.float64)
    score[~ever] += n
    picks = torch.argsort(score, descending=True)[:size]
    return Coreset(picks, torch.full((size,), n / size, dtype=torch.float64))


def _right(view: View) -> Tensor:
    """`(n,)` whether the model puts each example into its class."""
    chunks = list(torch.arange(len(view.labels)).split(_ROWS_A_SHARE))
    mine = view.mine(chunks)
    parts = []
    for indices, gradients in zip(mine, view.gradients(mine), strict=True):
        probabilities = gradients[0].clone()
        probabilities[torch.arange(len(indices)), view.labels[indices]] += 1
        parts.append(probabilities.argmax(1) == view.labels[indices])
    return torch.cat(view.gather(parts))
