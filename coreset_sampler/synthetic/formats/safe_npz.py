"""Opens `.npz` files with sizes checked before a byte is unpacked, and never an object array."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from ..untrusted import CoresetFileError, reading
from .safe_zip import open_zip

# Honest images shrink by a factor of ten at most; deflate can expand a thousandfold.
MOST_EXPANSION = 20
ALWAYS_FINE = 64 << 20


def recognise(path: Path) -> bool:
    """True if this zip holds numpy arrays."""
    with reading(path), open_zip(path) as archive:
        names = archive.namelist()
        return bool(names) and all(name.endswith(".npy") for name in names)


def load(path: Path) -> dict[str, Tensor]:
    """The arrays by name, as tensors."""
    with reading(path), open_zip(path) as archive:
        size, unpacked = path.stat().st_size, sum(entry.file_size for entry in archive.infolist())
        if unpacked > max(MOST_EXPANSION * size, ALWAYS_FINE):
            raise CoresetFileError(f"{path} is refused: {size} bytes would unpack to {unpacked} (a zip bomb?)")
        return {entry.filename.removesuffix(".npy"): _array(path, archive, entry) for entry in archive.infolist()}


def _array(path: Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Tensor:
    with archive.open(entry) as file, reading(path, f"is damaged at {entry.filename}"):
        version = npy.read_magic(file)
        read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read_header(file)
        if dtype.kind not in "biuf":
            raise CoresetFileError(
                f"{path} is refused: {entry.filename} holds {dtype}; only numbers are read, never objects"
            )
        claimed, held = math.prod(shape) * dtype.itemsize, entry.file_size - file.tell()
        if claimed != held:
            raise CoresetFileError(
                f"{path} is refused: {entry.filename} claims {claimed} bytes {shape}, it holds {held}"
            )
    with archive.open(entry) as file, reading(path, f"is damaged at {entry.filename}"):
        array = npy.read_array(file, allow_pickle=False)
        # torch takes native byte order only
        return torch.from_numpy(np.ascontiguousarray(array.astype(dtype.newbyteorder("="), copy=False)).copy())
