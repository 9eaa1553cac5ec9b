"""The file of a sampler's scores: .safetensors that `coreset-sampler audit` reads."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from .saved_scores import FORMAT, VERSION
from .scores import ScoreStore
from .weighted import plain


def save_scores(store: ScoreStore, path: str | os.PathLike[str], dataset: Any, noise_rate: float | None) -> None:
    """Writes beside the target, then renames: readers see the old file or the new, never half.

    Args:
        store: what was observed.
        path: of the file.
        dataset: asked for the names of its classes.
        noise_rate: estimated share of wrong labels, if the strategy can tell.
    """
    from .suspects import chance_right

    tensors: dict[str, Tensor] = {
        "labels": store.labels,
        "counts": store.counts,
        "label_probability": store.label_probability,
        "margin": store.margin,
        "predicted": store.predicted,
        "predicted_probability": store.predicted_probability,
        "chance_right": chance_right(store).float(),
    }
    if not store.projected:
        tensors["pred_probs"] = store.probabilities()
    names = class_names(dataset)
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "classes": str(store.classes),
        "class_names": "" if names is None else json.dumps(names),
        "estimated_noise_rate": "" if noise_rate is None else repr(float(noise_rate)),
    }
    _replace(Path(path), safetensors.torch.save({key: value.contiguous() for key, value in tensors.items()}, metadata))


def class_names(dataset: Any) -> list[str] | None:
    """The names of the classes, of a data set of torchvision or Hugging Face, or inside of `Subset` and the like."""
    dataset = plain(dataset)
    while dataset is not None:
        features = getattr(dataset, "features", None)
        label = next((features[key] for key in ("labels", "label") if key in features), None) if features else None
        for names in (getattr(dataset, "classes", None), getattr(label, "names", None)):
            if isinstance(names, (list, tuple)) and names and all(isinstance(name, str) for name in names):
                return list(names)
        dataset = getattr(dataset, "dataset", None)
    return None


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno:  # which names the temporary file, or none
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
