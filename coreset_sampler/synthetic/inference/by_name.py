"""Inferences by name, with settings: what `evaluate` and the command line know them by."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..distillers.augment import augment
from .predict import INFERENCES, Inference
from .recipe import by_recipe

BY: dict[str, Callable[..., Inference]] = INFERENCES | {
    "recipe": by_recipe,
    "a-sgd": partial(INFERENCES["sgd"], augment=augment),
    "a-sghmc": partial(INFERENCES["sghmc"], augment=augment),
}


def inferences(
    by: Sequence[str] | Mapping[str, Inference] | None, settings: Mapping[str, Mapping[str, Any]]
) -> dict[str, Inference] | None:
    """Those asked for; None if none were, and each network has its own."""
    for name, values in settings.items():
        known = settings_of_inference(name)
        for unknown in (each for each in values if each not in known):
            raise ValueError(f"{name} has no setting {unknown!r}; it has {', '.join(known)}")
    if by is None or isinstance(by, Mapping):
        return None if by is None else dict(by)
    return {name: _look_up(name)(**settings.get(name, {})) for name in ((by,) if isinstance(by, str) else by)}


def default_inferences(home: bool, compared: bool, settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Inference]:
    """Inferences for a network where none were asked for: `recipe` away from home, and where sets are compared."""
    names = [*(("sgd", "last-layer") if home else ()), *(("recipe",) if compared or not home else ())]
    return {name: BY[name](**settings.get(name, {})) for name in names}


def settings_of_inference(name: str) -> list[str]:
    """The settings that an inference has."""
    parameters = inspect.signature(_look_up(name)).parameters
    return [key for key in parameters if key not in ("augment", "start", "report")]


def _look_up(name: str) -> Callable[..., Inference]:
    if name not in BY:
        raise ValueError(f"unknown inference {name!r}; known: {', '.join(BY)}")
    return BY[name]
