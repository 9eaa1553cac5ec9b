"""Hands each example's index to the training loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import Dataset


class IndexedDataset(Dataset[Any]):
    """A data set whose examples end in their index: `(x, y, index)`, or an `"index"` entry where they are dicts.

    Example:
        >>> for x, y, index in DataLoader(IndexedDataset(train_set), batch_size=128, sampler=sampler):
        ...     logits = model(x)
        ...     sampler.observe(index, logits)

    It goes around `WeightedDataset`, or into it; the sampler may be given the one or the other, or the plain data set.

    Args:
        dataset: its examples are tuples or dicts. Its attributes, such as `targets`, can be read from this one too.
    """

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or name.startswith("__"):  # not set yet while it is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if hasattr(self.dataset, "__getitems__"):
            items = self.dataset.__getitems__(indices)
        else:
            items = [self.dataset[index] for index in indices]
        return [_with_index(item, int(index) % len(self)) for item, index in zip(items, indices, strict=True)]


def _with_index(item: Any, index: int) -> Any:
    if isinstance(item, Mapping):
        if "index" in item:
            raise ValueError(
                'IndexedDataset adds an "index" entry, and the examples have one already: rename that one, or pass it to '
                "observe if it is the place in the data set"
            )
        return {**item, "index": index}
    if isinstance(item, (tuple, list)):
        return (*item, index)
    raise TypeError(
        f"IndexedDataset adds an index to examples that are tuples or dicts, got {type(item).__name__}; let the data set "
        "return (x, y)"
    )
