"""Adam (Kingma and Ba 2015) whose moments are tensors by name, so that a state can be saved and given back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def begin(name: str, value: Tensor) -> dict[str, Tensor]:
    """The moments before the first step."""
    return {f"{name}.mean": torch.zeros_like(value), f"{name}.square": torch.zeros_like(value)}


def move(
    name: str,
    value: Tensor,
    gradient: Tensor,
    memory: Mapping[str, Tensor],
    *,
    lr: float,
    count: int,
    betas: tuple[float, float] = (0.9, 0.999),
) -> tuple[Tensor, dict[str, Tensor]]:
    """The value after its step number `count`, from 1 on, and the new moments. Nothing given is changed."""
    mean = torch.lerp(memory[f"{name}.mean"], gradient, 1 - betas[0])
    square = (memory[f"{name}.square"] * betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    scale = (square / (1 - betas[1] ** count)).sqrt_().add_(1e-8)
    moved = value.addcdiv(mean, scale, value=-lr / (1 - betas[0] ** count))
    return moved, {f"{name}.mean": mean, f"{name}.square": square}
