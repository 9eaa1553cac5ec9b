"""A few made-up examples to train on in place of many real ones, with all that training on them needs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from . import file as coreset_file
from .preprocessing import Preprocessing, from_state
from .untrusted import printable, reading

TargetKind = Literal["hard", "soft", "logits", "regression"]

# What a file may say of these.
_DESCRIBED: dict[str, tuple[type, ...]] = {
    "classes": (list, tuple, type(None)),
    "num_classes": (int, type(None)),
    "method": (str, type(None)),
    "images_per_class": (int, type(None)),
    "learning_rate": (int, float, type(None)),
    "last_layer": (dict, type(None)),
    "provenance": (dict, type(None)),
}


class SyntheticCoreset(Dataset[tuple[Tensor, Tensor]]):
    """Distilled or picked examples as a dataset that knows how its inputs were preprocessed.

    `coreset[i]` gives an input and its target, `coreset.loss` is right for every kind of target. Test images, as pixels in
    [0, 1], go through `coreset.preprocessing` before they meet a model trained on the coreset.

    Args:
        inputs: `(n, ...)`. Bytes (uint8) are pixels and come out as floats in [0, 1].
        targets: `(n,)` or `(n, num_classes)`.
        preprocessing: what was done to the pixels.
        target_kind: class numbers (`"hard"`), probabilities (`"soft"`), unscaled scores (`"logits"`) or values to fit by
            squared error (`"regression"`). Must be said for floats.
        class_names, num_classes: names in order; their number where there are no names.
        method, images_per_class: what made the set; how many, counted where targets are class numbers.
        learning_rate, last_layer: to train with; what a closed-form last layer needs (VBPC: rho, gamma, beta).
        provenance: how the set was made, in what JSON can hold.

    Example:
        >>> coreset = load_coreset("digits/k-center-10")
        >>> loader = DataLoader(coreset, batch_size=32, shuffle=True)
        >>> loss = coreset.loss(model(x), y)
    """

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor,
        *,
        preprocessing: Preprocessing,
        target_kind: TargetKind | None = None,
        class_names: Sequence[str] | None = None,
        num_classes: int | None = None,
        method: str | None = None,
        images_per_class: int | None = None,
        learning_rate: float | None = None,
        last_layer: Mapping[str, float] | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        self.inputs, self.targets = inputs.detach(), targets.detach()
        self.preprocessing = preprocessing
        self.target_kind: TargetKind = _kind_of(self.targets) if target_kind is None else target_kind
        self.class_names = None if class_names is None else tuple(str(name) for name in class_names)
        _check_inputs(self.inputs, self.targets, preprocessing)
        self.num_classes = _check_targets(self.targets, self.target_kind, self.class_names, num_classes)
        self.method = method
        self.images_per_class = _per_class(self) if images_per_class is None else images_per_class
        self.learning_rate = learning_rate
        self.last_layer = None if last_layer is None else {name: float(v) for name, v in last_layer.items()}
        self.provenance = _plain("provenance", {} if provenance is None else provenance)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return _as_float(self.inputs[index]), self.targets[index]

    def __repr__(self) -> str:
        shape, method = " x ".join(map(str, self.inputs.shape[1:])), printable(self.method or "unknown method")
        return f"SyntheticCoreset({len(self)} of {shape}, {self.target_kind} targets, {method})"

    @property
    def info(self) -> dict[str, Any]:
        """All but the tensors, as plain values."""
        return {
            "size": len(self),
            "input_shape": list(self.inputs.shape[1:]),
            "input_dtype": str(self.inputs.dtype).removeprefix("torch."),
            "target_kind": self.target_kind,
            "num_classes": self.num_classes,
            "class_names": None if self.class_names is None else list(self.class_names),
            "images_per_class": self.images_per_class,
            "preprocessing": self.preprocessing.state()[0],
            "method": self.method,
            "learning_rate": self.learning_rate,
            "last_layer": self.last_layer,
            "provenance": self.provenance,
        }

    def pixels(self) -> Tensor:
        """The images in [0, 1], `(n, c, h, w)`, for looking at."""
        return self.preprocessing.look(_as_float(self._images()))

    def exact_pixels(self) -> Tensor:
        """The images before preprocessing, not clamped to [0, 1], for preprocessing them another way."""
        return self.preprocessing.invert(_as_float(self._images()))

    def _images(self) -> Tensor:
        if self.inputs.ndim != 4 or self.inputs.shape[1] not in (1, 3):
            raise ValueError(f"only images (n, 1 or 3, h, w) have pixels, inputs are {tuple(self.inputs.shape)}")
        return self.inputs

    def loss(self, outputs: Tensor, targets: Tensor, *, reduction: str = "mean") -> Tensor:
        """The loss that the targets are meant for: cross-entropy, or squared error for regression targets.

        Plain cross-entropy takes logits for probabilities without complaint, which is why this exists.
        """
        if self.target_kind == "regression":
            each = functional.mse_loss(outputs, targets.to(outputs.dtype), reduction="none").flatten(1).mean(1)
            return each.mean() if reduction == "mean" else each.sum() if reduction == "sum" else each
        if self.target_kind == "logits":
            targets = targets.softmax(-1)
        if self.target_kind != "hard":
            targets = targets.to(outputs.dtype)
        return functional.cross_entropy(outputs, targets, reduction=reduction)

    def with_targets(self, kind: Literal["hard", "soft"]) -> SyntheticCoreset:
        """The same examples with class numbers, or with probabilities, for losses that take nothing else."""
        if kind not in ("hard", "soft"):
            raise ValueError(f"kind must be 'hard' or 'soft', got {kind!r}")
        if self.target_kind == kind:
            return self
        if self.target_kind == "regression" and (kind == "soft" or self.targets.ndim != 2):
            raise ValueError("regression targets are no probabilities; use with_targets('hard') or coreset.loss")
        targets = self.targets
        if kind == "hard":
            targets = targets.argmax(-1)
        elif self.target_kind == "hard":
            targets = functional.one_hot(targets.long(), self.num_classes or -1).float()
        else:
            targets = targets.softmax(-1)
        values = self.describe() | {"target_kind": kind, "num_classes": self.num_classes}
        return SyntheticCoreset(self.inputs, targets, preprocessing=self.preprocessing, **values)

    def describe(self) -> dict[str, Any]:
        """The keyword arguments that, with inputs, targets and preprocessing, build this coreset again."""
        names = ("target_kind", "class_names", "num_classes", "method", "images_per_class", "learning_rate")
        return {name: getattr(self, name) for name in (*names, "last_layer", "provenance")}

    def equal(self, other: SyntheticCoreset) -> bool:
        """True if every bit of data and description is the same."""
        mine, mine_tensors = self.preprocessing.state()
        theirs, their_tensors = other.preprocessing.state()
        return (
            _same(self.inputs, other.inputs)
            and _same(self.targets, other.targets)
            and self.describe() == other.describe()
            and mine == theirs
            and mine_tensors.keys() == their_tensors.keys()
            and all(_same(tensor, their_tensors[name]) for name, tensor in mine_tensors.items())
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a `.safetensors` file, whole or not at all."""
        tensors, description = to_tensors(self)
        coreset_file.write(path, tensors, description)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SyntheticCoreset:
        """What `save` wrote; an error says whether a file is truncated, foreign or newer."""
        tensors, description = coreset_file.read(path)
        with reading(path, "holds no valid coreset"):
            return from_tensors(tensors, description)


def to_tensors(coreset: SyntheticCoreset) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A coreset as named tensors and a description in plain values: what files of all kinds store."""
    values, tensors = coreset.preprocessing.state()
    named = {"inputs": coreset.inputs, "targets": coreset.targets}
    named |= {f"preprocessing.{name}": tensor for name, tensor in tensors.items()}
    described = coreset.describe()
    description = described | {"classes": described.pop("class_names"), "preprocessing": values}
    return named, _plain("description", description)


def from_tensors(tensors: Mapping[str, Tensor], description: Mapping[str, Any]) -> SyntheticCoreset:
    """The coreset that `to_tensors` took apart."""
    prefix = "preprocessing."
    own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    values = dict(description)
    preprocessing = from_state(values.pop("preprocessing"), own)
    for name, kinds in _DESCRIBED.items():
        if not isinstance(values.get(name), kinds):
            raise ValueError(f"{name} is {str(values.get(name))[:80]!r}, a {type(values.get(name)).__name__}")
    values["class_names"] = values.pop("classes", None)  # the file's word
    return SyntheticCoreset(tensors["inputs"], tensors["targets"], preprocessing=preprocessing, **values)


def load_coreset(name_or_path: str | os.PathLike[str]) -> SyntheticCoreset:
    """A coreset that ships with the package, by name, or one of our files, by path."""
    from . import zoo

    if isinstance(name_or_path, str) and name_or_path in zoo.index():
        return SyntheticCoreset.load(zoo.path(name_or_path))
    if not Path(name_or_path).exists():
        known = ", ".join(sorted(zoo.index()))
        raise FileNotFoundError(f"no file and no coreset is called {str(name_or_path)!r}. The package ships: {known}")
    return SyntheticCoreset.load(name_or_path)


def _kind_of(targets: Tensor) -> TargetKind:
    if targets.is_floating_point():
        raise ValueError("target_kind must be said for float targets: 'soft', 'logits' or 'regression'")
    return "hard"


def _check_inputs(inputs: Tensor, targets: Tensor, preprocessing: Preprocessing) -> None:
    if inputs.ndim < 2 or len(inputs) == 0:
        raise ValueError(f"inputs must hold at least one example, (n, ...), got shape {tuple(inputs.shape)}")
    if targets.ndim == 0 or len(inputs) != len(targets):
        raise ValueError(f"each input needs one target, got {len(inputs)} inputs and targets {tuple(targets.shape)}")
    if inputs.dtype == torch.uint8 and preprocessing.kind != "raw":
        raise ValueError(f"bytes are raw pixels: pass preprocessing=Raw(), or floats already {preprocessing.kind}d")
    if inputs.is_complex() or inputs.dtype == torch.bool:
        raise ValueError(f"inputs must be floats, integers or bytes, got {inputs.dtype}")
    if inputs.is_floating_point() and not bool(torch.isfinite(inputs).all()):
        where = (~torch.isfinite(inputs.flatten(1)).all(1)).nonzero().flatten().tolist()
        raise ValueError(f"inputs must be finite; NaN or infinity in {len(where)} example(s), first {where[0]}")


def _check_targets(
    targets: Tensor, kind: TargetKind, class_names: tuple[str, ...] | None, num_classes: int | None
) -> int | None:
    """The number of classes, None where there are none."""
    if kind not in get_args(TargetKind):
        raise ValueError(f"target_kind must be one of {', '.join(get_args(TargetKind))}, got {kind!r}")
    if class_names is not None and num_classes not in (None, len(class_names)):
        raise ValueError(f"num_classes must be the number of class names, {len(class_names)}, got {num_classes}")
    known = len(class_names) if class_names is not None else num_classes
    if kind == "hard":
        if targets.ndim != 1 or targets.is_floating_point() or targets.dtype == torch.bool:
            raise ValueError(f"hard targets must be integers (n,), got {targets.dtype} {tuple(targets.shape)}")
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or (known is not None and high >= known):
            raise ValueError(f"hard targets must be classes 0..{'' if known is None else known - 1}, got {low}..{high}")
        return high + 1 if known is None else known
    if not targets.is_floating_point() or not bool(torch.isfinite(targets).all()):
        raise ValueError(f"{kind} targets must be finite floats, got {targets.dtype}")
    if kind == "regression" and (targets.ndim != 2 or known is None):
        return known
    if targets.ndim != 2 or (known is not None and targets.shape[1] != known):
        raise ValueError(f"{kind} targets must be (n, {known or 'num_classes'}), got {tuple(targets.shape)}")
    if kind == "soft" and not on_simplex(targets):
        raise ValueError(
            "soft targets must be probabilities, each row summing to 1; for scores say target_kind='logits'"
        )
    return targets.shape[1]


def on_simplex(targets: Tensor) -> bool:
    """True if every row is a probability vector, up to rounding."""
    rows = targets.double()
    return bool((rows >= -1e-6).all()) and bool(((rows.sum(1) - 1).abs() < 1e-3).all())


def _per_class(coreset: SyntheticCoreset) -> int | None:
    if coreset.target_kind != "hard" or coreset.num_classes is None:
        return None
    # no bincount: a damaged label of 10^18 would ask for that much memory
    present, counts = coreset.targets.unique(return_counts=True)
    return int(counts[0]) if len(present) == coreset.num_classes and len(counts.unique()) == 1 else None


def _plain(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The same through JSON, so that what is in memory is what a file gives back."""
    try:
        result: dict[str, Any] = json.loads(json.dumps(dict(values), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must hold only what JSON can (text, finite numbers, lists, dicts): {error}") from None
    return result


def _as_float(inputs: Tensor) -> Tensor:
    return inputs.float() / 255 if inputs.dtype == torch.uint8 else inputs


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)
