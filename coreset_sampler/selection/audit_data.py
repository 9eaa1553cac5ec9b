"""The examples behind scores: pictures or text of a folder that `datasets.load_dataset` opens, or the digits."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..extras import need

_SIDE = 160  # pixels of the longer side of a picture on the page
_LONGEST_TEXT = 2000  # characters of a text on the page
_LABELS = ("label", "labels", "fine_label")


@dataclass(frozen=True)
class Shown:
    """One example on a page: a PNG as data URI and its longer side, texts by the names of their columns, or a problem."""

    picture: str = ""
    side: int = 0
    texts: tuple[tuple[str, str], ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class Examples:
    """The rows of a split. `show(index)` reads one; nothing is read before.

    Args:
        name: of the data set.
        n: number of rows.
        labels: `(n,)` their classes, None where the data have no whole numbers as labels.
        class_names: one per class, or none.
    """

    name: str
    n: int
    labels: Tensor | None
    show: Callable[[int], Shown] = field(repr=False)
    class_names: tuple[str, ...] = ()


def open_examples(data: str | os.PathLike[str], split: str = "train") -> Examples:
    """The examples of a data set, to be shown one by one.

    Args:
        data: a folder (or hub id) that `datasets.load_dataset` opens, a folder that `save_to_disk` wrote, or `"digits"`,
            all 1,797 of scikit-learn in its order.
        split: which part.
    """
    if data == "digits":
        return _digits(split)
    folder = os.fspath(data)
    rows = _rows(folder, split)
    label = _label_column(rows.features)
    pictures = [name for name, feature in rows.features.items() if type(feature).__name__ == "Image"]
    texts = [name for name, feature in rows.features.items() if name != label and _is_text(feature)]
    if not pictures and not texts:
        raise ValueError(
            f"--data must have a column of images or of text to show, {folder} has {list(rows.features)}. Without --data "
            "the page has indices only"
        )
    shown = rows.select_columns(pictures[:1] or texts)

    def show(index: int) -> Shown:
        try:
            row = shown[index]
            return _png(row[pictures[0]]) if pictures else Shown(texts=_texts(row))
        except (OSError, ValueError, SyntaxError) as error:  # of a picture that is broken, which an audit should show
            return Shown(problem=f"cannot be read: {error}")

    names = tuple(getattr(rows.features.get(label), "names", None) or ())
    return Examples(Path(folder).name, len(rows), _labels(rows, label), show, names)


def _rows(folder: str, split: str) -> Any:
    """The split, as `datasets` opens it."""
    datasets = need("datasets", extra="huggingface", what="examples of a folder")
    if Path(folder).exists() and not (Path(folder).is_dir() and any(Path(folder).iterdir())):
        raise ValueError(f"--data must be a folder of data, {folder} is a file or empty")
    saved = any((Path(folder) / name).is_file() for name in ("state.json", "dataset_dict.json"))
    loaded = datasets.load_from_disk(folder) if saved else datasets.load_dataset(folder)
    if not isinstance(loaded, dict):  # one split, saved alone
        return loaded.with_format(None)
    if split not in loaded:
        raise ValueError(f"--split must be one of {list(loaded)} in {folder}, got {split!r}")
    return loaded[split].with_format(None)


def _label_column(features: Any) -> str | None:
    named = [name for name, feature in features.items() if type(feature).__name__ == "ClassLabel"]
    found = named or [name for name in features if name in _LABELS]
    return next((name for name in _LABELS if name in found), next(iter(found), None))


def _labels(rows: Any, column: str | None) -> Tensor | None:
    if column is None:
        return None
    values = np.asarray(rows.select_columns(column)[:][column])  # no other column is read or decoded
    return torch.from_numpy(values.astype(np.int64)) if values.dtype.kind in "iu" and values.ndim == 1 else None


def _is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", None) in ("string", "large_string") and type(feature).__name__ == "Value"


def _texts(row: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    texts = ((name, "" if text is None else str(text)) for name, text in row.items())
    return tuple((name, text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]} …") for name, text in texts)


def _png(image: Any) -> Shown:
    """A PIL image as a data URI, made small."""
    if image is None:
        raise ValueError("there is no picture")
    if image.mode.startswith(("I", "F")):  # deep greys, which PNG or the conversion would cut off
        image = _grey(np.asarray(image, dtype=np.float64))
    elif image.mode not in ("L", "RGB", "RGBA"):
        image = image.convert("RGBA" if "transparency" in image.info or image.mode in ("LA", "PA") else "RGB")
    image.thumbnail((_SIDE, _SIDE))
    content = io.BytesIO()
    image.save(content, "PNG", optimize=True)
    uri = f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"
    return Shown(picture=uri, side=max(image.size))


def _grey(values: np.ndarray[Any, Any]) -> Any:
    """An image of any numbers `(h, w)`, from black at the lowest to white at the highest."""
    pictures = need("PIL.Image", extra="formats", what="pictures")
    low, high = float(values.min()), float(values.max())
    return pictures.fromarray(((values - low) * (255 / max(high - low, 1e-12))).round().astype(np.uint8))


def _digits(split: str) -> Examples:
    if split != "train":
        raise ValueError(f"--split must be left out for digits, which are all in one, got {split!r}")
    loaded = need("sklearn.datasets", extra="demo", what="digits").load_digits()

    def show(index: int) -> Shown:
        return _png(_grey(loaded.images[index]))

    labels = torch.from_numpy(loaded.target).long()
    return Examples("digits", len(labels), labels, show, tuple(str(digit) for digit in range(10)))
