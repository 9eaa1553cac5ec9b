"""An untrusted file or folder: opened once, by what it holds and not by its name, and never executed."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from ..untrusted import CoresetFileError, check_kind, reading
from . import safe_msgpack, safe_npz, safe_torch


class Source:
    """What `read_published` was pointed at."""

    def __init__(self, path: Path) -> None:
        check_kind(path)
        self.path = path

    @property
    def folder(self) -> Path:
        """The folder itself, or the one that the file is in."""
        return self.path if self.path.is_dir() else self.path.parent

    @cached_property
    def content(self) -> Any:
        """The values in the file; None for a folder."""
        return None if self.path.is_dir() else load(self.path)

    def describe(self) -> str:
        """A line for error messages."""
        if self.path.is_dir():
            names = sorted(entry.name for entry in self.path.iterdir())[:5]
            return f"a folder with {', '.join(names) or 'nothing in it'}"
        return _describe(self.content)


def load(path: Path) -> Any:
    """The tensors, numbers and plain containers in a `.pt`, `.npz` or msgpack file, by its first bytes."""
    check_kind(path)
    with reading(path):
        if path.stat().st_size == 0:
            raise CoresetFileError(f"{path} is empty")
        with open(path, "rb") as file:
            start = file.read(16)
        if start[:4] == b"PK\x03\x04":
            return safe_npz.load(path) if safe_npz.recognise(path) else safe_torch.load(path)
        if start[4:9] == b"\0\0\0\0{":
            raise CoresetFileError(f"{path} is a safetensors file; for those of ours: load_coreset({str(path)!r})")
        if 0x81 <= start[0] <= 0x8F or start[0] in (0xDE, 0xDF):
            return safe_msgpack.load(path)
        safe_torch.refuse_bare_pickle(path)


def _describe(content: Any, *, nested: bool = True) -> str:
    if isinstance(content, Tensor):
        return f"a tensor {str(content.dtype).removeprefix('torch.')} {tuple(content.shape)}"
    if isinstance(content, dict) and nested:
        items = [f"{key!r}: {_describe(value, nested=False)}" for key, value in list(content.items())[:6]]
        return f"a dict of {', '.join(items)}"
    if isinstance(content, (list, tuple, dict)):
        return f"a {type(content).__name__} of {len(content)}"
    return f"a {type(content).__name__}"
