"""Opens zip archives of which every reader has the same opinion.

Python's zipfile moves all offsets when the end of a file says so, torch's reader takes them literally: one file, two
archives, of which only one was checked. Here the parts must lie exactly where the end says, with nothing around them.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ..untrusted import CoresetFileError

_END = struct.Struct("<4s4H2LH")  # the end of the central directory
_LOCATOR = struct.Struct("<4sLQL")  # where its 64-bit form is
_END_64 = struct.Struct("<4sQ2H2L4Q")
_NARROW = {0xFFFF, 0xFFFFFFFF}  # "see the 64-bit form"


@contextmanager
def open_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """The archive, after checks of its layout; damage is zipfile's own exceptions."""
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        directory = _directory(path, file, size)
        with zipfile.ZipFile(file) as archive:
            _check_entries(path, archive, directory)
            yield archive


def _directory(path: Path, file: BinaryIO, size: int) -> int:
    """Where the central directory begins."""
    end = size - _END.size
    found = _unpack(file, _END, end)
    if found is None or found[0] != b"PK\x05\x06" or found[7] != 0:
        raise CoresetFileError(f"{path} is truncated or damaged: the zip's directory is not at the end of the file")
    _, disk, first_disk, here, entries, length, offset, _ = found
    stop = end
    wide = _wide(path, file, end)
    if wide is not None:
        stop, narrow = end - _LOCATOR.size - _END_64.size, (disk, first_disk, here, entries, length, offset)
        if any(value not in _NARROW and value != true for value, true in zip(narrow, wide, strict=True)):
            raise CoresetFileError(f"{path} is refused: its two zip directories disagree")
        disk, first_disk, here, entries, length, offset = wide
    if disk or first_disk or here != entries or offset + length != stop:
        raise CoresetFileError(f"{path} is refused: its zip directory does not lie where the end of the file says")
    return int(offset)


def _wide(path: Path, file: BinaryIO, end: int) -> tuple[int, ...] | None:
    """Disks, counts, length and offset of the 64-bit directory, if there is one."""
    locator = _unpack(file, _LOCATOR, end - _LOCATOR.size)
    if locator is None or locator[0] != b"PK\x06\x07":
        return None
    place = end - _LOCATOR.size - _END_64.size
    found = _unpack(file, _END_64, place)
    if found is None or found[0] != b"PK\x06\x06" or found[1] != _END_64.size - 12 or locator[1:] != (0, place, 1):
        raise CoresetFileError(f"{path} is refused: its 64-bit zip directory does not lie where its locator says")
    return tuple(found[4:])


def _unpack(file: BinaryIO, form: struct.Struct, place: int) -> tuple[Any, ...] | None:
    if place < 0:
        return None
    file.seek(place)
    return form.unpack(file.read(form.size))


def _check_entries(path: Path, archive: zipfile.ZipFile, directory: int) -> None:
    """Names are said once, and data lie one after another from the first byte to the directory."""
    entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
    names = {entry.orig_filename.casefold() for entry in entries}
    if len(names) != len(entries) or any("\0" in name for name in names):
        raise CoresetFileError(f"{path} is refused: a name occurs twice in the zip, or has a zero byte")
    reached = 0
    for entry in entries:
        if entry.header_offset < reached or (reached == 0 and entry.header_offset != 0):
            raise CoresetFileError(f"{path} is refused: entries of the zip overlap, or something precedes them")
        reached = entry.header_offset + 30 + entry.compress_size
    if reached > directory:
        raise CoresetFileError(f"{path} is refused: entries of the zip reach into its directory")
