"""The settings that strategies share, checked once, when a strategy is made."""

from __future__ import annotations

import math
from typing import Any, get_args

from ..types import Balance

BALANCES = get_args(Balance)


def check_balance(balance: str) -> None:
    """Raises unless this is one of the ways to balance classes."""
    if balance not in BALANCES:
        raise ValueError(f"balance must be one of {BALANCES}, got {balance!r}")


def check_at_least(least: int, unit: str = "", /, **settings: int) -> None:
    """Raises if one of the settings is below `least`; `unit` says of what."""
    for name, value in settings.items():
        if value < least:
            raise ValueError(f"{name} must be at least {least}{unit}, got {value}")


def check_posterior(posterior: Any) -> None:
    """Raises unless draws can be asked of it."""
    if isinstance(posterior, type) or not hasattr(posterior, "draw"):
        raise TypeError(
            f'posterior must be one such as SphericalGaussian(0.1, "norm"), PointMass() or Trajectory(), got {posterior!r}'
        )


def check_exponent(**settings: float) -> None:
    """Raises unless the exponent of the label confidence is a number from 0 on."""
    for name, value in settings.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be 0 or more, 0 to trust all labels, got {value}")
