"""The processes of a torch.distributed run, as far as selection needs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor, distributed

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


def buffers_of_first(buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same buffers with the numbers that process 0 has, for which nothing is written into the model.

    BatchNorm statistics are local, and a checkpoint holds those of process 0: with these, a run that was resumed selects
    what one that was not interrupted selects. A model without such buffers has nothing to send.
    """
    names = [name for name, value in buffers.items() if value.is_floating_point()]
    if not names or world()[1] == 1:
        return buffers
    first = from_first([buffers[name].detach().cpu() for name in names])
    return {**buffers, **{name: value.to(buffers[name].device) for name, value in zip(names, first, strict=True)}}
