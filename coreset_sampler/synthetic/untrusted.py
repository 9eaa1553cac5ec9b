"""What every reader of untrusted files keeps to: ordinary files only, limits, and one kind of error."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LONGEST_MESSAGE = 5000  # names in a file may be of any length


class CoresetFileError(ValueError):
    """A file that cannot be read as a coreset; the message says which file and why.

    Names in it come from the file: what a terminal would obey is escaped.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message[:_LONGEST_MESSAGE]))


@dataclass(frozen=True)
class Limits:
    """What an untrusted file may cost before it is refused.

    Args:
        header_bytes: of a safetensors header.
        json_bytes, json_values: of JSON in other files; of any JSON, whose small values unpack to 25 times their size.
        pickle_bytes: of the pickle in a `.pt`, which holds no tensor data.
        nodes: values in nested containers, counted as often as they are reached.
        dimensions: of one array.
        image_pixels: of one image, 8192 x 8192.
        expansion, always_fine: data may unpack to `expansion` times their size on disk, and to `always_fine` bytes
            in any case.
    """

    header_bytes: int = 16 << 20
    json_bytes: int = 128 << 20
    json_values: int = 1 << 20
    pickle_bytes: int = 64 << 20
    nodes: int = 1 << 20
    dimensions: int = 32
    image_pixels: int = 1 << 26
    expansion: int = 100
    always_fine: int = 1 << 30

    def check_unpacked(self, path: Path, unpacked: int, on_disk: int) -> None:
        """Raises if so many bytes are too much for what is on disk."""
        if unpacked > max(self.always_fine, self.expansion * on_disk):
            raise CoresetFileError(f"{path} is refused: {on_disk} bytes would unpack to {unpacked} or more (a bomb?)")


LIMITS = Limits()


def printable(text: str) -> str:
    """The text with everything escaped that moves a cursor, hides or reorders; line ends stay."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


@contextmanager
def reading(path: str | os.PathLike[str], what: str = "is truncated or damaged") -> Iterator[None]:
    """Turns whatever goes wrong inside into a `CoresetFileError` that names the file."""
    try:
        yield
    except (CoresetFileError, ImportError, FileNotFoundError, PermissionError):
        raise
    except MemoryError as error:
        raise CoresetFileError(f"{path} needs more memory than there is") from error
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        raise CoresetFileError(f"{path} {what}: {reason}") from error


def parse_json(path: Path, data: bytes | str) -> dict[str, Any]:
    """The JSON object, if its size and the number of its values are in bounds."""
    raw = data.encode(errors="surrogatepass") if isinstance(data, str) else data
    values = sum(raw.count(mark) for mark in (b",", b"[", b"{"))
    if len(raw) > LIMITS.json_bytes or values > LIMITS.json_values:
        raise CoresetFileError(f"{path} is refused: JSON of {len(raw)} bytes and about {values} values")
    content = json.loads(raw)
    if not isinstance(content, dict):
        raise CoresetFileError(f"{path} is damaged: its JSON is no object")
    return content


def check_kind(path: Path) -> None:
    """Raises unless this is a file or a folder: reading from a pipe or a device may never end."""
    if not path.exists():
        raise FileNotFoundError(f"there is no file or folder {printable(str(path))}")
    if not path.is_file() and not path.is_dir():
        raise CoresetFileError(f"{path} is refused: a {_kind(path)} is neither a file nor a folder")


def inside(folder: Path, name: str) -> Path:
    """The file or folder of that name in the folder itself, never one elsewhere and never a link."""
    if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name or "\\" in name or "\0" in name:
        raise CoresetFileError(f"{folder} is refused: it names {name!r}, which is not a name in that folder")
    path = folder / name
    if path.is_symlink():
        raise CoresetFileError(f"{path} is refused: a link, and links are not followed; copy the file to its place")
    if not path.exists():
        raise CoresetFileError(f"{folder} is incomplete: {name!r} is not there")
    check_kind(path)
    return path


def _kind(path: Path) -> str:
    mode = path.stat().st_mode
    return "named pipe" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device"
