"""Where tensors have their memory, and which of them an operation writes to."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


class NoStorageError(RuntimeError):
    """The tensor has no memory of its own to follow, as a sparse one has not."""


def storage_of(tensor: Tensor) -> int:
    """Says where a tensor's memory is: the same for all that share it."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError) as error:  # sparse and other tensors that have none
        raise NoStorageError(f"a {tensor.layout} tensor has no storage to follow") from error


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among the arguments that an operation writes to."""
    found: list[Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += tensors_in(value)
    return found
