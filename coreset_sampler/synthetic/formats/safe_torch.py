"""Opens `.pt` files for tensors, numbers and plain containers; everything else in them is refused and named.

A `.pt` file is a zip of raw tensor data and one pickle, and a pickle is a program. We list what the program
wants to import before anything runs; then torch's restricted interpreter (`weights_only=True`) runs the rest.
"""

from __future__ import annotations

import pickle
import pickletools
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..untrusted import LIMITS, CoresetFileError, reading
from .safe_zip import open_zip

_NUMBERS = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
_ALLOWED = {f"torch {number}Storage" for number in _NUMBERS} | {
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    "collections OrderedDict",
    "numpy dtype",
    "numpy.core.multiarray scalar",
    "numpy._core.multiarray scalar",
    "_codecs encode",
}


def load(path: Path, *, mapped: bool = False) -> Any:
    """What the file holds. Raises `CoresetFileError` if that is not only data.

    `mapped` leaves tensors on disk until they are looked at; the file must not change meanwhile.
    """
    program = _program(path)
    _check_imports(path, program)
    stand_ins: list[Any] = [(_Dtype, "numpy.dtype")]
    stand_ins += [(_scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")]
    with reading(path, "is refused or damaged"), torch.serialization.safe_globals(stand_ins):
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        except pickle.UnpicklingError as error:
            # torch puts advice to switch the protection off before the reason
            raise ValueError(str(error).split("WeightsUnpickler error:")[-1]) from error
    _check_sizes(path, content)
    return content


def refuse_bare_pickle(path: Path) -> None:
    """Always raises, naming what the pickle would have imported, if it is one."""
    with open(path, "rb") as file:
        _check_imports(path, file.read(LIMITS.pickle_bytes))
    raise CoresetFileError(
        f"{path} is refused: a bare pickle, or torch.save's format of before 2020. If you trust it: "
        f"torch.save(torch.load({path.name!r}, weights_only=True), 'new.pt')"
    )


def _program(path: Path) -> bytes:
    """The pickle in the zip, once the zip is known to hold no more than its own size."""
    size = path.stat().st_size
    with reading(path), open_zip(path) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise CoresetFileError(f"{path} is refused: torch never compresses, this zip is compressed (a zip bomb?)")
        if sum(entry.file_size for entry in entries) > size:
            raise CoresetFileError(f"{path} is refused: its zip entries claim more bytes than the file's {size}")
        pickles = [e for e in entries if e.filename.endswith("/data.pkl") or e.filename == "data.pkl"]
        if len(pickles) != 1:
            raise CoresetFileError(f"{path} is a zip, but neither of torch.save nor of numpy.savez")
        if pickles[0].file_size > LIMITS.pickle_bytes:
            raise CoresetFileError(f"{path} is refused: a pickle of {pickles[0].file_size} bytes besides its tensors")
        return archive.read(pickles[0])


def _check_imports(path: Path, program: bytes) -> None:
    for name in _imports(path, program):
        if name not in _ALLOWED:
            raise CoresetFileError(
                f"{path} is refused: it would import {name.replace(' ', '.')}, and only tensors, numpy "
                "scalars and plain containers are unpickled. Nothing of it has been run."
            )


def _imports(path: Path, program: bytes) -> Iterator[str]:
    """`module name` of every global in the pickle, without running it."""
    texts: list[str] = []
    memo: dict[int, str] = {}
    top = ""  # the text that the last instruction pushed
    with reading(path, "is truncated, damaged or no data file at all"):
        for opcode, argument, _ in pickletools.genops(program):
            if opcode.name in ("GLOBAL", "INST"):
                yield str(argument)
            elif opcode.name == "STACK_GLOBAL":
                yield " ".join(texts[-2:]) or "a computed name"
            elif opcode.name == "MEMOIZE" or opcode.name.endswith("PUT"):
                memo[len(memo) if argument is None else int(argument)] = top
                continue
            pushed = memo.get(int(argument or 0), "") if opcode.name.endswith("GET") else argument
            top = pushed if isinstance(pushed, str) and opcode.name not in ("GLOBAL", "INST") else ""
            texts += [top] if top else []


def _check_sizes(path: Path, content: Any) -> None:
    """Refuses tensors with more elements than stored: a view of one number could fill any memory."""
    size = path.stat().st_size
    total = 0
    for tensor in _tensors_in(path, content):
        needed, held = tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
        total += needed
        if needed > held or held > size:
            raise CoresetFileError(
                f"{path} is refused: a tensor of shape {tuple(tensor.shape)} claims {needed} bytes, "
                f"the file holds {min(held, size)} for it"
            )
    LIMITS.check_unpacked(path, total, size)


def _tensors_in(path: Path, content: Any) -> Iterator[Tensor]:
    """Every tensor in nested containers, as often as it is reached: a list of a list of itself has no end."""
    waiting, reached = [content], 0
    while waiting:
        value = waiting.pop()
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        reached += len(inner)
        if reached > LIMITS.nodes:
            raise CoresetFileError(f"{path} is refused: its containers unfold to more than {LIMITS.nodes} values")
        waiting.extend(inner)
        if isinstance(value, Tensor):
            yield value


class _Dtype:
    """Stands in for numpy.dtype while unpickling: keeps a plain number's code and byte order."""

    def __init__(self, code: str, *_: Any) -> None:
        if code not in ("b1", *(f"{kind}{width}" for kind in "iuf" for width in (1, 2, 4, 8))) or code == "f1":
            raise pickle.UnpicklingError(f"numpy dtype {code!r} is not a plain number")
        self.code, self.order = code, "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order = state[1]
        self.order = order if order in ("<", ">") else "="


def _scalar(dtype: _Dtype, data: bytes | str) -> float | int | bool:
    """A numpy scalar as a plain Python number."""
    if not isinstance(dtype, _Dtype):
        raise pickle.UnpicklingError("numpy scalar without a plain dtype")
    raw = data.encode("latin1") if isinstance(data, str) else data
    values = np.frombuffer(raw, np.dtype(dtype.order + dtype.code))
    if len(values) != 1:
        raise pickle.UnpicklingError(f"numpy scalar of {len(values)} values")
    number: float | int | bool = values[0].item()
    return number
