"""InfoBatch's rule (Qin et al., ICLR 2024), the peer that loss pruning has to beat. Written from the paper."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler


class InfoBatch(Sampler[int]):
    """Each epoch leaves out a random half of the examples whose last loss is below the mean, and doubles the others of them.

    So the expected gradient is the full one. Losses come from the training itself; the last eighth of the epochs shows
    everything. Epochs differ in length.

    Args:
        n: examples.
        epochs: of the run.
        prune: share of the learned examples that is left out.
        anneal: share of the epochs, at the end, that shows everything.
        seed: of what is left out and of the order.
    """

    def __init__(self, n: int, epochs: int, *, prune: float = 0.5, anneal: float = 0.125, seed: int = 0) -> None:
        self.n, self.epochs, self.prune, self.anneal, self.seed = n, epochs, prune, anneal, seed
        self.losses = torch.full((n,), torch.inf)  # nothing is learned before it was seen
        self.weights, self.order = torch.ones(n), torch.empty(0, dtype=torch.int64)
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Chooses what the epoch shows, with its weights, in a new order."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        seen = self.losses.isfinite()
        learned = seen & (self.losses < self.losses[seen].mean()) if bool(seen.any()) else seen
        if epoch >= (1 - self.anneal) * self.epochs:
            learned = torch.zeros_like(learned)
        left_out = learned & (torch.rand(self.n, generator=generator) < self.prune)
        self.weights = torch.where(learned, 1 / (1 - self.prune), 1.0)
        shown = (~left_out).nonzero().flatten()
        self.order = shown[torch.randperm(len(shown), generator=generator)]

    def observe(self, indices: Tensor, losses: Tensor) -> None:
        """The losses of a batch that was trained on, without weights."""
        self.losses[indices] = losses.detach().float().cpu()

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order.tolist())

    def state_dict(self) -> dict[str, Any]:
        """For a run that goes on after a kill."""
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `state_dict`."""
        self.losses = state["losses"]
