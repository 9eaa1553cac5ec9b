"""Batches of Hugging Face's Trainer that carry the indices of their examples, past collators that know nothing of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch.utils.data import Dataset

from ..selection.indexed import IndexedDataset

INDEX = "coreset_index"
"""The entry of a batch. The trainer takes it out before the model sees it."""


class Item(dict[str, Any]):
    """An example that knows its place in the data set, and is otherwise the dict that it was."""

    place: int


class KnownPlaces(IndexedDataset):  # type: ignore[misc]
    """A data set whose examples, where they are dicts, know their place."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if hasattr(self.dataset, "__getitems__"):
            items = self.dataset.__getitems__(indices)
        else:
            items = [self.dataset[index] for index in indices]
        return [_placed(item, int(index)) for item, index in zip(items, indices, strict=True)]


class CarriedIndices:
    """A collator whose batches have the places of their examples.

    Args:
        collator: makes the batch, in the order of the examples.
    """

    def __init__(self, collator: Callable[[list[Any]], Any]) -> None:
        self.collator = collator

    def __call__(self, features: list[Any]) -> Any:
        """The collator's batch, with the places where the examples know them."""
        places = [getattr(feature, "place", None) for feature in features]  # before the collator, which may change them
        batch = self.collator(features)
        if isinstance(batch, MutableMapping) and None not in places:
            batch[INDEX] = torch.tensor(places)
        return batch


def with_indices(trainer: Any, dataset: Dataset[Any]) -> KnownPlaces:
    """The data set that a loader needs for `CarriedIndices`.

    Args:
        trainer: removes the unused columns of a `datasets.Dataset`, as it does where that is not wrapped.
        dataset: of the trainer.
    """
    datasets = sys.modules.get("datasets")
    if datasets is not None and isinstance(dataset, datasets.Dataset):
        dataset = trainer._remove_unused_columns(dataset, description="training")
    return KnownPlaces(dataset)


def _placed(item: Any, place: int) -> Any:
    if type(item) is not dict:
        return item
    new = Item(item)
    new.place = place
    return new
