"""The processes of a torch.distributed run, as far as selection needs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import distributed

T = TypeVar("T")


def world() -> tuple[int, int]:
    """`(rank, number of processes)`; `(0, 1)` outside a process group."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def share(items: Sequence[T]) -> list[T]:
    """Every `world`-th item, starting with the rank's own."""
    rank, count = world()
    return list(items[rank::count])


def gather(mine: Sequence[T]) -> list[T]:
    """All processes' results in the order of the items that `share` dealt out."""
    _, count = world()
    if count == 1:
        return list(mine)
    parts: list[list[T]] = [[] for _ in range(count)]
    distributed.all_gather_object(parts, list(mine))
    longest = max(len(part) for part in parts)
    return [part[i] for i in range(longest) for part in parts if i < len(part)]


def from_first(value: T) -> T:
    """The value that process 0 has."""
    _, count = world()
    if count == 1:
        return value
    box = [value]
    distributed.broadcast_object_list(box, src=0)
    return box[0]
