"""`label_views`: a set whose images come in many views, each with the probabilities that a trained model gives it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..layers import back_through_train
from ..randomness import check_default_device
from .checks import check_views
from .dataset import SyntheticCoreset
from .fitting import as_taken_by, logits_of
from .views import Views, keep_class_mirrored

_AT_ONCE = 250  # views whose activations are in memory together


def label_views(
    coreset: SyntheticCoreset, model: nn.Module, views: int | Views = 64, *, temperature: float = 1.0
) -> SyntheticCoreset:
    """The same images, each in many views that a trained model has labelled.

    A network trained on the set then learns what the model says of mixtures of its images, thousands of labels where there
    was one for each image. Works for images of any origin: real, learned, or published by others.

    Args:
        coreset: images `(n, c, h, w)`; its own targets are replaced.
        model: a classifier trained on real data, which takes the coreset's inputs as they are. It is left as it was.
        views: how many of each image, or which. A plain number mirrors images, unless their class names are single
            characters.
        temperature: that the model's logits are divided by: above 1 makes labels softer.

    Returns:
        A coreset with `n * views` examples and probabilities for targets; a file holds the images and the labels.

    Example:
        >>> taught = label_views(coreset, teacher, views=64)
        >>> fit(new_network, taught)
    """
    check_default_device()
    check_temperature(temperature)
    if coreset.tiles > 1:
        raise ValueError(f"coreset must have one example per image, got {coreset.size}; pass the images it was made of")
    made = views if isinstance(views, Views) else Views(views, mirror=keep_class_mirrored(coreset.class_names))
    check_views(coreset.stored, made.count, 1, coreset.preprocessing)
    images = coreset.stored.float() / 255 if coreset.stored.dtype == torch.uint8 else coreset.stored
    targets = _probabilities(model, made.parts(images, _AT_ONCE), temperature)
    if coreset.num_classes not in (None, targets.shape[1]):
        raise ValueError(
            f"model must know the coreset's {coreset.num_classes} classes, it gives {targets.shape[1]} numbers"
        )
    about = coreset.describe() | {"views": made, "target_kind": "soft", "last_layer": None, "learning_rate": None}
    about["provenance"] = _provenance(coreset, type(model).__name__, temperature)
    return SyntheticCoreset(
        coreset.stored, targets, preprocessing=coreset.preprocessing, **about | {"num_classes": targets.shape[1]}
    )


def _provenance(coreset: SyntheticCoreset, teacher: str, temperature: float) -> dict[str, Any]:
    """What is recorded of the images, without the accuracy that their old targets gave, and who labelled the views."""
    kept = {name: value for name, value in coreset.provenance.items() if name != "accuracy"}
    return kept | {"views": {"teacher": teacher, "temperature": temperature}}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode meanwhile; then every module is in the mode that it was in, by its own `train` if it has one.

    Such a `train` may do more than set a flag, as merge weights; these are copied back, because it rounds.
    """
    modes = {module: module.training for module in model.modules()}
    own = [module for module in modes if getattr(module.train, "__func__", None) is not nn.Module.train]
    weights = {p: p.detach().clone() for module in own for p in module.parameters()}
    try:
        model.eval()
        yield
    finally:
        back_through_train(modes.items())
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            for weight, value in weights.items():
                if not torch.equal(weight, value):
                    weight.copy_(value)


def check_temperature(temperature: float) -> None:
    """Refuses what logits cannot be divided by."""
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature must be positive and finite, got {temperature}")


@torch.no_grad()
def _probabilities(model: nn.Module, parts: Iterable[Tensor], temperature: float) -> Tensor:
    with evaluating(model):
        logits = torch.cat([logits_of(model(as_taken_by(model, part))).float().cpu() for part in parts])
    if logits.ndim != 2 or not bool(torch.isfinite(logits).all()):
        raise ValueError(f"model must give finite logits (n, classes), got shape {tuple(logits.shape)} or NaN")
    return (logits / temperature).softmax(1)
