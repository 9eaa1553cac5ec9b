"""Hands a coreset's weights to the training loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from .indexed import IndexedDataset


class WeightedIndex(int):
    """An index that carries its weight, through worker processes and frameworks that know of neither."""

    weight: float

    def __new__(cls, index: int, weight: float) -> WeightedIndex:
        """An integer equal to `index` in every way."""
        self = int.__new__(cls, index)
        self.weight = weight
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightedIndex, (int(self), self.weight)


class WeightedDataset(Dataset[Any]):
    """A data set whose examples end in their weight: `(x, y, weight)`, or a `"weight"` entry where they are dicts.

    The weight is 1 for a plain index and the coreset's, scaled to mean 1, for one that comes from
    `CoresetSampler(..., weighting="loss")`.

    Example:
        >>> train_set = WeightedDataset(train_set)
        >>> sampler = CoresetSampler(train_set, model, fraction=0.1, weighting="loss")
        >>> for x, y, weight in DataLoader(train_set, batch_size=128, sampler=sampler):
        ...     loss = (weight * cross_entropy(model(x), y, reduction="none")).mean()

    Args:
        dataset: its examples are tuples or dicts.
    """

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        numbers = [int(index) for index in indices]
        if hasattr(self.dataset, "__getitems__"):
            items = self.dataset.__getitems__(numbers)
        else:
            items = [self.dataset[index] for index in numbers]
        # One tensor cut up: making one for each example would take longer than many a data set takes for the rest.
        weights = torch.tensor([getattr(index, "weight", 1.0) for index in indices], dtype=torch.float32)
        return [_with_weight(item, weight) for item, weight in zip(items, weights.unbind(), strict=True)]


def plain(dataset: Dataset[Any]) -> Dataset[Any]:
    """The data set without weights and indices."""
    while isinstance(dataset, (WeightedDataset, IndexedDataset)):
        dataset = dataset.dataset
    return dataset


def is_weighted(dataset: Any) -> bool:
    """Whether the data set hands weights on."""
    while isinstance(dataset, IndexedDataset):
        dataset = dataset.dataset
    return isinstance(dataset, WeightedDataset)


def _with_weight(item: Any, weight: Tensor) -> Any:
    if isinstance(item, Mapping):
        return {**item, "weight": weight}
    if isinstance(item, (tuple, list)):
        return (*item, weight)
    raise TypeError(
        f"WeightedDataset adds a weight to examples that are tuples or dicts, got {type(item).__name__}; "
        "let the data set return (x, y)"
    )
