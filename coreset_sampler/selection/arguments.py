"""What people pass to a sampler, checked once at the door."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from ..layers import innermost, unwrapped
from .forward import of_both_classes
from .order import WEIGHTINGS, Weighting
from .weighted import is_weighted


def length_of(dataset: Dataset[Any]) -> int:
    """The number of examples of a data set that can be asked for them by index."""
    if isinstance(dataset, nn.Module):
        raise TypeError(
            f"dataset must be a data set, got a network, {type(dataset).__name__}. The data set comes first: "
            "CoresetSampler(dataset, model, fraction=0.1)."
        )
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"a coreset picks examples by index, so the data set needs __getitem__ and __len__; {type(dataset).__name__} "
            "is iterable only. Load it into a map-style data set first (for Hugging Face: streaming=False)."
        )
    return len(dataset)


def size_of(n: int, fraction: float | None, size: int | None) -> int:
    """How many of `n` examples to keep, said by `fraction` or by `size`."""
    if n == 0:
        raise ValueError(
            "the data set must have at least one example, got 0. Is its folder empty, or a filter too strict?"
        )
    if (fraction is None) == (size is None):
        raise ValueError(f"pass either fraction or size, got fraction={fraction} and size={size}")
    if fraction is not None:
        check_number("fraction", fraction)
        if not 0 < fraction <= 1:
            raise ValueError(
                f"fraction must be in (0, 1], got {fraction}. To keep {fraction:g} examples pass size={fraction:g}"
                + (f"; to keep {fraction:g} % pass fraction={fraction / 100:g}." if 1 < fraction <= 100 else ".")
            )
        return max(1, round(fraction * n))
    assert size is not None
    if not 1 <= whole_number("size", size, 1) <= n:
        raise ValueError(f"size must be between 1 and the data set's {n} examples, got {size}")
    return int(size)


def check_number(name: str, value: Any) -> None:
    """Raises for text, as YAML makes of `1e-1` and a command line of anything."""
    if isinstance(value, str):
        raise TypeError(f"{name} must be a number, got the text {value!r}. Pass float({value!r}).")


def whole_number(name: str, value: int, least: int) -> int:
    """The value, if it is a whole number of at least `least`."""
    try:
        if not isinstance(value, (bool, str)) and int(value) == value and value >= least:
            return int(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")


def check_model(model: Any, observes: bool) -> nn.Module:
    """The model, if selection can run it, or, where the strategy `observes`, need not."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    innermost(model) if observes else unwrapped(model)
    return model


def check_weighting(weighting: Weighting, dataset: Dataset[Any]) -> Weighting:
    """The weighting, if there is such a one and the data set can do it."""
    if weighting not in WEIGHTINGS:
        raise ValueError(f"weighting must be one of {', '.join(map(repr, WEIGHTINGS))}, got {weighting!r}")
    if weighting == "loss" and not is_weighted(dataset):
        raise TypeError(
            'weighting="loss" needs a data set that hands the weights on: pass WeightedDataset(train_set) to the sampler '
            "and to the DataLoader, and take (x, y, weight) batches"
        )
    return weighting


def check_selection_dataset(selection_dataset: Dataset[Any] | None, dataset: Dataset[Any]) -> Dataset[Any]:
    """The data set to score candidates from: the training set itself, or one with the same examples."""
    if selection_dataset is None:
        return dataset
    if length_of(selection_dataset) != length_of(dataset):
        raise ValueError(
            f"selection_dataset must have the same {length_of(dataset)} examples, got {length_of(selection_dataset)}"
        )
    return selection_dataset


def check_observed(indices: Any, logits: Any, n: int, labels: Tensor, classes: int | None) -> tuple[Tensor, Tensor]:
    """Indices on the CPU and logits that belong together, or an error that says what does not fit."""
    needed = max(2, int(labels.max()) + 1) if classes is None else classes
    at, logits = torch.as_tensor(indices), of_both_classes(logits, needed)
    if at.ndim != 1 or at.is_floating_point() or at.dtype == torch.bool:
        raise ValueError(f"indices must be whole numbers (b,), got shape {tuple(at.shape)} of {at.dtype}")
    if not isinstance(logits, Tensor) or logits.ndim != 2 or not logits.is_floating_point():
        got = f"shape {tuple(logits.shape)} of {logits.dtype}" if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"logits must be a tensor (b, classes) of floats, got {got}; of a model's output pass .logits")
    if at.shape[0] != logits.shape[0]:
        raise ValueError(f"indices and logits must have as many rows, got {len(at)} and {len(logits)}")
    at = at.to("cpu", torch.int64)
    listed = at.tolist() or [0]  # whose least and largest take half of the time of a tensor's
    low, high = min(listed), max(listed)
    if not 0 <= low <= high < n:
        raise ValueError(f"indices must be in [0, {n}), got {low} to {high}: they count the data set")
    if classes is not None:
        check_columns(logits, classes)
    elif logits.shape[1] < needed:
        raise ValueError(
            f"logits must have one column per class, at least {needed}, the labels' classes, got {logits.shape[1]}"
        )
    return at, logits


def check_columns(logits: Tensor, before: int) -> None:
    """Raises unless the logits are of as many classes as those before."""
    if logits.shape[1] != before:
        raise ValueError(
            f"logits must have one column per class, {before} as before, got {logits.shape[1]}: scores of both cannot be "
            "put together. Where the model's head was replaced make a new sampler."
        )


def check_logits(name: str, values: Tensor, labels: Tensor) -> None:
    """Raises unless these are logits, or log probabilities, and as many labels of their classes."""
    if values.ndim != 2 or not values.is_floating_point():
        raise ValueError(
            f"{name} must be a floating-point tensor (n, classes), got shape {tuple(values.shape)} of {values.dtype}. "
            "Pass one row per example and one column per class."
        )
    if labels.shape != values.shape[:1] or labels.dtype != torch.int64:
        raise ValueError(
            f"labels must be int64 of shape ({len(values)},), one for each row of {name}, got shape "
            f"{tuple(labels.shape)} of {labels.dtype}. Pass labels.long() of the same examples."
        )
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < values.shape[1]:
        strange = int(labels.max()) if int(labels.min()) >= 0 else int(labels.min())
        raise ValueError(
            f"labels must be below the {values.shape[1]} columns of {name} and not negative, got {strange}. Leave "
            "unlabelled examples out, or pass all columns of the network's output."
        )
