"""What the tests of watching share with the processes that they start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from scenarios import digits
from torch import nn
from torch.utils.data import TensorDataset

from coreset_sampler import Coreset

N = 320


@dataclass(frozen=True)
class ReadsScores:
    """Keeps the examples that were seen least, and logs how many visits it knows of."""

    observes: ClassVar[bool] = True

    def select(self, view: Any, size: int, state: Any, generator: torch.Generator) -> tuple[Coreset, None]:
        noise = torch.rand(len(view.labels), generator=generator)
        view.log(seen=float(view.scores.counts.sum()))
        chosen = torch.argsort(view.scores.counts + noise)[:size].sort().values
        return Coreset(chosen, torch.full((size,), len(view.labels) / size)), None


def digit_set() -> TensorDataset:
    """The first digits."""
    x, y = digits().tensors
    return TensorDataset(x[:N], y[:N])


def linear_net() -> nn.Sequential:
    """Without BatchNorm, whose statistics would differ between processes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
