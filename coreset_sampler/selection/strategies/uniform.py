"""Uniform: a random subset, the baseline that everything has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..coreset import Coreset
from ..types import View


@dataclass(frozen=True)
class Uniform:
    """Keeps a random subset, without running the model. Cost: nothing."""

    State: ClassVar[type | None] = None

    def select(self, view: View, size: int, state: None, generator: torch.Generator) -> tuple[Coreset, None]:
        """`size` examples, each as likely as any other."""
        n = len(view.labels)
        picks = torch.randperm(n, generator=generator)[:size]
        return Coreset(picks, torch.full((size,), n / size, dtype=torch.float64)), None
