"""Optional packages, asked for only where a layout needs them."""

from __future__ import annotations

import importlib
from typing import Any


def need(module: str, *, extra: str, what: str) -> Any:
    """The module, or an error that says which extra brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{what} need {module.split('.')[0]}: pip install 'coreset-sampler[{extra}]'") from error
