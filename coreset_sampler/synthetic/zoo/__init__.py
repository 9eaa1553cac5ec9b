"""Coresets that ship with the package: `tools/make_zoo.py` made them, `index.json` says what each is and scores."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent


@lru_cache(maxsize=1)
def _entries() -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = json.loads((_HERE / "index.json").read_text(encoding="utf-8"))
    return entries


def index() -> dict[str, dict[str, Any]]:
    """What ships, by name: file, method, images per class, measured accuracy, licence of the data."""
    return dict(_entries())


def path(name: str) -> Path:
    """The file of a coreset that ships."""
    entries = _entries()
    if name not in entries:
        raise KeyError(f"no coreset called {name!r} ships with the package; known: {', '.join(sorted(entries))}")
    return _HERE / entries[name]["file"]
