"""Names and settings in words, the same in every run and process: what a saved state is compared by."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any


def describe(value: Any) -> str:
    """Name and settings of a strategy, or of a setting of one.

    What a function of one's own has closed over is not seen, nor what an object may change as it goes, nor a dataclass's
    fields that its `repr` leaves out.
    """
    if isinstance(value, partial):
        settings = [*map(describe, value.args), *(f"{k}={describe(v)}" for k, v in value.keywords.items())]
        return f"{describe(value.func)}({', '.join(settings)})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        frozen = type(value).__dataclass_params__.frozen  # type: ignore[attr-defined]
        fields = dataclasses.fields(value) if frozen else ()
        settings = [f"{field.name}={describe(getattr(value, field.name))}" for field in fields if field.repr]
        return f"{type(value).__qualname__}({', '.join(settings)})"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(describe, value))}]"
    return getattr(value, "__qualname__", type(value).__qualname__)
