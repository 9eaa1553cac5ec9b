"""The papers' settings by method, data set and images per class, and shorter ones for a CPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from . import variational_presets

METHODS = {
    "rkl": "reverse_kl",
    "w": "wasserstein",
    "fkl": "forward_kl",
    "cd": "contrastive_divergence",
    "vbpc": "variational",
}
"""What the command line calls them."""


@dataclass(frozen=True)
class Preset:
    """How to make a coreset: the distiller's settings, the experts it needs and how long to go on."""

    steps: int
    settings: dict[str, Any] = field(default_factory=dict)
    max_start: int | None = None
    experts: int = 0
    epochs: int = 0
    examples: int | None = None
    """Real examples that experts train on; all if not said."""
    expert_rate: float = 0.01
    expert_batch: int = 256
    widths: tuple[int, ...] | None = None
    """Of the ConvNet; 128 in every block if not said."""


# Kim et al. 2022, table 2, and the released code for pixels (lr 1000, momentum 0.5; plain steps for reverse KL).
_LONG = {
    "reverse_kl": {"samples": 10, "noise": 0.01, "batch": 1000, "lr": 1000.0, "momentum": 0.0},
    "wasserstein": {"epochs": 2, "inner_rate": 0.01, "lr": 1000.0, "momentum": 0.5},
    "forward_kl": {"epochs": 1, "samples": 30, "noise": 0.01, "lr": 1000.0, "momentum": 0.5},
    "contrastive_divergence": {"epochs": 2, "inner_steps": 10, "inner_rate": 0.03, "momentum": 0.5},
}
_BY_SIZE = {  # images per class: max_start, inner_steps, inner_rate, inner_rate_lr
    1: (2, 50, 0.01, 1e-7),
    10: (20, 30, 0.03, 1e-5),
    20: (30, 30, 0.03, 1e-5),
}
# Tiwary et al. 2024: pixel learning rates at 1, 10 and 50 images per class.
_CD_LR = {
    "mnist": (1000.0, 1.0, 1.0),
    "fashion-mnist": (1.0, 1.0, 1.0),
    "svhn": (10.0, 1.0, 1.0),
    "cifar10": (1.0, 1000.0, 1000.0),
}

# For a ConvNet of widths 16, 32, 64 on Fashion-MNIST; two to four settings of reverse KL and Wasserstein were compared on
# held-out images after 50 steps, the other rates are such that early steps move the coreset by a twentieth of its norm.
_SHORT: dict[str, dict[str, Any]] = {
    "reverse_kl": {"inner_steps": 10, "inner_rate": 0.03, "samples": 10, "batch": 256},
    "wasserstein": {"inner_steps": 10, "inner_rate": 0.03, "epochs": 1, "inner_rate_lr": 1e-6},
    "forward_kl": {"inner_steps": 10, "inner_rate": 0.03, "epochs": 1, "samples": 5},
    "contrastive_divergence": {"inner_steps": 10, "inner_rate": 0.03, "epochs": 1},
}
_SHORT_BY_SIZE: dict[str, tuple[tuple[int, float], tuple[int, float]]] = {
    # steps and lr, below 10 images per class and from there on
    "reverse_kl": ((100, 3000.0), (40, 3000.0)),
    "wasserstein": ((200, 300.0), (40, 1000.0)),
    "forward_kl": ((200, 100.0), (100, 500.0)),
    "contrastive_divergence": ((300, 100.0), (150, 500.0)),
}


def paper(method: str, data: str, images_per_class: int) -> Preset:
    """What the method's paper used; between the sizes that it has, the next smaller one's."""
    _check(method, images_per_class)
    if method == "variational":
        return Preset(steps=100_000)  # it does not say its settings; a long run with the defaults
    row = max((size for size in _BY_SIZE if size <= images_per_class), default=1)
    max_start, inner_steps, inner_rate, inner_rate_lr = _BY_SIZE[row]
    settings = dict(_LONG[method])
    if method in ("reverse_kl", "forward_kl"):
        settings |= {"inner_steps": inner_steps, "inner_rate": inner_rate}
    if method == "wasserstein":
        settings |= {"inner_steps": inner_steps, "inner_rate_lr": inner_rate_lr}
    if method == "contrastive_divergence":
        rates = _CD_LR.get(data, (1.0, 1.0, 1.0))
        settings["lr"] = rates[(images_per_class >= 10) + (images_per_class >= 50)]
    return Preset(5000, settings, max_start, experts=100, epochs=50)


def cpu(method: str, data: str, images_per_class: int) -> Preset:
    """Minutes instead of hours: few and short experts on a part of the data, short unrolls, fewer samples."""
    _check(method, images_per_class)
    if method == "variational":
        own = variational_presets.preset(data, images_per_class)
        return Preset(own.steps, dict(own.settings), widths=own.widths)
    steps, lr = _SHORT_BY_SIZE[method][images_per_class >= 10]
    return Preset(
        steps,
        _SHORT[method] | {"lr": lr},
        max_start=4,
        experts=6,
        epochs=8,
        examples=10_000,
        expert_rate=0.03,
        expert_batch=64,
        widths=(16, 32, 64),
    )


PRESETS = {"paper": paper, "cpu": cpu}


def _check(method: str, images_per_class: int) -> None:
    if method not in METHODS.values():
        raise ValueError(f"unknown method {method!r}; known: {', '.join(METHODS.values())}")
    if images_per_class < 1:
        raise ValueError(f"images per class must be at least 1, got {images_per_class}")
