"""The processes of a torch.distributed run, as far as selection needs them.

Every message has a header in which each process says where it is and whether it got there. So an error in one process
ends the selection in all of them, and nobody waits for a process that has given up.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

T = TypeVar("T")

_STEPS = ("failed", "gathering", "taking what process 0 has", "comparing settings")
_FAILED, _GATHER, _FIRST, _COMPARE = range(len(_STEPS))
_LONGEST_MESSAGE = 4000  # characters of an error


class OtherProcessError(RuntimeError):
    """Another process failed, is somewhere else or has other settings; raised in all processes."""


class _InterruptedError(KeyboardInterrupt):
    """Ctrl-C in the middle of a message: the others cannot be told."""


def world() -> tuple[int, int]:
    """`(rank, number of processes)`; `(0, 1)` outside a process group."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def share(items: Sequence[T]) -> list[T]:
    """Every `world`-th item, starting with the rank's own."""
    rank, count = world()
    return list(items[rank::count])


def gather(own: Sequence[T]) -> list[T]:
    """All processes' results in the order of the items that `share` dealt out."""
    if world()[1] == 1:
        return list(own)
    parts: list[list[T]] = _exchange(_GATHER, list(own))
    longest = max(len(part) for part in parts)
    return [part[i] for i in range(longest) for part in parts if i < len(part)]


def from_first(value: T) -> T:
    """The value that process 0 has."""
    if world()[1] == 1:
        return value
    first: T = _exchange(_FIRST, value)[0]
    return first


def compare(settings: Mapping[str, Any]) -> None:
    """Raises in all processes if one of them has other settings than process 0, and says which and what."""
    if world()[1] == 1:
        return
    first, *others = _exchange(_COMPARE, dict(settings))
    differences = [
        f"process {rank} has {name}={other.get(name)} where process 0 has {name}={first.get(name)}"
        for rank, other in enumerate(others, 1)
        for name in dict.fromkeys((*first, *other))
        if other.get(name) != first.get(name)
    ]
    if differences:
        raise OtherProcessError(
            "samplers must be made alike in all processes, so that they choose together: " + "; ".join(differences)
        )


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


class WarnOnce:
    """Gives each warning once, in process 0."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def __call__(self, message: str | None) -> None:
        """Warns, at the place that called the caller; None is no warning."""
        if message is None or message in self._given:
            return
        self._given.add(message)
        if world()[0] == 0:
            warnings.warn(message, stacklevel=3)


@contextmanager
def together() -> Iterator[None]:
    """What fails inside in one process fails in all: there with its own error, elsewhere with one that tells of it."""
    try:
        yield
    except (OtherProcessError, _InterruptedError):
        raise  # all know, or cannot be told
    except BaseException as error:
        if world()[1] > 1:
            _tell(error)
        raise


def _tell(error: BaseException) -> None:
    with suppress(OtherProcessError):  # all have heard of it, or are gone
        _exchange(_FAILED, f"{type(error).__name__}: {error}"[:_LONGEST_MESSAGE])


def _exchange(step: int, value: Any) -> list[Any]:
    """What each process says at this step; at `_FIRST` process 0 alone. Raises in all if they are not at the same step."""
    words = b"" if step == _FIRST and world()[0] != 0 else pickle.dumps(value)
    try:
        steps, lengths = torch.stack(_all(torch.tensor([step, len(words)]))).T.tolist()
        if set(steps) == {_FIRST}:
            return [pickle.loads(_words_of_first(words, lengths[0]))]
        if set(steps) == {step} and step != _FAILED:
            return [pickle.loads(said) for said in _all_words(words, lengths)]
        errors = _all_words(
            words if step == _FAILED else b"", [k * (s == _FAILED) for s, k in zip(steps, lengths, strict=True)]
        )
    except KeyboardInterrupt as error:
        raise _InterruptedError from error
    except RuntimeError as error:
        raise OtherProcessError(f"the processes lost one another during a selection: {error}") from error
    raise OtherProcessError(_trouble(steps, errors))


def _trouble(steps: list[int], errors: list[bytes]) -> str:
    failed = [f"process {rank}: {pickle.loads(said)}" for rank, said in enumerate(errors) if said]
    if failed:
        return "the selection failed in " + "; ".join(failed)
    where = ", ".join(f"process {rank} is {_STEPS[step]}" for rank, step in enumerate(steps))
    return f"a strategy must call view.gather as often in every process, but {where}"


def _all(own: Tensor) -> list[Tensor]:
    """The tensors of all processes, of one shape."""
    own = own.to(_device())
    parts = [torch.empty_like(own) for _ in range(world()[1])]
    distributed.all_gather(parts, own)
    return [part.cpu() for part in parts]


def _all_words(own: bytes, lengths: list[int]) -> list[bytes]:
    longest = max(lengths)
    padded = torch.frombuffer(bytearray(own.ljust(longest, b"\0")), dtype=torch.uint8) if longest else torch.empty(0)
    parts = _all(padded) if longest else [padded] * len(lengths)
    return [bytes(part[:length].numpy()) for part, length in zip(parts, lengths, strict=True)]


def _words_of_first(words: bytes, length: int) -> bytes:
    box = torch.frombuffer(bytearray(words or bytes(length)), dtype=torch.uint8).to(_device())
    distributed.broadcast(box, src=0)
    return bytes(box.cpu().numpy())


def _device() -> torch.device:
    """Where the group's backend finds tensors: NCCL knows none on the CPU."""
    kinds = [entry.split(":")[0] for entry in distributed.get_backend_config().split(",")]
    return torch.device("cpu" if "cpu" in kinds else kinds[0])
