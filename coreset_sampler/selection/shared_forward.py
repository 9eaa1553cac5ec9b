"""Runs a network several times with some parameters changed and computes only what they change: `run_shared`.

It saves two thirds of a selection with four draws and `SphericalGaussian(redraw=1)` (docs/cards/stable.md), and changes
no number; everything else here is private to it.

The first run is recorded operation by operation. An operation whose inputs do not depend on a changed parameter
gives the same result in every later run, so there its recorded output is returned instead of being computed. What is
computed is computed by the same kernels on the same shapes: the outputs equal those of separate runs bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .storages import NoStorageError, storage_of, tensors_in, written_by

T = TypeVar("T")

_COMPUTE = object()  # in place of an output: run the operation again


class CannotShareError(RuntimeError):
    """The network does something that cannot be replayed; run it whole instead. The results are the same."""


def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


class _Recorder(TorchDispatchMode):
    """Runs everything, and notes each operation with its output, if no changed parameter had a part in it.

    Shared results stay alive in the log, so their storages are unique. Dependent ones may be freed as the network goes
    on: should a later tensor get the same address, it is dependent too or is taken off the set.
    """

    supports_higher_order_operators = True

    def __init__(self, changed: Iterable[Tensor]) -> None:
        super().__init__()
        self.log: list[list[Any]] = []  # [operation, output, whether later runs write into it]
        self.kept: dict[int, list[int]] = {}  # storage -> positions in the log that hold it
        self.dependent = {storage_of(tensor) for tensor in changed}
        self.writes: dict[int, int] = {}  # storage -> how often it was written to; inference tensors have no _version
        self.read: dict[int, tuple[Tensor, int]] = {}  # shared tensors that dependent operations read, and when

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            raise CannotShareError(f"{func} is no plain operation")
        inputs = tensors_in((args, kwargs))
        depends = any(storage_of(tensor) in self.dependent for tensor in inputs)
        written = written_by(func, args, kwargs)
        if depends:
            for tensor in written:
                self._copy_before_write(tensor)
            ours = {storage_of(tensor) for tensor in written}
            for tensor in inputs:
                if storage_of(tensor) not in self.dependent and storage_of(tensor) not in ours:
                    self.read.setdefault(id(tensor), (tensor, self._writes_to(tensor)))  # at the first reading
        for tensor in written:
            self.writes[storage_of(tensor)] = self._writes_to(tensor) + 1
        output = func(*args, **kwargs)
        if depends:
            self.dependent.update(storage_of(tensor) for tensor in [*tensors_in(output), *written])
            self.log.append([func, _COMPUTE, False])
        elif _is_view(func):  # costs nothing, and keeps looking at whatever its base is in a later run
            self.log.append([func, _COMPUTE, False])
        else:
            old = {storage_of(tensor) for tensor in inputs}
            self.dependent -= {storage_of(tensor) for tensor in tensors_in(output)} - old  # a freed address, used anew
            for tensor in tensors_in(output):
                self.kept.setdefault(storage_of(tensor), []).append(len(self.log))
            self.log.append([func, output, False])
        return output

    def _copy_before_write(self, tensor: Tensor) -> None:
        """A dependent operation is about to write into a shared result: keep a copy to start each run from."""
        storage = storage_of(tensor)
        if storage in self.dependent:
            return
        holders = self.kept.get(storage, [])
        if len(holders) != 1 or not isinstance(self.log[holders[0]][1], Tensor):
            raise CannotShareError("an operation writes into a tensor that several others gave out")
        self.log[holders[0]][1] = self.log[holders[0]][1].clone()
        self.log[holders[0]][2] = True

    def _writes_to(self, tensor: Tensor) -> int:
        return self.writes.get(storage_of(tensor), 0)

    def finish(self) -> None:
        if any(self._writes_to(tensor) != writes for tensor, writes in self.read.values()):
            raise CannotShareError("a shared tensor was written to after it had been read")
        self.read.clear()


class _Player(TorchDispatchMode):
    def __init__(self, log: list[list[Any]]) -> None:
        super().__init__()
        self.log = log
        self.position = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.position >= len(self.log) or self.log[self.position][0] is not func:
            raise CannotShareError("the network took another path than in its first run")
        _, output, written_later = self.log[self.position]
        self.position += 1
        if output is _COMPUTE:
            return func(*args, **(kwargs or {}))
        return output.clone() if written_later else output


def run_shared(run: Callable[[T], Any], variants: list[T], changed: list[Tensor]) -> tuple[list[Any], float]:
    """`[run(v) for v in variants]`, computing once what does not depend on the tensors that differ between them.

    Memory holds the shared intermediate results of one run. Also gives the share of operations that were spared. Raises
    `CannotShareError` where replaying would not be safe.

    Args:
        run: runs the network on one variant.
        variants: what to run it on, such as the draws of a posterior.
        changed: the tensors of the first variant that differ in others.
    """
    try:
        recorder = _Recorder(changed)
        with recorder:
            results = [run(variants[0])]
        recorder.finish()
        for variant in variants[1:]:
            with _Player(recorder.log):
                results.append(run(variant))
    except NoStorageError as error:
        raise CannotShareError(str(error)) from error
    spared = sum(output is not _COMPUTE for _, output, _ in recorder.log)
    return results, spared / max(len(recorder.log), 1)
