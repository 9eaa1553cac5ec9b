"""Uniform: a random subset, the baseline that everything has to beat."""

from __future__ import annotations

import torch

from ..coreset import Coreset
from ..types import Strategy, View


def uniform() -> Strategy:
    """Keeps a random subset, without a look at the model. Cost: nothing."""
    return random_subset


def random_subset(view: View, size: int, generator: torch.Generator) -> Coreset:
    """`size` examples, each as likely as any other."""
    n = len(view.labels)
    picks = torch.randperm(n, generator=generator)[:size]
    return Coreset(picks, torch.full((size,), n / size, dtype=torch.float64))
