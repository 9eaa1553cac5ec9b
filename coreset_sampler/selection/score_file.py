"""The file of a sampler's scores, as `CoresetSampler.save_scores` writes it and `coreset-sampler audit` reads it."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .labels import as_given
from .scores import ScoreStore
from .weighted import plain

FORMAT = "coreset_sampler.scores"
VERSION = 1
VECTORS = {
    "labels": torch.int64,
    "counts": torch.int32,
    "label_probability": torch.float32,
    "margin": torch.float32,
    "predicted": torch.int64,
    "predicted_probability": torch.float32,
    "chance_right": torch.float32,
}
"""The tensors `(n,)` that a file must have, and their types."""

_LONGEST_JSON = 16 << 20  # characters


@dataclass(frozen=True)
class Scores:
    """What the forward passes of a training run said of each of `n` examples.

    Args:
        labels: `(n,)` the classes that the run was told.
        counts: `(n,)` how often each example was seen. What was never seen has NaN below, and `predicted` -1.
        label_probability, margin: `(n,)` means over all visits, of the label's probability and of the label's logit
            less the largest other one.
        predicted, predicted_probability: `(n,)` the class that the model would give, and its mean probability.
        chance_right: `(n,)` the probability that the label is right.
        pred_probs: `(n, classes)` mean probabilities; None where the run had too many classes to keep them.
        classes: columns of the model's logits.
        class_names: one per class, or none.
        estimated_noise_rate: share of wrong labels by the run's noise model, None if it has none.
    """

    labels: Tensor
    counts: Tensor
    label_probability: Tensor
    margin: Tensor
    predicted: Tensor
    predicted_probability: Tensor
    chance_right: Tensor
    pred_probs: Tensor | None
    classes: int
    class_names: tuple[str, ...] = ()
    estimated_noise_rate: float | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def seen(self) -> Tensor:
        """`(n,)` bool: which examples have scores."""
        return (self.counts > 0) & ~self.chance_right.isnan()

    @property
    def probability_wrong(self) -> Tensor:
        """`(n,)` the probability that the label is wrong; NaN where never seen."""
        return 1 - self.chance_right


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
                places = list(range(len(names)))
                return list(names) if as_given(places, dataset) == places else None
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


def read_scores(path: str | os.PathLike[str]) -> Scores:
    """The scores in a file; nothing in it is executed, and whatever is wrong with it is a `ValueError`.

    Args:
        path: what `sampler.save_scores` wrote.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}; sampler.save_scores(path) writes one after training")
    if not path.is_file():
        raise ValueError(f"{path} must be a file of scores, and it is not an ordinary file")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = _checked_metadata(path, file.metadata() or {})
            names = set(file.keys())
            if missing := VECTORS.keys() - names:
                raise ValueError(f"{path} is damaged: it lacks {', '.join(sorted(missing))}")
            # copies, because safetensors maps the file, and a map dies with a file cut short later
            tensors = {name: file.get_tensor(name).clone() for name in names & {*VECTORS, "pred_probs"}}
    except SafetensorError as error:
        raise ValueError(f"{path} is foreign, truncated or damaged: no readable safetensors file ({error})") from error
    return _checked(path, tensors, metadata)


def _checked_metadata(path: Path, metadata: Mapping[str, str]) -> Mapping[str, str]:
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{path} is a safetensors file, but not one of scores: its format is {metadata.get('format', '')[:80]!r}, not "
            f"{FORMAT!r}. sampler.save_scores(path) writes one"
        )
    version = metadata.get("version", "")
    if not (version.isascii() and version.isdecimal() and len(version) < 9):
        raise ValueError(f"{path} is damaged: format version {version[:80]!r} is not a number")
    if int(version) > VERSION:
        raise ValueError(
            f"{path} is newer than this coreset_sampler: it has format version {version}, and versions up to {VERSION} "
            "can be read here. Upgrade: pip install -U coreset-sampler"
        )
    return metadata


def _checked(path: Path, tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> Scores:
    n, pred_probs = tensors["labels"].numel(), tensors.pop("pred_probs", None)
    for name, tensor in tensors.items():
        if tensor.shape != (n,) or tensor.dtype != VECTORS[name]:
            raise ValueError(
                f"{path} is damaged: {name} must be {VECTORS[name]} ({n},), it is {tensor.dtype} {tuple(tensor.shape)}"
            )
    if not n:
        raise ValueError(f"{path} has scores of no example")
    classes = int(_number(path, "classes", metadata.get("classes", "")) or 0)
    _check_classes(path, tensors["labels"], classes, lowest=0, what="labels")
    _check_classes(path, tensors["predicted"], classes, lowest=-1, what="predicted")
    for name in ("chance_right", "label_probability", "predicted_probability"):
        values = tensors[name].nan_to_num(0.0)
        if float(values.min()) < -1e-3 or float(values.max()) > 1 + 1e-3:
            raise ValueError(f"{path} is damaged: {name} must be in [0, 1] or NaN, it is outside at some examples")
        tensors[name] = tensors[name].clamp(0, 1)
    if pred_probs is not None and (pred_probs.shape != (n, classes) or pred_probs.dtype != torch.float32):
        found = f"{pred_probs.dtype} {tuple(pred_probs.shape)}"
        raise ValueError(f"{path} is damaged: pred_probs must be torch.float32 ({n}, {classes}), it is {found}")
    names, rate = metadata.get("class_names", ""), metadata.get("estimated_noise_rate", "")
    return Scores(
        **tensors,
        pred_probs=pred_probs,
        classes=classes,
        class_names=_names(path, names),
        estimated_noise_rate=_number(path, "estimated_noise_rate", rate),
    )


def _check_classes(path: Path, values: Tensor, classes: int, *, lowest: int, what: str) -> None:
    low, high = int(values.min()), int(values.max())
    if low < lowest or high >= classes:
        raise ValueError(
            f"{path} is damaged: {what} must be {lowest} to {classes - 1} for {classes} classes, they are {low} to {high}"
        )


def _number(path: Path, name: str, text: str) -> float | None:
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < 1e9:
        raise ValueError(f"{path} is damaged: {name} must be a number of 0 or more, it is {text[:80]!r}")
    return number


def _names(path: Path, text: str) -> tuple[str, ...]:
    if not text:
        return ()
    try:
        names = json.loads(text) if len(text) <= _LONGEST_JSON else None
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path} is damaged: class_names must be a JSON list of names, it is {text[:80]!r}")
    return tuple(names)
