"""A network trained on all real images, whose probabilities are the labels that a coreset's targets begin with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from ...layers import devices_of
from ...randomness import seeded
from ..networks import Network, fresh
from ..per_image import changed
from .real_data import RealData

_LINES = 25  # about training, at most


@dataclass(frozen=True)
class Teacher:
    """How to train one: AdamW along one cycle, images shifted and mirrored, bf16.

    Args:
        network: its kind, as `networks` names them.
        epochs, lr, batch: of its training.
        mirror: mirrored images keep their class.
    """

    network: str = "convnet-batch:32-64-128"
    epochs: int = 6
    lr: float = 4e-3
    batch: int = 128
    mirror: bool = True

    def __post_init__(self) -> None:
        kinds: dict[str, tuple[Any, str]] = {"network": (str, "text"), "mirror": (bool, "True or False")}
        kinds |= {"epochs": (int, "a whole number"), "batch": (int, "a whole number"), "lr": ((int, float), "a number")}
        for name, (kind, wanted) in kinds.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
                raise ValueError(f"{name} of the teacher must be {wanted}, got {value!r}")
        for name in ("epochs", "lr", "batch"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} of the teacher must be positive, got {getattr(self, name)}")


def train_teacher(
    plan: Teacher, make: Network, data: RealData, *, seed: int = 0, report: Callable[[str], None] | None = None
) -> nn.Module:
    """A network of this maker trained on all of `data`, in evaluation mode. The same seed gives the same."""
    generator = Generator().manual_seed(seed)
    model = fresh(make, generator).to(data.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), plan.lr, weight_decay=0.02)
    steps = plan.epochs * -(-data.n // plan.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, plan.lr, total_steps=steps)
    changes = ("shift", "flip") if plan.mirror else ("shift",)
    with seeded(seed, devices_of(model)), torch.enable_grad():  # dropout
        for epoch in range(plan.epochs):
            right = 0
            for inputs, targets in data.epoch(plan.batch, generator):
                outputs = _half(model, changed(inputs, changes, generator))
                optimizer.zero_grad(set_to_none=True)
                loss = functional.cross_entropy(outputs, targets)
                loss.backward()
                optimizer.step()
                schedule.step()
                right += int((outputs.argmax(1) == (targets.argmax(1) if targets.ndim == 2 else targets)).sum())
            if not math.isfinite(float(loss.detach())):
                raise ValueError(
                    f"the teacher's loss became {float(loss.detach())}: lower its lr, which is {plan.lr:g}"
                )
            if report is not None and (plan.epochs <= _LINES or (epoch + 1) * _LINES % plan.epochs < _LINES):
                report(f"teacher, epoch {epoch + 1} of {plan.epochs}: accuracy {right / data.n:.1%} in training")
    return model.eval()


@torch.no_grad()
def taught(plan: Teacher, model: nn.Module, inputs: Tensor) -> Tensor:
    """The teacher's probabilities `(n, k)`, by the mean of its scores for an image and its mirror image."""
    scores = [
        (_half(model, part) + _half(model, part.flip(-1))) / 2 if plan.mirror else _half(model, part)
        for part in inputs.split(250)
    ]
    return torch.cat(scores).softmax(-1)


def _half(model: nn.Module, inputs: Tensor) -> Tensor:
    with torch.autocast(inputs.device.type, torch.bfloat16):
        outputs: Tensor = model(inputs)
    return outputs.float()
