"""DATM (Guo et al. 2024): MTT's files with learned labels, logits `(n, classes)`, and `lr_best.pt`."""

from __future__ import annotations

from .mtt import ask_for, load_parts, load_rate, tag_of
from .published import Published
from .source import Source

name = "datm"
layout = "images_best.pt, labels_best.pt (float logits) and lr_best.pt of DATM"


def recognise(source: Source) -> bool:
    """True if the labels are one row of scores per image."""
    tag = tag_of(source)
    if tag is None:
        return False
    labels = load_parts(source.folder, "labels", tag)
    return labels.is_floating_point() and labels.ndim == 2


def read(source: Source) -> Published:
    """Images, logits and the learned learning rate; the preprocessing is not in the files."""
    tag = tag_of(source) or ""
    images, labels = load_parts(source.folder, "images", tag), load_parts(source.folder, "labels", tag)
    return Published(
        images,
        labels,
        "logits",
        ask=ask_for(source.path, images, "DATM and its relatives"),
        method="DATM",
        learning_rate=load_rate(source.folder / f"lr_{tag}.pt"),
        provenance={"file": source.path.name, "tag": tag},
    )
