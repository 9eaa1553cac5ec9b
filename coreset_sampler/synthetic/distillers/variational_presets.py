"""Settings for VBPC on a CPU, by data set and images per class, chosen on training images (docs/cards/variational.md)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..networks import Network, convnet
from .variational import Variational


@dataclass(frozen=True)
class VariationalPreset:
    """Widths of the ConvNet, steps in all, and settings that differ from the defaults of `Variational`."""

    widths: tuple[int, ...]
    steps: int
    settings: dict[str, Any] = field(default_factory=dict)

    def network(self, channels: int, classes: int, size: int) -> Network:
        """The network for images of this kind."""
        return partial(convnet, channels, classes, size, widths=self.widths)

    def build(self, network: Network, *, compiled: bool = False) -> Variational:
        """The distiller; its rates fall over all the steps."""
        return Variational(network, decay=self.steps, compiled=compiled, **self.settings)


# Short lives: in a few thousand steps networks that live long are few, and images come to fit those few.
_SHORT_LIVES = {"max_age": 30, "fit_steps": 30}
_TEN = _SHORT_LIVES | {"lr": 0.03, "label_lr": 0.03}

PRESETS: dict[tuple[str, int], VariationalPreset] = {
    ("digits", 1): VariationalPreset((32, 64), 3000, _SHORT_LIVES | {"batch": 64}),
    ("digits", 10): VariationalPreset((32, 64), 2000, _TEN),
    ("fashion-mnist", 1): VariationalPreset((32, 64, 128), 4000, _SHORT_LIVES | {"batch": 64}),
    ("fashion-mnist", 10): VariationalPreset((32, 64, 128), 5000, _TEN | {"max_age": 100, "train_every": 3}),
    ("cifar10", 10): VariationalPreset((32, 64, 128), 3200, _TEN),
}


def preset(data: str, images_per_class: int) -> VariationalPreset:
    """What is known for this data set, or for the nearest kind: the most images per class that are no more than asked."""
    known = [(name, count) for name, count in PRESETS if name == data] or [("fashion-mnist", 1), ("fashion-mnist", 10)]
    fitting = [key for key in known if key[1] <= images_per_class] or known[:1]
    return PRESETS[max(fitting, key=lambda key: key[1])]
