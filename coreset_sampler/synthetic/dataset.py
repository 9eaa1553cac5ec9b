"""A few made-up examples to train on in place of many real ones, with all that training on them needs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from . import file as coreset_file
from .checks import (
    DESCRIBED,
    TargetKind,
    check_inputs,
    check_outputs,
    check_targets,
    check_tiles,
    check_views,
    kind_of,
    plain,
)
from .preprocessing import Preprocessing, from_state, packed, unpacked
from .tiles import unpack
from .untrusted import printable, reading

if TYPE_CHECKING:
    from .views import Views


class SyntheticCoreset(Dataset[tuple[Tensor, Tensor]]):
    """Distilled or picked examples as a dataset that knows how its inputs were preprocessed.

    `coreset[i]` gives an input and its target, `coreset.loss` is right for every kind of target. Test images, as pixels in
    [0, 1], go through `coreset.preprocessing` before they meet a model trained on the coreset.

    A stored image may give several examples (`tiles` or `views`): `coreset.stored` are the images as they are in the file,
    and everything that training reads, `coreset.inputs`, `len(coreset)` and `coreset[i]`, are the examples made of them.

    Args:
        inputs: what is stored, `(n, ...)`. Bytes (uint8) are pixels and come out as floats in [0, 1].
        targets: one row for each example, `(n,)` or `(n, num_classes)`; several for each stored image, one
            after the other, where it gives several examples.
        preprocessing: what was done to the pixels.
        target_kind: class numbers (`"hard"`), probabilities (`"soft"`), unscaled scores (`"logits"`) or values to fit by
            squared error (`"regression"`). Must be said for floats.
        class_names, num_classes: names in order; their number where there are no names.
        method, images_per_class: what made the set; how many, counted where targets are class numbers.
        learning_rate, last_layer: to train with; what a closed-form last layer needs (VBPC: rho, gamma, beta).
        provenance: how the set was made, in what JSON can hold.
        tiles: cut each stored image into `tiles` x `tiles` examples and enlarge each to the full size (`unpack`).
        views: move each stored image and mix it with others, so many times (`label_views` makes such sets).

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
        tiles: int = 1,
        views: Views | None = None,
    ) -> None:
        self.stored, self.targets, self.tiles, self.views = inputs.detach(), targets.detach(), tiles, views
        self.preprocessing = preprocessing
        self.target_kind: TargetKind = kind_of(self.targets) if target_kind is None else target_kind
        self.class_names = None if class_names is None else tuple(str(name) for name in class_names)
        num_classes, images_per_class = plain("num_classes", num_classes), plain("images_per_class", images_per_class)
        check_tiles(self.stored, tiles, preprocessing)
        if views is not None:
            check_views(self.stored, views.count, tiles, preprocessing)
        check_inputs(self.stored, self.targets, preprocessing, self.examples_per_image)
        self.num_classes = check_targets(self.targets, self.target_kind, self.class_names, num_classes)
        self.method = plain("method", method)
        self.images_per_class = _per_class(self) if images_per_class is None else images_per_class
        self.learning_rate = plain("learning_rate", learning_rate)
        self.last_layer = None if last_layer is None else {name: float(v) for name, v in last_layer.items()}
        self.provenance = _plain("provenance", {} if provenance is None else provenance)

    @property
    def examples_per_image(self) -> int:
        """How many examples each stored image gives."""
        return self.tiles**2 if self.views is None else self.views.count

    @cached_property
    def inputs(self) -> Tensor:
        """What training sees, `(examples, ...)`: what is stored, or the examples made of it at the first use."""
        if self.views is not None:
            return self.views(as_float(self.stored))
        return self.stored if self.tiles == 1 else unpack(as_float(self.stored), self.tiles)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return as_float(self.inputs[index]), self.targets[index]

    def __repr__(self) -> str:
        shape, method = " x ".join(map(str, self.stored.shape[1:])), printable(self.method or "unknown method")
        size = str(len(self)) if self.examples_per_image == 1 else self.size
        return f"SyntheticCoreset({size} of {shape}, {self.target_kind} targets, {method})"

    @property
    def size(self) -> str:
        """How much is stored and trained on, in words: `100 images`, or `100 images, 400 examples`."""
        stored = f"{len(self.stored)} {'image' if self.stored.ndim == 4 else 'example'}{'s' * (len(self.stored) != 1)}"
        return stored if self.examples_per_image == 1 else f"{stored}, {len(self)} examples"

    @property
    def info(self) -> dict[str, Any]:
        """All but the tensors, as plain values."""
        return {
            "size": len(self.stored),
            "examples": len(self),
            "tiles": self.tiles,
            "views": None if self.views is None else self.views.state(),
            "input_shape": list(self.stored.shape[1:]),
            "input_dtype": str(self.stored.dtype).removeprefix("torch."),
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

    def pixels(self, *, stored: bool = False) -> Tensor:
        """The examples in [0, 1], `(n, c, h, w)`, for looking at; or the images that are stored."""
        return self.preprocessing.look(self._images(stored))

    def exact_pixels(self, *, stored: bool = False) -> Tensor:
        """The examples before preprocessing, not clamped to [0, 1], for preprocessing them another way."""
        return self.preprocessing.invert(self._images(stored))

    def _images(self, stored: bool) -> Tensor:
        if self.stored.ndim != 4 or self.stored.shape[1] not in (1, 3):
            raise ValueError(f"only images (n, 1 or 3, h, w) have pixels, inputs are {tuple(self.stored.shape)}")
        return as_float(self.stored if stored else self.inputs)

    def loss(self, outputs: Tensor, targets: Tensor, *, reduction: str = "mean") -> Tensor:
        """The loss that the targets are meant for: cross-entropy, or squared error for regression targets.

        Plain cross-entropy takes logits for probabilities without complaint, which is why this exists.
        """
        check_outputs(self.target_kind, outputs, targets)
        if self.target_kind == "regression":
            each = functional.mse_loss(outputs, targets.to(outputs.dtype), reduction="none")
            each = each.flatten(1).mean(1) if each.ndim > 1 else each
            return each.mean() if reduction == "mean" else each.sum() if reduction == "sum" else each
        if self.target_kind == "logits":
            targets = targets.softmax(-1)
        targets = targets.to(outputs.dtype) if targets.is_floating_point() else targets.long()
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
        return SyntheticCoreset(self.stored, targets, preprocessing=self.preprocessing, **values)

    def describe(self) -> dict[str, Any]:
        """The keyword arguments that, with `stored`, targets and preprocessing, build this coreset again."""
        names = ("target_kind", "class_names", "num_classes", "method", "images_per_class", "learning_rate")
        return {name: getattr(self, name) for name in (*names, "last_layer", "provenance", "tiles", "views")}

    def equal(self, other: SyntheticCoreset) -> bool:
        """True if every bit of data and description is the same."""
        mine, mine_tensors = self.preprocessing.state()
        theirs, their_tensors = other.preprocessing.state()
        return (
            _same(self.stored, other.stored)
            and _same(self.targets, other.targets)
            and self.describe() == other.describe()
            and mine == theirs
            and mine_tensors.keys() == their_tensors.keys()
            and all(_same(tensor, their_tensors[name]) for name, tensor in mine_tensors.items())
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a `.safetensors` file, whole or not at all."""
        tensors, description = to_tensors(self)
        tensors["inputs"] = packed(self.stored.cpu(), self.preprocessing)
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
    named = {"inputs": coreset.stored, "targets": coreset.targets}
    named |= {f"preprocessing.{name}": tensor for name, tensor in tensors.items()}
    described = coreset.describe()
    if coreset.tiles == 1:
        del described["tiles"]  # such files are what they were before there were tiles
    views = described.pop("views")
    described |= {} if views is None else {"views": views.state()}
    description = described | {"classes": described.pop("class_names"), "preprocessing": values}
    return named, _plain("description", description)


def from_tensors(tensors: Mapping[str, Tensor], description: Mapping[str, Any]) -> SyntheticCoreset:
    """The coreset that `to_tensors` took apart."""
    prefix = "preprocessing."
    own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    values = dict(description)
    preprocessing = from_state(values.pop("preprocessing"), own)
    for name in DESCRIBED:
        plain(name, values.get(name))
    values["class_names"] = values.pop("classes", None)  # the file's word
    values["tiles"] = 1 if values.get("tiles") is None else values["tiles"]
    values["views"] = None if values.get("views") is None else _views(values["views"])
    inputs = unpacked(tensors["inputs"], preprocessing)
    return SyntheticCoreset(inputs, tensors["targets"], preprocessing=preprocessing, **values)


def _views(said: Mapping[str, Any]) -> Views:
    from .views import Views  # most sets have none

    return Views.from_state(said)


def load_coreset(name_or_path: str | os.PathLike[str]) -> SyntheticCoreset:
    """A coreset that ships with the package, by name, or one of our files, by path."""
    from . import zoo

    if isinstance(name_or_path, str) and name_or_path in zoo.index():
        return SyntheticCoreset.load(zoo.path(name_or_path))
    if not Path(name_or_path).exists():
        known = ", ".join(sorted(zoo.index()))
        raise FileNotFoundError(f"no file and no coreset is called {str(name_or_path)!r}. The package ships: {known}")
    return SyntheticCoreset.load(name_or_path)


def _per_class(coreset: SyntheticCoreset) -> int | None:
    if coreset.target_kind != "hard" or coreset.num_classes is None:
        return None
    # no bincount: a damaged label of 10^18 would ask for that much memory
    present, counts = coreset.targets.unique(return_counts=True)
    each = coreset.examples_per_image
    even = len(present) == coreset.num_classes and len(counts.unique()) == 1 and int(counts[0]) % each == 0
    return int(counts[0]) // each if even else None


def _plain(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The same through JSON, so that what is in memory is what a file gives back."""
    try:
        result: dict[str, Any] = json.loads(json.dumps(dict(values), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must hold only what JSON can (text, finite numbers, lists, dicts): {error}") from None
    return result


def as_float(inputs: Tensor) -> Tensor:
    """Bytes, which are pixels, as floats in [0, 1]; other inputs as they are."""
    return inputs.float() / 255 if inputs.dtype == torch.uint8 else inputs


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)
