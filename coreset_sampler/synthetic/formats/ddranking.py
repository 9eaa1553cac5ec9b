"""DD-Ranking (Li et al. 2024): a folder with `images.pt`, `labels.pt` and perhaps `lr.pt`."""

from __future__ import annotations

from torch import Tensor

from ..untrusted import CoresetFileError, inside
from .mtt import ask_for, load_rate
from .plain import kind_of
from .published import Published
from .source import Source, load

name = "ddranking"
layout = "images.pt, labels.pt and lr.pt of DD-Ranking; its folders of images are read as 'images'"


def recognise(source: Source) -> bool:
    """True if both files are there."""
    here = source.path.is_dir() or source.path.name == "images.pt"
    return here and all((source.folder / f"{part}.pt").is_file() for part in ("images", "labels"))


def read(source: Source) -> Published:
    """Float labels are probabilities if each row is one, else logits, as DD-Ranking's own loss takes them."""
    images, labels = (load(inside(source.folder, f"{part}.pt")) for part in ("images", "labels"))
    if not isinstance(images, Tensor) or not isinstance(labels, Tensor):
        raise CoresetFileError(f"{source.folder} must hold one tensor each in images.pt and labels.pt")
    return Published(
        images,
        labels if labels.is_floating_point() else labels.long(),
        kind_of(labels) or "logits",
        ask=ask_for(source.path, images, "The methods collected in DD-Ranking"),
        learning_rate=load_rate(source.folder / "lr.pt"),
        provenance={"folder": source.folder.name, "target_kind_from": "the values of labels.pt"},
    )
