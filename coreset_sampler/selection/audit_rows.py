"""The rows of a label audit: suspects, most suspicious first, and totals of each class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .audit_data import Examples
from .score_file import Scores

_LEAST_RATE = 5e-4  # of wrong labels; what is below is none, in the tenths of a percent that are shown


@dataclass(frozen=True)
class SuspectRow:
    """An example whose label may be wrong; probabilities are means over all visits."""

    index: int
    label: int
    label_name: str
    label_probability: float
    predicted: int
    predicted_name: str
    predicted_probability: float
    probability_wrong: float
    times_seen: int
    name_in_data: str = ""
    """The data set's own label, where it is another than the run was told."""


@dataclass(frozen=True)
class ClassRow:
    """A class: how many have its label, how many of these were seen and are probably wrong, and what they look like."""

    name: str
    examples: int
    seen: int
    probably_wrong: int
    confused_with: str
    confused: int


@dataclass(frozen=True)
class Audit:
    """The suspects of a training run, most suspicious first, and totals.

    Args:
        scores: what the run's forward passes said.
        suspects: the rows to look at.
        per_class: one row per class that has examples.
        examples: what they look like, if known.
        notes: what the reader should know before trusting it.
    """

    scores: Scores
    suspects: tuple[SuspectRow, ...]
    per_class: tuple[ClassRow, ...]
    examples: Examples | None
    notes: tuple[str, ...]

    @property
    def noise_rate(self) -> float | None:
        """Estimated share of wrong labels; None where the run found none."""
        return _noise_rate(self.scores)


def audit_scores(scores: Scores, examples: Examples | None = None, *, top: int = 100) -> Audit:
    """The suspects among scores.

    Args:
        scores: of the whole data set.
        examples: its rows, if they can be shown.
        top: how many suspects.
    """
    if not bool(scores.seen.any()):
        raise ValueError(f"scores must be of a run that observed; none of the {len(scores)} examples was seen")
    names = _class_names(scores, examples)
    own = _labels_in_data(scores, examples)
    rows = tuple(_suspect(scores, names, own, index) for index in _order(scores)[:top].tolist())
    return Audit(scores, rows, _per_class(scores, names), examples, _notes(scores, own))


def _order(scores: Scores) -> Tensor:
    """The examples seen, most suspicious first; equal ones by margin, then by index: as `sampler.suspects` has them."""
    rows = scores.seen.nonzero().flatten()
    keys = (scores.margin[rows].numpy(), scores.chance_right[rows].numpy())
    return rows[torch.from_numpy(np.lexsort(keys))]


def _suspect(scores: Scores, names: Sequence[str], own: Tensor, index: int) -> SuspectRow:
    label, predicted = int(scores.labels[index]), int(scores.predicted[index])
    return SuspectRow(
        index=index,
        label=label,
        label_name=names[label],
        label_probability=float(scores.label_probability[index]),
        predicted=predicted,
        predicted_name=names[predicted] if predicted >= 0 else "",
        predicted_probability=float(scores.predicted_probability[index]),
        probability_wrong=float(scores.probability_wrong[index]),
        times_seen=int(scores.counts[index]),
        name_in_data=_name(names, int(own[index])) if int(own[index]) != label else "",
    )


def _per_class(scores: Scores, names: Sequence[str]) -> tuple[ClassRow, ...]:
    """Classes with examples, those with the most wrong labels first."""
    wrong = scores.seen & (scores.probability_wrong > 0.5)
    pairs = Counter(zip(scores.labels[wrong].tolist(), scores.predicted[wrong].tolist(), strict=True))
    others: dict[int, tuple[int, int]] = {}
    for (label, predicted), count in pairs.items():
        if predicted not in (label, -1):
            others[label] = max(others.get(label, (0, 0)), (count, predicted))
    examples, seen, doubted = (
        torch.bincount(labels, minlength=scores.classes).tolist()
        for labels in (scores.labels, scores.labels[scores.seen], scores.labels[wrong])
    )
    rows = []
    for c in (c for c in range(scores.classes) if examples[c]):
        count, other = others.get(c, (0, -1))
        rows.append(ClassRow(names[c], examples[c], seen[c], doubted[c], names[other] if count else "", count))
    return tuple(sorted(rows, key=lambda row: -row.probably_wrong / max(1, row.seen)))


def _class_names(scores: Scores, examples: Examples | None) -> tuple[str, ...]:
    """A name for every class: the file's, else the data set's, else numbers."""
    known = scores.class_names or (examples.class_names if examples is not None else ())
    return tuple(_name(known, c) for c in range(scores.classes))


def _name(names: Sequence[str], label: int) -> str:
    return names[label] if 0 <= label < len(names) else str(label)


def _labels_in_data(scores: Scores, examples: Examples | None) -> Tensor:
    """`(n,)` the labels of the data set, or those of the scores where it has none."""
    if examples is None:
        return scores.labels
    if examples.n != len(scores):
        raise ValueError(
            f"--data must have a row for each of the {len(scores):,} scores, in the same order; {examples.name} has "
            f"{examples.n:,}. Name the split that the run saw with --split; of a part of a data set, pass a folder that "
            "its save_to_disk wrote; or leave --data out, for a page of indices"
        )
    return scores.labels if examples.labels is None else examples.labels


def _noise_rate(scores: Scores) -> float | None:
    rate = scores.estimated_noise_rate or 0.0
    return rate if rate >= _LEAST_RATE else None


def _notes(scores: Scores, own: Tensor) -> tuple[str, ...]:
    notes, n = [], len(scores)
    if differ := int((own != scores.labels).sum()):
        notes.append(
            f"{differ:,} of {n:,} labels in the scores file are not those of the data set. Those of the file count."
            + (" That is over half of them: are the rows in the same order?" if differ > n / 2 else "")
        )
    if _noise_rate(scores) is None:
        notes.append(
            "The run found no share of wrong labels. Suspects are in order; how many of them are wrong is not known."
        )
    if unseen := n - int(scores.seen.sum()):
        notes.append(f"{unseen:,} of {n:,} examples were never seen in training. Nothing is said of them.")
    return tuple(notes)
