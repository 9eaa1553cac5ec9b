"""Readers of the distilled sets that others published, one file per layout."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..checks import TargetKind
from ..dataset import SyntheticCoreset
from ..preprocessing import Preprocessing
from ..untrusted import CoresetFileError, reading
from . import datm, dc, ddranking, frepo, hf_dataset, image_folder, kip, mtt, plain, rded, sre2l
from .experts import is_buffer, read_experts
from .published import Published, Reader
from .source import Source

__all__ = ["READERS", "PreprocessingUnknownError", "Published", "Reader", "read_experts", "read_published"]

# In the order of asking: the particular before the general.
READERS: dict[str, Reader] = {
    reader.name: reader
    for reader in (dc, mtt, datm, ddranking, kip, frepo, sre2l, rded, hf_dataset, image_folder, plain)
}


class PreprocessingUnknownError(CoresetFileError):
    """The files do not say how their inputs were preprocessed; the message has the call to write."""


def read_published(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    preprocessing: Preprocessing | None = None,
    target_kind: TargetKind | None = None,
    class_names: Sequence[str] | None = None,
) -> SyntheticCoreset:
    """A distilled set as its makers saved it: the layout is recognised, or named by `format`.

    What the files do not say is asked for by an error with the call to write, never guessed. Nothing but
    tensors, numbers and plain containers is unpickled.

    Args:
        path: file or folder.
        format: the layout, one of `READERS`, if it is not recognised.
        preprocessing: what was done to the pixels, where the files do not say.
        target_kind: `"hard"`, `"soft"`, `"logits"` or `"regression"`, where the files do not say.
        class_names: in order.

    Example:
        >>> coreset = read_published("res_DC_CIFAR10_ConvNet_10ipc.pt")
        >>> coreset = read_published("logs/run", preprocessing=ZCA.fit(train_pixels, convention="A"))
    """
    source = Source(Path(path))
    if format is not None and format not in READERS:
        raise ValueError(f"format must be one of {', '.join(READERS)}, got {format!r}")
    with reading(path):
        published = _reader(source, format).read(source)
    kind = target_kind or published.target_kind
    if kind is None:
        raise CoresetFileError(
            f"{path} has float targets that are no probabilities: are they logits or values to fit? Write\n"
            f"    read_published({str(path)!r}, target_kind='logits')  # or 'regression'"
        )
    if preprocessing is None and published.preprocessing is None:
        raise PreprocessingUnknownError(f"{path} does not say how its inputs were preprocessed. {published.ask}")
    if preprocessing is not None:
        told = {key: value for key, value in published.provenance.items() if key != "preprocessing_from"}
        published = replace(
            published, preprocessing=preprocessing, provenance=told | {"preprocessing_from": "the reader"}
        )
    return _coreset(path, published, kind, class_names)


def _reader(source: Source, format: str | None) -> Reader:
    if format is not None:
        if not READERS[format].recognise(source):
            raise CoresetFileError(f"{source.path} is not {READERS[format].layout}; it is {source.describe()}")
        return READERS[format]
    for reader in READERS.values():
        if reader.recognise(source):
            return reader
    if is_buffer(source.content):
        raise CoresetFileError(f"{source.path} holds expert trajectories, no coreset: use read_experts")
    known = "\n".join(f"    {reader.name:12} {reader.layout}" for reader in READERS.values())
    raise CoresetFileError(
        f"{source.path} has none of the layouts known here, it is {source.describe()}. Known:\n{known}"
    )


def _coreset(
    path: str | os.PathLike[str], published: Published, kind: TargetKind, class_names: Sequence[str] | None
) -> SyntheticCoreset:
    assert published.preprocessing is not None
    with reading(path, "cannot be used"):
        coreset = SyntheticCoreset(
            published.inputs,
            published.targets,
            preprocessing=published.preprocessing,
            target_kind=kind,
            class_names=class_names if class_names is not None else published.class_names,
            num_classes=None if class_names is not None else published.num_classes,
            method=published.method,
            images_per_class=published.images_per_class,
            learning_rate=published.learning_rate,
            last_layer=published.last_layer,
            provenance=published.provenance,
            tiles=published.tiles,
            views=published.views,
        )
        if coreset.stored.ndim == 4:
            published.preprocessing(coreset.stored[:1])  # it must fit the images
        return coreset
