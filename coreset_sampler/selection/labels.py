"""Finds every example's class without loading the examples, where a data set lets one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset
from tqdm import tqdm

LABEL_KEYS = ("labels", "label")
WORKER_TIMEOUT = 600  # seconds that a worker may take over a batch, before it counts as hanging
_FEW_CLASSES = 10_000
_CLASSES_AN_EXAMPLE = 10  # what is beyond costs memory and is no class number


def labels_of(dataset: Dataset[Any], *, num_workers: int = 0, progress: bool = True) -> Tensor:
    """`(n,)` int64 labels: from `targets`, `labels` or a label column if there is one, else by one pass over the data."""
    found = _stored_labels(dataset)
    stored = found is not None and not isinstance(_whole(dataset), TensorDataset)
    try:
        found = _read_labels(dataset, num_workers, progress) if found is None else found
        labels = check_labels(found, len(dataset))  # type: ignore[arg-type]
    except ValueError as error:
        if stored or not (where := _where_read(dataset[0])):
            raise
        raise ValueError(f"{error} {where}") from error
    if not stored and _is_unclear(dataset):
        warnings.warn(f"{_where_read(dataset[0])} If it is the second, labels= alone says so.", stacklevel=4)
    return labels


def check_labels(labels: Any, n: int) -> Tensor:
    """The labels as an int64 vector, or an error that says what is wrong with them."""
    labels = _as_tensor(labels)
    labels = class_numbers(labels)
    if labels.ndim == 2 and labels.shape[1] == 1 and not labels.is_floating_point():
        raise ValueError(
            f"labels must be a vector, got shape {tuple(labels.shape)}: pass labels=labels.squeeze(1), and a forward_fn= "
            "that returns batch[1].squeeze(1) as labels."
        )
    if labels.is_floating_point() or labels.ndim != 1:
        raise not_one_class("labels", labels)
    if len(labels) != n:
        raise ValueError(f"labels must have one entry for each of the {n} examples, got {len(labels)}")
    labels = labels.to("cpu", torch.int64, copy=True)  # whoever corrects labels in mid-run writes into his own
    if n and int(labels.min()) < 0:
        where = int((labels < 0).nonzero()[0])
        way_out = "Leave unlabelled examples out, for instance with torch.utils.data.Subset."
        if bool((labels.abs() == 1).all()):
            way_out = (
                "Two classes are 0 and 1: pass labels=(labels > 0).long() and a forward_fn= that returns the same."
            )
        raise ValueError(f"labels must be 0 or more, got {int(labels[where])} at example {where}. {way_out}")
    if n and int(labels.max()) >= (limit := max(_FEW_CLASSES, _CLASSES_AN_EXAMPLE * n)):
        where = int(labels.argmax())
        raise ValueError(
            f"labels must be below {limit} for {n} examples, got {int(labels[where])} at example {where}. Is it a stray "
            "one? If labels are ids, number the classes 0, 1, ...: pass labels=torch.unique(labels, return_inverse=True)[1] "
            "and a forward_fn= that returns the same."
        )
    return labels


def _as_tensor(labels: Any) -> Tensor:
    if isinstance(labels, Tensor):
        return labels
    try:
        array = np.array(labels)  # a copy: torch takes no reversed arrays, and warns of those that are read-only
        return torch.as_tensor(np.array(array.tolist()) if array.dtype == object else array)
    except (TypeError, ValueError, RuntimeError) as error:
        listed = not isinstance(labels, Mapping) and hasattr(labels, "__len__")
        odd = next((label for label in labels if not isinstance(label, Number)), None) if listed else labels
        raise ValueError(
            f"labels must be one whole number per example, got {type(odd).__name__} such as {odd!r:.100}. Number the "
            "classes 0, 1, ... and pass labels= with every example's number; forward_fn= must return the same."
        ) from error


def class_numbers(labels: Tensor) -> Tensor:
    """Labels as `BCEWithLogitsLoss` takes them, 0.0 or 1.0 in `(n,)` or `(n, 1)`, as whole numbers; others as they are."""
    fits = labels.is_floating_point() and labels.ndim in (1, 2) and labels.shape[1:].numel() == 1
    return labels.reshape(-1).long() if fits and bool(((labels == 0) | (labels == 1)).all()) else labels


def are_mixed(labels: Any) -> bool:
    """Whether these are the labels `(b, classes)` of mixed examples, as mixup and cutmix make them."""
    return isinstance(labels, Tensor) and labels.is_floating_point() and labels.ndim == 2 and labels.shape[1] > 1


def not_one_class(what: str, labels: Tensor) -> ValueError:
    """An error for labels that are not one class per example, by what they look like."""
    if labels.is_floating_point() and labels.shape[1:].numel() == 1:
        looks = "numbers to predict (regression). If they are class numbers, pass labels=labels.flatten().long()"
        if bool(((labels >= 0) & (labels <= 1)).all()):
            looks = (
                "numbers to predict (regression), or probabilities of class 1. Of these pass "
                "labels=(labels.flatten() > 0.5).long() and a forward_fn= that returns the same"
            )
    elif labels.ndim > 2:
        looks = "maps of labels (segmentation) or no labels at all"
    elif labels.is_floating_point():
        looks = (
            "soft labels or several labels per example (multi-label). Soft labels have no class to balance; pass "
            "labels=soft.argmax(1) and a forward_fn= that returns these as labels"
        )
    else:
        looks = "several labels per example (multi-label)"
    return ValueError(
        f"{what} must be one whole number per example, got shape {tuple(labels.shape)} of {labels.dtype}. This library is "
        f"for single-label classification, and these look like {looks}."
    )


def _where_read(item: Any) -> str:
    """Which field was taken for the label, where that is not plain."""
    if not isinstance(item, (tuple, list)) or len(item) == 2:
        return ""
    return (
        f"Examples have {len(item)} fields, of which the second was read as the label. If it is another, pass labels= with "
        "every example's class and forward_fn= to say how to run the model on a batch."
    )


def _is_unclear(dataset: Any) -> bool:
    """Whether examples have a whole number behind the second field that could be the label, and is not the index."""
    first, last = dataset[0], dataset[len(dataset) - 1]
    if not isinstance(first, (tuple, list)):
        return False
    later = [np.asarray(field) for field in zip(first[2:], last[2:], strict=True) if all(map(_is_whole, field))]
    return any(field.tolist() != [0, len(dataset) - 1] for field in later)


def _is_whole(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 0 and not value.is_floating_point() and value.dtype != torch.bool
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _whole(dataset: Any) -> Any:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def _stored_labels(dataset: Any) -> Any:
    if isinstance(dataset, Subset):
        inner, at = _stored_labels(dataset.dataset), np.asarray(dataset.indices, dtype=np.int64)
        return inner if inner is None else [inner[i] for i in at] if isinstance(inner, (list, tuple)) else inner[at]
    if isinstance(dataset, ConcatDataset):
        parts = [_stored_labels(part) for part in dataset.datasets]
        if all(isinstance(part, Tensor) for part in parts):
            return torch.cat(parts)
        return None if any(p is None for p in parts) else [label for part in parts for label in _listed(part)]
    if isinstance(dataset, TensorDataset):
        return dataset.tensors[1] if len(dataset.tensors) > 1 else None
    for key in LABEL_KEYS:  # a Hugging Face data set
        if key in (getattr(dataset, "column_names", None) or ()):
            return dataset.select_columns(key).with_format(None)[:][key]  # no other column is read or decoded
    for key in ("targets", *LABEL_KEYS):
        stored = getattr(dataset, key, None)
        if isinstance(stored, (list, tuple, Tensor, np.ndarray)) and len(stored) == len(dataset):
            # of another length it is something else, such as the names of the classes
            return as_given(stored, dataset)
    return None


def as_given(stored: Any, dataset: Any) -> Any:
    """Stored labels as the data set's `target_transform`, as torchvision's have one, makes them.

    Example: the targets `[0, 1, 2]` and `lambda y: y // 2` give `[0, 0, 1]`; what makes vectors leaves them.
    """
    change = getattr(dataset, "target_transform", None)
    if not callable(change):
        return stored
    labels = _listed(stored)
    if not all(isinstance(label, (Number, str)) for label in labels):
        return stored
    given = {label: np.asarray(change(label)) for label in set(labels)}
    if any(new.size != 1 for new in given.values()):
        return stored
    return [given[label].item() for label in labels]


def _listed(labels: Any) -> list[Any]:
    return labels.tolist() if isinstance(labels, (Tensor, np.ndarray)) else list(labels)


def label_of(item: Any) -> Any:
    """The label inside one example or batch: of a mapping by key, of a pair the second."""
    if isinstance(item, Mapping):
        for key in LABEL_KEYS:
            if key in item:
                return item[key]
    elif isinstance(item, (tuple, list)) and len(item) > 1:
        return item[1]
    keys = sorted(item) if isinstance(item, Mapping) else type(item).__name__
    raise ValueError(
        f'no label found in {keys}: examples must be (x, y) pairs or have a "labels" or "label" entry. '
        "Pass labels= with every example's class, and forward_fn= to say how to run the model on a batch."
    )


def _read_labels(dataset: Dataset[Any], num_workers: int, progress: bool) -> list[Any]:
    loader = DataLoader(
        dataset,
        batch_size=256,
        num_workers=num_workers,
        collate_fn=_only_labels,
        generator=torch.Generator(),
        timeout=WORKER_TIMEOUT if num_workers else 0,
    )
    batches = tqdm(loader, "reading labels (pass labels= to skip this)", delay=2, disable=not progress, leave=False)
    return [label for batch in batches for label in batch]


def _only_labels(items: list[Any]) -> list[Any]:
    labels = [label_of(item) for item in items]
    arrays = [torch.as_tensor(label) for label in labels if isinstance(label, (Tensor, np.ndarray))]
    if wide := [label for label in arrays if label.numel() > 1]:
        raise not_one_class("labels", wide[0][None])  # at the first of them: maps of all examples would fill the memory
    return [label.item() if isinstance(label, (Tensor, np.ndarray)) and label.ndim == 0 else label for label in labels]
