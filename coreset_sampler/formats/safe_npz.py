"""Opens `.npz` files with sizes checked before a byte is unpacked, and never an object array."""

from __future__ import annotations

import math
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from ..coreset_file import CoresetFileError

# Honest images shrink by a factor of ten at most; deflate can expand a thousandfold.
MOST_EXPANSION = 20
ALWAYS_FINE = 64 << 20
# RuntimeError is what zipfile raises for a password
_BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OSError)


def recognise(path: Path) -> bool:
    """True if this zip holds numpy arrays."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            return bool(names) and all(name.endswith(".npy") for name in names)
    except _BROKEN as error:
        raise CoresetFileError(f"{path} is truncated or damaged: {error}") from error


def load(path: Path) -> dict[str, Tensor]:
    """The arrays by name, as tensors."""
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked, limit = (
                sum(e.file_size for e in archive.infolist()),
                MOST_EXPANSION * path.stat().st_size,
            )
            if unpacked > max(limit, ALWAYS_FINE):
                raise CoresetFileError(
                    f"{path} is refused: {path.stat().st_size} bytes would unpack to {unpacked} (a zip bomb?)"
                )
            return {entry.filename.removesuffix(".npy"): _array(path, archive, entry) for entry in archive.infolist()}
    except _BROKEN as error:
        raise CoresetFileError(f"{path} is truncated or damaged: {error}") from error


def _array(path: Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Tensor:
    with archive.open(entry) as file:
        try:
            version = npy.read_magic(file)
            read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, _, dtype = read_header(file)
        except ValueError as error:
            raise CoresetFileError(f"{path} is damaged at {entry.filename}: {error}") from error
        if dtype.kind not in "biuf":
            raise CoresetFileError(
                f"{path} is refused: {entry.filename} holds {dtype}; only numbers are read, never objects"
            )
        claimed, held = math.prod(shape) * dtype.itemsize, entry.file_size - file.tell()
        if claimed != held:
            raise CoresetFileError(
                f"{path} is refused: {entry.filename} claims {claimed} bytes {shape}, it holds {held}"
            )
    with archive.open(entry) as file:
        array = npy.read_array(file, allow_pickle=False)
    # torch takes native byte order only
    return torch.from_numpy(np.ascontiguousarray(array.astype(dtype.newbyteorder("="), copy=False)).copy())
