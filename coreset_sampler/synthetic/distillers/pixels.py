"""What the methods that learn from expert trajectories share: how a coreset begins and how a gradient moves it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from ..flat import FlatNetwork
from ..networks import Network, fresh
from .beginning import Bounds, bounded
from .state import DivergedError, Info, Source, State


def begin(inputs: Tensor, targets: Tensor, seed: int, **memory: Tensor) -> State:
    """The state before the first step: copies of these examples, momentum zero."""
    if inputs.ndim < 2 or not inputs.is_floating_point() or not len(inputs):
        raise ValueError(
            f"inputs must be floats (n, ...) as a network sees them, got {inputs.dtype} {tuple(inputs.shape)}"
        )
    if not targets.ndim or len(inputs) != len(targets):
        raise ValueError(f"each input needs one target, got {len(inputs)} inputs and targets {tuple(targets.shape)}")
    if not bool(torch.isfinite(inputs).all()):
        raise ValueError("inputs must be finite, got NaN or infinity")
    memory = {"momentum": torch.zeros_like(inputs), **memory}
    return State(inputs.detach().clone(), targets.detach().clone(), seed, memory=memory)


def move(
    state: State,
    gradient: Tensor,
    *,
    lr: float,
    momentum: float,
    bounds: Bounds | None,
    lower: Mapping[str, float],
    **memory: Tensor,
) -> State:
    """The state after one step of SGD with momentum on the inputs; `memory` replaces what it names.

    `lower` names the settings that a user should lower, and what they are, if the step is not finite.
    """
    velocity = momentum * state.memory["momentum"] + gradient
    inputs = bounded(state.inputs - lr * velocity, bounds)
    if not all(bool(torch.isfinite(value).all()) for value in (inputs, *memory.values())):
        settings = " or ".join(f"{name} (now {value:g})" for name, value in lower.items())
        raise DivergedError(f"step {state.step} came to NaN or infinity: lower {settings}, and go on from before it")
    return replace(state, inputs=inputs, step=state.step + 1, memory=state.memory | {"momentum": velocity} | memory)


def flat_network(network: Network) -> FlatNetwork:
    """The network as a function of its parameters. What weights it was made with does not matter."""
    return FlatNetwork(fresh(network, torch.Generator().manual_seed(0)))


def segment(
    source: Source, flat: FlatNetwork, epochs: int, generator: torch.Generator, kind: int, like: Tensor
) -> list[Tensor]:
    """Two points of an expert's trajectory, checked against the network and of the inputs' type and device."""
    points = source.segment(epochs, generator, kind)
    for point in points:
        if point.shape != (flat.size,):
            raise ValueError(
                f"experts have {point.numel()} parameters and the network {flat.size}: "
                "pass the network that the experts were trained with, or train experts for this one"
            )
    return [point.detach().to(like) for point in points]


def noise(like: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    """Gaussian noise of this deviation, drawn on the CPU so that every device gets the same."""
    return scale * torch.randn(like.shape, generator=generator, dtype=like.dtype).to(like.device)


def figures(**values: float | Tensor) -> Info:
    """Figures of a step as plain numbers."""
    return {name: float(value) for name, value in values.items()}


def target_kind(targets: Tensor) -> str:
    """What `SyntheticCoreset` calls targets that cross-entropy takes as they are."""
    return "soft" if targets.is_floating_point() else "hard"


def check_settings(distiller: Any) -> None:
    """Settings of a dataclass: rates finite and not negative, counts at least 1, functions callable; errors name them."""
    for setting in fields(distiller):
        value = getattr(distiller, setting.name)
        kind, *optional = str(setting.type).split(" | ")
        if optional and value is None:
            continue
        if kind in ("int", "float"):
            check_number(setting.name, value, count=kind == "int")
        if setting.name in ("loss", "energy", "augmentation") and not callable(value):
            rule = f"a function{' or None' if optional else ''}, which only Python can say"
            raise ValueError(f"{setting.name} must be {rule}, got {value!r}")


def check_number(name: str, value: Any, *, count: bool) -> None:
    """A rate or scale must be finite and not negative, a count at least 1."""
    known = not isinstance(value, bool) and isinstance(value, int if count else (int, float))
    if not known or not int(count) <= value < float("inf"):
        rule = "an integer of at least 1" if count else "a finite number, 0 or more"
        raise ValueError(f"{name} must be {rule}, got {value!r}")
