"""Batches of any kind: moved, copied, and cut into the groups that were asked for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor


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
