"""Our file format: a `.safetensors` file whose metadata say what the tensors are. See docs/file_format.md."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from .untrusted import LIMITS, CoresetFileError, check_kind, parse_json, reading

__all__ = ["FORMAT", "VERSION", "CoresetFileError", "read", "version_for", "write"]

FORMAT = "coreset_sampler"
VERSION = 4


def version_for(description: Mapping[str, Any], inputs: Tensor | None = None) -> int:
    """The oldest version of the format that can say this: 2 with tiles, 3 with views, 4 with normalised images as bytes."""
    if inputs is not None and inputs.dtype == torch.uint8 and description["preprocessing"]["kind"] == "normalize":
        return 4
    if description.get("views") is not None:
        return 3
    return 1 if description.get("tiles", 1) == 1 else 2


def write(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], description: Mapping[str, Any]) -> None:
    """Writes beside the target, flushes, then renames: readers see the old file or the new, never half."""
    path = Path(path)
    metadata = {
        "format": FORMAT,
        "version": str(version_for(description, tensors.get("inputs"))),
        "coreset": json.dumps(description, allow_nan=False),
    }
    if len(metadata["coreset"]) > LIMITS.header_bytes // 2:
        raise ValueError(
            f"the description must be under {LIMITS.header_bytes // 2} characters of JSON to be read again"
        )
    apart = {name: t.cpu().contiguous().clone() for name, t in tensors.items()}  # safetensors refuses shared memory
    content = _sorted(safetensors.torch.save(apart, metadata))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno:  # a full disk names no file, others the temporary one
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    _flush_folder(path.parent)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and their description."""
    path = Path(path)
    check_kind(path)
    if path.is_dir():
        raise CoresetFileError(f"{path} is a folder. For what others published: read_published({str(path)!r})")
    with reading(path, "is damaged"):
        metadata = _header(path).get("__metadata__", {})
        if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
            raise CoresetFileError(f"{path} is a safetensors file, but not a coreset of ours: it lacks our metadata")
        _check_version(path, metadata.get("version", ""))
        description = parse_json(path, metadata["coreset"])
        tensors = safetensors.torch.load_file(path)
        # copies, because safetensors maps the file, and a map dies with a file cut short later
        return {name: tensor.clone() for name, tensor in tensors.items()}, description


def _check_version(path: Path, version: str) -> None:
    if not version.isdecimal():
        raise CoresetFileError(f"{path} is damaged: format version {version[:80]!r} is not a number")
    if int(version) > VERSION:
        raise CoresetFileError(
            f"{path} is newer than this coreset_sampler: it has format version {version}, and versions up to "
            f"{VERSION} can be read here. Upgrade: pip install -U coreset-sampler"
        )


def _sorted(content: bytes) -> bytes:
    """The file with its metadata in order of their names: safetensors writes them in an order of chance."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[end:]


def _header(path: Path) -> dict[str, Any]:
    """The JSON header, after checking that the file is as long as it says."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(9)
        length = int.from_bytes(start[:8], "little")
        if size >= 9 and start[8:] != b"{":
            raise CoresetFileError(
                f"{path} is foreign: not a safetensors file. For what others published: read_published({str(path)!r})"
            )
        if size < max(9, 8 + length):
            raise CoresetFileError(f"{path} is truncated: {size} bytes are not even its header")
        if length > LIMITS.header_bytes:
            raise CoresetFileError(f"{path} is refused: a header of {length} bytes, over {LIMITS.header_bytes}")
        file.seek(8)
        with reading(path, "is foreign or damaged: its safetensors header is unreadable"):
            header = parse_json(path, file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            promised = 8 + length + max(ends, default=0)
    if size < promised:
        raise CoresetFileError(f"{path} is truncated: its tensors need {promised} bytes, the file has {size}")
    return header


def _flush_folder(folder: Path) -> None:
    """Makes the rename itself survive a power cut, where folders can be opened (not on Windows)."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
