"""What knowing the wrong labels would be worth."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from coreset_sampler import Coreset
from coreset_sampler.selection.types import View


def oracle(wrong: Tensor) -> Callable[[View, int, torch.Generator], Coreset]:
    """Keeps a random subset without the examples `wrong`: what could be had by knowing wrong labels and nothing else."""

    def select(view: View, size: int, generator: torch.Generator) -> Coreset:
        n = len(view.labels)
        order = torch.randperm(n, generator=generator)
        picks = order[torch.isin(order, wrong, invert=True)][:size]
        if len(picks) < size:
            raise ValueError(f"size must be at most {len(picks)}, the examples with right labels, got {size}")
        return Coreset(picks, torch.full((size,), n / size, dtype=torch.float64))

    return select
