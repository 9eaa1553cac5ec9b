"""Expert trajectories (MTT, BPC, DATM): `replay_buffer_{n}.pt`, trajectories of epochs of parameters."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..untrusted import CoresetFileError, inside
from . import safe_torch
from .source import load

Trajectory = list[list[Tensor]]

_FILE = re.compile(r"replay_buffer_(\d+)\.pt")


def read_experts(path: str | os.PathLike[str]) -> Iterator[Trajectory]:
    """Trajectories of one buffer, or of all `replay_buffer_*.pt` in a folder, one file in memory at a time.

    `trajectory[epoch]` is the list of parameters after that epoch, 0 being the start.
    """
    for file in _files(Path(path)):
        for number, trajectory in enumerate(_buffer(file, load(file))):
            yield _checked(file, number, trajectory)


def open_buffers(path: str | os.PathLike[str]) -> Iterator[Trajectory]:
    """The same with all files at once, mapped: parameters are read when they are looked at, and not checked before."""
    for file in _files(Path(path)):
        yield from _buffer(file, safe_torch.load(file, mapped=True))


def _files(path: Path) -> list[Path]:
    files = [path]
    if path.is_dir():
        numbered = [(int(m[1]), entry) for entry in path.iterdir() if (m := _FILE.fullmatch(entry.name))]
        files = [inside(path, entry.name) for _, entry in sorted(numbered)]
    if not files or not all(file.is_file() for file in files):
        raise FileNotFoundError(f"{path} is neither a buffer nor a folder with replay_buffer_0.pt, ...")
    return files


def _buffer(file: Path, content: Any) -> list[Trajectory]:
    if not is_buffer(content):
        raise CoresetFileError(f"{file} is no expert buffer: a list of trajectories of epochs of tensors")
    trajectories: list[Trajectory] = content
    return trajectories


def is_buffer(content: Any) -> bool:
    """True for lists of lists of lists of tensors."""
    return (
        isinstance(content, list)
        and bool(content)
        and all(isinstance(t, list) and t and all(_is_epoch(epoch) for epoch in t) for t in content)
    )


def _is_epoch(epoch: Any) -> bool:
    return isinstance(epoch, list) and bool(epoch) and all(isinstance(p, Tensor) for p in epoch)


def _checked(file: Path, number: int, trajectory: Trajectory) -> Trajectory:
    shapes = [p.shape for p in trajectory[0]]
    for epoch, parameters in enumerate(trajectory):
        if [p.shape for p in parameters] != shapes:
            raise CoresetFileError(f"{file}: trajectory {number} changes its shapes at epoch {epoch}")
        if not all(bool(torch.isfinite(p).all()) for p in parameters):
            raise CoresetFileError(f"{file}: trajectory {number} has NaN or infinity at epoch {epoch}")
    return [[p.detach() for p in parameters] for parameters in trajectory]
