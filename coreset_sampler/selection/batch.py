"""Batches of any kind: moved, copied, and cut into the groups that were asked for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor

_STRETCH = 4096  # candidates that are sorted by length together, and held until the last of them has been run


def regrouped(batches: Iterable[Tensor], groups: list[Tensor], squeeze: bool = False) -> Iterator[Tensor]:
    """Cuts a stream of `(draws, b, d)` batches into one tensor `(draws, k, d)` a group."""
    waiting: list[Tensor] = []
    have = 0
    stream = iter(batches)
    for group in groups:
        while have < len(group):
            waiting.append(next(stream))
            have += waiting[-1].shape[1]
        joined = torch.cat(waiting, 1) if len(waiting) != 1 else waiting[0]
        part, rest = joined[:, : len(group)], joined[:, len(group) :]
        waiting, have = ([rest], rest.shape[1]) if rest.shape[1] else ([], 0)
        yield part[0] if squeeze else part


def check_lengths(lengths: Any, n: int) -> Tensor | None:
    """Every example's length `(n,)` as a tensor, or an error that says what is wrong with them."""
    if lengths is None:
        return None
    try:
        found = torch.as_tensor(lengths).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        rule = "lengths must be one number per example, such as [len(ids) for ids in train_set['input_ids']]"
        raise ValueError(f"{rule}, got a {type(lengths).__name__} that is no vector: {error}") from error
    if found.shape != (n,):
        raise ValueError(f"lengths must have one entry for each of the {n} examples, got shape {tuple(found.shape)}")
    if found.is_floating_point() and not bool(found.isfinite().all()):
        raise ValueError("lengths must be finite, got NaN or infinite ones. For an unknown length pass 0.")
    return found


def in_order(
    run: Callable[[list[Tensor]], Iterator[Tensor]], groups: list[Tensor], lengths: Tensor | None
) -> Iterator[Tensor]:
    """What `run` gives for the groups' examples, `(draws, b, d)` at a time, as if they were run in the order asked for.

    They are run by length, longest first, a stretch of them at a time. Example: examples `[7, 3, 5]` of lengths 2, 9 and 4
    run as `[3, 5, 7]`, and the rows of the result come back in places `[2, 0, 1]`.
    """
    if lengths is None or not groups:
        yield from run(groups)
        return
    stretches = list(torch.cat(groups).split(_STRETCH))
    orders = [torch.argsort(lengths[stretch], descending=True, stable=True) for stretch in stretches]
    by_length = [stretch[order] for stretch, order in zip(stretches, orders, strict=True)]
    for order, rows in zip(orders, regrouped(run(by_length), by_length), strict=True):
        yield rows[:, torch.argsort(order)]


def moved(value: Any, device: torch.device) -> Any:
    """The batch on that device."""
    return value.to(device) if hasattr(value, "to") else _mapped(lambda v: moved(v, device), value)


def copied(value: Any) -> Any:
    """The batch with tensors of its own."""
    return value.clone() if isinstance(value, Tensor) else _mapped(copied, value)


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """A batch of the same kind (dict, `BatchEncoding`, named tuple, tuple, list) with its entries changed."""
    if isinstance(value, MutableMapping):
        new = copy.copy(value)
        new.update({key: change(v) for key, v in value.items()})
        return new
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(change, value))
    return type(value)(map(change, value)) if isinstance(value, (tuple, list)) else value
