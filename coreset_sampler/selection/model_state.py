"""A model as it stands, in references: what is put in the place of its tensors, or done to it, can be put back."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, zip_longest
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from .storages import NoStorageError, storage_of, written_by

COPIED_WHOLE = 64 * 2**20  # bytes; a larger model is watched at every operation instead, which costs it little

_MAPPINGS = (dict, OrderedDict, defaultdict)
_CONTAINERS = (*_MAPPINGS, list, deque, set)
_NUMBERS = (int, float, complex, str, bytes, type(None))


class WriteGuard(TorchDispatchMode):
    """Copies the memory of these tensors before an operation writes to it, in whatever way it is reached.

    Args:
        tensors: by a key of one's own; `written` tells the keys of those that were written to.
    """

    supports_higher_order_operators = True

    def __init__(self, tensors: Iterable[tuple[int, Tensor]]) -> None:
        super().__init__()
        self.written: set[int] = set()
        self._storages: dict[int, tuple[torch.UntypedStorage, list[int]]] = {}
        self._copies: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        for key, tensor in tensors:
            memory = _memory(tensor)
            if memory is not None:
                self._storages.setdefault(memory, (tensor.untyped_storage(), []))[1].append(key)
        self.bytes = sum(storage.nbytes() for storage, _ in self._storages.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            for tensor in written_by(func, args, kwargs or {}):
                self._keep(_memory(tensor))
        return func(*args, **(kwargs or {}))

    def copy_all(self) -> None:
        """Copies everything now; nothing needs to be watched any more."""
        for memory in list(self._storages):
            self._keep(memory)
        self.written.clear()

    def undo(self) -> None:
        """Puts the bits back that were there at the copy."""
        for storage, copy in self._copies:
            if storage.nbytes() != copy.nbytes():
                storage.resize_(copy.nbytes())
            if not torch.equal(_bytes(storage), _bytes(copy)):
                storage.copy_(copy)

    def _keep(self, memory: int | None) -> None:
        if memory in self._storages:
            storage, keys = self._storages.pop(memory)
            self.written.update(keys)
            self._copies.append((storage, storage.clone()))


class ModelState:
    """Attributes, containers and tensors of a model and of the modules that it holds in lists, dicts or attributes.

    Only references are kept; the bits of tensors are for a `WriteGuard`. A module or tensor that is reached under
    several names is held once, with all of its places.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules: list[nn.Module] = []
        self.tensors: dict[int, Tensor] = {}
        self._places: dict[int, list[tuple[Any, Any]]] = {}
        self._contents: list[tuple[Any, Any]] = []
        self._random: list[tuple[Callable[[Any], Any], Any]] = []
        self._walk(model)
        for tensor in chain(model.parameters(), model.buffers()):  # those that no python container holds
            self.tensors.setdefault(id(tensor), tensor)
        self._facts = [(t, t.data, t.requires_grad) for t in self.tensors.values() if _memory(t) is not None]

    def guard(self) -> WriteGuard:
        """Watches all tensors of the model."""
        return WriteGuard(self.tensors.items())

    @contextmanager
    def holding(self, values: Mapping[int, Tensor]) -> Iterator[None]:
        """The model with these values in all places of the tensors with these ids; they are taken out however it ends."""
        swapped = [
            (holder, key, holder[key], value)
            for at, value in values.items()
            for holder, key in self._places.get(at, ())
        ]
        try:
            for holder, key, _, value in swapped:
                holder[key] = value
            yield
        finally:
            for holder, key, own, _ in swapped:
                holder[key] = own
            self._undo_run()

    def has_place(self, tensor: Tensor) -> bool:
        """Whether another tensor can be put in its place."""
        return id(tensor) in self._places

    def restore(self) -> None:
        """Puts everything back but for the bits of tensors."""
        for container, copy in self._contents:
            if _differ(container, copy):
                container.clear()
                container.extend(copy) if isinstance(copy, list) else container.update(copy)
        for tensor, alias, needs_gradient in self._facts:
            if _layout(tensor) != _layout(alias):
                tensor.data = alias
            if tensor.requires_grad != needs_gradient:
                tensor.requires_grad_(needs_gradient)
        for put_back, state in self._random:
            put_back(state)

    def _undo_run(self) -> None:
        """Undoes what one run of the model did to it, if that may have been made with the values of a draw.

        A counter alone goes on until the end, as it does in training. A tensor that a run leaves behind (a cache) takes
        with it whatever else changed, since flags may say that it is there.
        """
        changed = ((c, copy) for c, copy in self._contents if _differ(c, copy))
        left = (value for c, copy in changed for value in _differences(c, copy))
        moved = (_layout(tensor) != _layout(alias) for tensor, alias, _ in self._facts)
        if any(not isinstance(value, _NUMBERS) for value in left) or any(moved):
            self.restore()

    def _walk(self, model: nn.Module) -> None:
        waiting: list[Any] = [model]
        seen: set[int] = set()
        while waiting:
            value = waiting.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, nn.Module):
                self.modules.append(value)
                waiting.append(value.__dict__)
            elif isinstance(value, Tensor):
                self.tensors[id(value)] = value
            elif isinstance(value, torch.Generator):
                self._random.append((value.set_state, value.get_state()))
            elif isinstance(value, random.Random):
                self._random.append((value.setstate, value.getstate()))
            elif type(value) in _CONTAINERS:
                waiting += self._contained(value)
            elif isinstance(value, tuple):
                waiting += value

    def _contained(self, container: Any) -> list[Any]:
        """Keeps what a container holds, and gives it."""
        kind = dict if isinstance(container, dict) else set if isinstance(container, set) else list
        copy: Any = kind(container)
        self._contents.append((container, copy))
        items = list(copy.items() if kind is dict else enumerate(copy))
        for key, value in items:
            if isinstance(value, Tensor) and kind is not set:
                self._places.setdefault(id(value), []).append((container, key))
        return [value for _, value in items if not isinstance(value, _NUMBERS)]


def _differ(container: Any, copy: Any) -> bool:
    if isinstance(copy, set):
        return bool(container != copy)
    if len(container) != len(copy):
        return True
    if isinstance(copy, dict):
        return list(container) != list(copy) or not all(map(is_, container.values(), copy.values()))
    return not all(map(is_, container, copy))


def _differences(container: Any, copy: Any) -> Iterator[Any]:
    """The values that are in one and not in the other, or not at the same place."""
    if isinstance(copy, set):
        yield from container ^ copy
        return
    if isinstance(copy, dict):
        pairs: Iterable[tuple[Any, Any]] = [(container.get(k), copy.get(k)) for k in {**container, **copy}]
    else:
        pairs = zip_longest(container, copy)
    for new, old in pairs:
        if new is not old:
            yield from (new, old)


def _memory(tensor: Tensor) -> int | None:
    """Where its bits are; nowhere for tensors that have none of their own (lazy, meta, sparse, wrapping others)."""
    if is_lazy(tensor) or tensor.is_meta or is_traceable_wrapper_subclass(tensor):
        return None
    try:
        return storage_of(tensor)
    except NoStorageError:
        return None


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
