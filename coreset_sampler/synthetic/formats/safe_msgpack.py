"""Opens flax checkpoints: msgpack with arrays as extension 1, `(shape, dtype, bytes)`. No flax needed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...extras import need
from ..untrusted import LIMITS, CoresetFileError, reading

_NUMBERS = {"bool", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))}
_NUMBERS |= {"float16", "float32", "float64"}
_ARRAY, _SCALAR = 1, 3


def load(path: Path) -> Any:
    """The tree, with tensors for arrays and None for what is no array."""
    msgpack = need("msgpack", extra="formats", what="flax checkpoints")

    def extension(code: int, data: bytes) -> Tensor | None:
        return _array(path, msgpack.unpackb(data, raw=False)) if code in (_ARRAY, _SCALAR) else None

    with reading(path, "is truncated or damaged as a flax checkpoint"):
        # msgpack bounds every container by the length of the data itself
        return _joined(msgpack.unpackb(path.read_bytes(), ext_hook=extension, raw=False, strict_map_key=False))


def _array(path: Path, packed: Any) -> Tensor:
    shape, name, data = packed
    if name not in _NUMBERS:
        raise CoresetFileError(f"{path} is refused: arrays of {str(name)[:80]!r} are not read")
    # before the product: of 100,000 dimensions it takes a minute
    if len(shape) > LIMITS.dimensions or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise CoresetFileError(f"{path} is refused: an array has shape {str(shape)[:200]}")
    claimed = math.prod(shape) * np.dtype(name).itemsize
    if claimed != len(data):
        raise CoresetFileError(
            f"{path} is refused: an array {tuple(shape)} claims {claimed} bytes, the file holds {len(data)}"
        )
    return torch.from_numpy(np.frombuffer(data, name).reshape(shape).copy())


def _joined(tree: Any) -> Any:
    """The tree with arrays that flax cut in pieces put together."""
    if not isinstance(tree, dict):
        return tree
    if "__msgpack_chunked_array__" in tree:
        pieces, shape = tree["chunks"], tree["shape"]
        whole = torch.cat([pieces[str(i)] for i in range(len(pieces))])
        return whole.reshape([shape[str(i)] for i in range(len(shape))])
    return {key: _joined(value) for key, value in tree.items()}
