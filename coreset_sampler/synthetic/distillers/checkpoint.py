"""A distillation under way as a file: all that it takes to continue as if it had not been interrupted."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import file as coreset_file
from .state import State

_KIND = "distillation under way"


@dataclass(frozen=True)
class Progress:
    """A state, and what was seen on the way to it."""

    state: State
    seconds: float = 0.0
    """Time spent on steps."""
    history: list[dict[str, float]] = field(default_factory=list)
    """Step, mean loss since the last entry and held-out accuracy."""
    frames: dict[int, Tensor] = field(default_factory=dict)
    """An image of each class at some steps."""
    since: tuple[float, int] = (0.0, 0)
    """Sum and number of the losses since the last entry of the history."""


def save(path: str | os.PathLike[str], progress: Progress, settings: dict[str, Any]) -> None:
    """Writes whole or not at all; `settings` say what the run is, and are given back by `load`."""
    state = progress.state
    tensors = {"inputs": state.inputs, "targets": state.targets}
    tensors |= {f"memory.{name}": value for name, value in state.memory.items()}
    tensors |= {f"frame.{step}": value for step, value in progress.frames.items()}
    description = {
        "kind": _KIND,
        "seed": state.seed,
        "step": state.step,
        "seconds": progress.seconds,
        "history": progress.history,
        "since": progress.since,
        "settings": settings,
    }
    coreset_file.write(path, {name: value.detach().clone() for name, value in tensors.items()}, description)


def load(path: str | os.PathLike[str], *, device: str | torch.device | None = None) -> tuple[Progress, dict[str, Any]]:
    """What `save` wrote, on `device`."""
    tensors, description = coreset_file.read(path)
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    if description.get("kind") != _KIND:
        raise coreset_file.CoresetFileError(f"{path} is a coreset or something else, not a distillation under way")
    try:
        memory = {name.removeprefix("memory."): t for name, t in tensors.items() if name.startswith("memory.")}
        frames = {int(name.removeprefix("frame.")): t for name, t in tensors.items() if name.startswith("frame.")}
        state = State(tensors["inputs"], tensors["targets"], description["seed"], description["step"], memory)
        total, count = description.get("since", (0.0, 0))  # older files have none
        seen = description["seconds"], description["history"], dict(sorted(frames.items()))
        progress = Progress(state, *seen, since=(float(total), int(count)))
        return progress, description["settings"]
    except (KeyError, ValueError, TypeError) as error:
        raise coreset_file.CoresetFileError(f"{path} is damaged: {error!r}") from error


def same(one: State, other: State) -> bool:
    """True if two states are equal to the bit."""
    return (
        (one.seed, one.step) == (other.seed, other.step)
        and torch.equal(one.inputs, other.inputs)
        and torch.equal(one.targets, other.targets)
        and one.memory.keys() == other.memory.keys()
        and all(torch.equal(value, other.memory[name]) for name, value in one.memory.items())
    )
