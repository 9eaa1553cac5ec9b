"""The protocol of the readers, and what each hands back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from ..checks import TargetKind
from ..preprocessing import Preprocessing
from .source import Source

if TYPE_CHECKING:
    from ..views import Views


@dataclass(frozen=True)
class Published:
    """What a file says. `None` where it does not say; then `ask` tells the user what to pass instead."""

    inputs: Tensor
    targets: Tensor
    target_kind: TargetKind | None
    preprocessing: Preprocessing | None = None
    ask: str = ""
    method: str | None = None
    class_names: tuple[str, ...] | None = None
    num_classes: int | None = None
    images_per_class: int | None = None
    learning_rate: float | None = None
    last_layer: dict[str, float] | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    tiles: int = 1
    views: Views | None = None


class Reader(Protocol):
    """One published layout; each module of this folder named after a layout is one."""

    name: str
    layout: str
    recognise: Callable[[Source], bool]
    read: Callable[[Source], Published]
