"""DistributedCoresetSampler: each process draws its own equal share of the coreset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, DistributedSampler

from .. import distributed
from .coreset import Coreset
from .order import Weighting
from .sampler import CoresetSampler
from .types import Forward, Strategy


class DistributedCoresetSampler(CoresetSampler, DistributedSampler[Any]):
    """A `CoresetSampler` that yields this process's share: for torchrun, timm and Ray, which leave that to the sampler.

    Example:
        >>> sampler = DistributedCoresetSampler(train_set, model, fraction=0.1)  # in every process
        >>> loader = DataLoader(train_set, batch_size=128, sampler=sampler)

    Args:
        dataset, model: as of `CoresetSampler`, and so are all arguments that are not named here.
        size, fraction: of the coreset of all processes together.
        num_replicas: number of shares. By default that of the process group, also of one that is set up after the
            sampler is made (Lightning).
        rank: which share. By default the process's rank.
        drop_last: makes shares equal by leaving a few indices out; by default a few are repeated.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        model: nn.Module,
        *,
        fraction: float | None = None,
        size: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        drop_last: bool = False,
        seed: int = 0,
        strategy: str | Strategy | Callable[..., Coreset] = "label_confidence",
        reselect_every: int = 1,
        max_overhead: float | None = None,
        weighting: Weighting = "resample",
        selection_dataset: Dataset[Any] | None = None,
        labels: Any = None,
        forward_fn: Forward | None = None,
        lengths: Any = None,
        scoring_dtype: torch.dtype | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        scoring_batch_size: int = 128,
        num_workers: int = 0,
        progress: bool = True,
        watch: bool | None = None,
    ) -> None:
        CoresetSampler.__init__(
            self,
            dataset,
            model,
            fraction=fraction,
            size=size,
            seed=seed,
            strategy=strategy,
            reselect_every=reselect_every,
            max_overhead=max_overhead,
            weighting=weighting,
            selection_dataset=selection_dataset,
            labels=labels,
            forward_fn=forward_fn,
            lengths=lengths,
            scoring_dtype=scoring_dtype,
            collate_fn=collate_fn,
            scoring_batch_size=scoring_batch_size,
            num_workers=num_workers,
            progress=progress,
            watch=watch,
        )
        self.drop_last, self.shuffle, self._given_rank, self._given_replicas = drop_last, True, rank, num_replicas
        self._check_share()

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        """The processes that share the coreset out."""
        return distributed.world()[1] if self._given_replicas is None else self._given_replicas

    @property
    def rank(self) -> int:  # type: ignore[override]
        """This process among them."""
        return distributed.world()[0] if self._given_rank is None else self._given_rank

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """The indices of one process's share."""
        rounded = self.size if self.drop_last else self.size + self.num_replicas - 1
        return rounded // self.num_replicas

    @property
    def total_size(self) -> int:  # type: ignore[override]
        """The indices of all shares together."""
        return self.num_samples * self.num_replicas

    def __len__(self) -> int:
        return self.num_samples

    def _check_share(self) -> None:
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(f"rank must be in [0, num_replicas={self.num_replicas}), got {self.rank}")
        if self.drop_last and self.size < self.num_replicas:
            raise ValueError(f"size={self.size} leaves nothing for {self.num_replicas} processes with drop_last")

    def _order(self) -> tuple[list[int], list[float] | None]:
        self._check_share()
        order, weights = super()._order()
        repeats = -(-self.total_size // len(order))
        own = slice(self.rank, self.total_size, self.num_replicas)
        return (order * repeats)[own], None if weights is None else (weights * repeats)[own]
