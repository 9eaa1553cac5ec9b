"""Which labels are most likely wrong, by what a network said of the examples while it was trained."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .noise import NoiseModel, noise_model, quality_of
from .scores import ScoreStore

_SLOPE = 2.0  # of the chance over the logarithm of the ratios to the class thresholds


@dataclass(frozen=True)
class Suspect:
    """An example whose label may be wrong."""

    index: int
    label: int
    predicted: int
    """The class that the model would give."""
    probability_wrong: float


def suspects(store: ScoreStore, k: int, model: NoiseModel | None = None) -> list[Suspect]:
    """The `k` examples whose labels are most likely wrong, the likeliest first; fewer if fewer were seen.

    Args:
        store: of a sampler that observes.
        k: how many.
        model: of the label noise; by default fitted to the store's first visits.
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(
            f"k must be a whole number of suspects, at least 1, got {k!r}. For all of them pass k=store.n."
        )
    right = chance_right(store, model).nan_to_num(2.0)  # never seen: behind all others
    order = torch.argsort(store.margin.nan_to_num(torch.inf), stable=True)  # among equals those of the smallest margin
    order = order[torch.argsort(right[order], stable=True)][: min(k, int((store.counts > 0).sum()))]
    columns = (order, store.labels[order], store.predicted[order], 1 - right[order])
    return [Suspect(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def chance_right(store: ScoreStore, model: NoiseModel | None = None) -> Tensor:
    """The probability `(n,)` float32 that each label is right; NaN where never seen.

    By the model of label noise if it finds any. Else by class thresholds, which rank the labels but do not count wrong ones.

    Args:
        store: of a sampler that observes.
        model: of the label noise; by default fitted to the store's first visits.
    """
    if model is None:
        at, logits = store.first_visits()
        model = noise_model(logits, store.labels[at])
    found = quality_of(store, model) if model.competent and model.rate > 0 else _by_thresholds(store)
    return torch.where(store.counts > 0, found, torch.nan)


def _by_thresholds(store: ScoreStore) -> Tensor:
    """Confident learning (Northcutt et al. 2021): a class is likely if it is above its mean over the examples labelled so.

    The chance `(n,)` is a sigmoid of the label's log ratio to its threshold less the largest log ratio of another class. Of
    projected scores the predicted class is the other one, or where that is the label, all that is left in one class.
    """
    own, labels = store.label_probability.double(), store.labels
    thresholds = _class_means(own, labels, store.classes)
    if store.projected:
        predicted = store.predicted.clamp(min=0)
        elsewhere = store.predicted_probability.double() / thresholds[predicted]
        other = torch.where(predicted != labels, elsewhere, (1 - own) / thresholds.mean())
    else:
        ratios = store.probabilities().double() / thresholds
        other = ratios.scatter(1, labels[:, None], -torch.inf).amax(1)
    ratio = (own / thresholds[labels]).clamp(min=1e-12).log() - other.clamp(min=1e-12).log()
    return torch.sigmoid(_SLOPE * ratio).float()


def _class_means(values: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Over the examples of each class that were seen; of a class without any the mean of the others."""
    seen = values.isfinite()
    counts = torch.bincount(labels[seen], minlength=classes)
    sums = torch.zeros(classes, dtype=torch.float64).index_add_(0, labels[seen], values[seen])
    mean = values[seen].mean() if bool(seen.any()) else torch.tensor(1.0, dtype=torch.float64)
    return torch.where(counts > 0, sums / counts.clamp(min=1), mean).clamp(min=1e-6)
