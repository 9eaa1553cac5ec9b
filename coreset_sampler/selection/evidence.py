"""Whether the rows of forward passes are the examples that they were matched to, by how well labels fit them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

_ONCE_CONFIRMED = 8  # batches, of which one is looked at
_WINDOW = 20  # batches that are judged together
_MOST_WINDOWS = 3  # that are undecided, after which the evidence is collected anew
_CLEARLY = 3.0, -4.0  # standard errors: of a match, of a mismatch
_SURE = 0.5  # nats that a network which knows its classes should gain from the right labels; a fresh one is below that
_MIXED = 5.0, 0.25  # standard errors, and share of the own label's gain, that a partner's label gains in mixtures
_PARTNERS: tuple[Callable[[Tensor], Tensor], ...] = (  # in mixup and cutmix of timm, and of torchvision
    lambda rows: rows.flip(0),
    lambda rows: rows.roll(1, 0),
)


class Evidence:
    """Whether labels fit the predictions better than those of the batches before and after.

    Matched labels have a lower loss than shifted ones as soon as the network knows something. A paired test over 20
    batches tells. Where shifted ones are clearly better, or no labels fit a network that is sure of itself, rows and
    indices do not belong together. While the network knows nothing there is no verdict. Rows that fit the label of another
    row of their batch, last for first or of the row before, are mixtures as timm and torchvision make them: these belong to
    no single example. Mixtures with partners at random cannot be told from rows that a network is unsure of.

    Args:
        labels: `(n,)` all labels; predicting their frequencies is to know nothing.
    """

    def __init__(self, labels: Tensor) -> None:
        share = torch.bincount(labels).double() / max(1, len(labels))
        self.chance = float(torch.special.entr(share).sum())  # the loss of who knows the frequencies only
        self.confirmed = False
        self._batches = 0
        self._clear()

    def is_wanted(self) -> bool:
        """Whether to take in the next batch: each, and once the match was confirmed every eighth, to cost little."""
        self._batches += 1
        return not self.confirmed or self._batches % _ONCE_CONFIRMED == 0

    def add(self, logits: Tensor, labels: Tensor, others: list[Tensor]) -> str | None:
        """Takes in a batch and says what is wrong, if that is plain by now.

        Args:
            logits: `(b, classes)`.
            labels: `(b,)` matched.
            others: `(b,)` each, of the batches before and after.
        """
        log_p = logits.log_softmax(1)
        if len(others) < 2 or not bool(torch.isfinite(log_p).all()):
            return None
        sets = [labels, *others, *(of(labels) for of in _PARTNERS)]
        found = log_p.gather(1, torch.stack(sets, 1))  # all at once: this is run in the loop
        own, before, after = found[:, :3].mean(0).tolist()
        p = log_p.exp()
        self._expected.append(float(((p - p.mean(0)) * log_p).sum(1).mean()))
        self._gains.append([own - before, own - after])
        self._shifted.append([-before, -after])
        self._partners.append(_partner_gains(found[:, 3:], found[:, 1:3]))
        return self._verdict() if len(self._gains) % _WINDOW == 0 else None

    def _verdict(self) -> str | None:
        gains, shifted = torch.tensor(self._gains).double(), torch.tensor(self._shifted).double().mean(0)
        z, mixed = _z(gains), torch.tensor(self._partners).double()
        likely = bool(((mixed.mean(0) > _MIXED[1] * gains.mean()) & (_z(mixed) > _CLEARLY[0])).any())
        if likely and bool((_z(mixed) > _MIXED[0]).any()):
            return "its rows fit the labels of others of their batch: it is given mixtures, as of mixup or cutmix"
        if bool((z > _CLEARLY[0]).all()) and not likely:
            self.confirmed = True
            self._clear()
        elif bool(((z < _CLEARLY[1]) & (shifted < self.chance)).any()):
            return "the labels of another batch fit its predictions better than those of the matched examples"
        elif len(gains) >= _MOST_WINDOWS * _WINDOW:
            expected, gain = sum(self._expected) / len(gains), float(gains.mean())
            self._clear()
            if expected > _SURE and gain < 0.1 * expected:
                return "the labels of the matched examples do not fit its predictions, although it is sure of these"
        return None

    def _clear(self) -> None:
        self._gains: list[list[float]] = []
        self._shifted: list[list[float]] = []
        self._expected: list[float] = []
        self._partners: list[list[float]] = []


def _partner_gains(partners: Tensor, others: Tensor) -> list[float]:
    """What the labels of mixing partners `(b, 2)` gain over those of other batches `(b, 2)`; no row is its own partner."""
    rows = torch.arange(len(partners))
    kept = torch.stack([of(rows) != rows for of in _PARTNERS], 1)
    gains: list[float] = (
        ((partners - others.mean(1, keepdim=True)) * kept).sum(0).div(kept.sum(0).clamp(min=1)).tolist()
    )
    return gains


def _z(gains: Tensor) -> Tensor:
    """`(k,)` the means of `(batches, k)` in standard errors."""
    errors: Tensor = gains.std(0) / len(gains) ** 0.5
    return gains.mean(0) / errors.clamp(min=1e-9)


def above_chance(likeliest: Tensor, labels: Tensor, errors: float) -> bool:
    """Whether they agree more often than if they had nothing to do with each other, by so many standard `errors`.

    Args:
        likeliest: `(n,)` int64, the network's classes. Of no examples the answer is no.
        labels: `(n,)` int64, as given.
        errors: of the share that would agree by chance.
    """
    n = len(labels)
    if n == 0:
        return False
    classes = int(torch.maximum(likeliest, labels).max()) + 1
    shares = [torch.bincount(of, minlength=classes).double() / n for of in (likeliest, labels)]
    chance = float(shares[0] @ shares[1])
    agree = float((likeliest == labels).double().mean())
    return agree > chance + errors * math.sqrt(chance * (1 - chance) / n)
