"""Whether the rows of forward passes are the examples that they were matched to, by how well labels fit them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_ONCE_CONFIRMED = 8  # batches, of which one is looked at
_WINDOW = 20  # batches that are judged together
_MOST_WAITING = 2**24  # bytes of logits that wait to be worked out together
_MOST_WINDOWS = 3  # that are undecided, after which the evidence is collected anew
_CLEARLY = 3.0, -4.0  # standard errors: of a match, of a mismatch
_SURE = 0.5  # nats that a network which knows its classes should gain from the right labels; a fresh one is below that
_MIXED = 5.0, 0.25  # standard errors, and share of the own label's gain, that a partner's label gains in mixtures


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

    _waiting: list[tuple[Tensor, ...]]
    """Batches that were not looked at yet: logits, and the labels matched, before and after."""
    _found: Tensor
    """Of each batch what the labels gain over those before and after, the loss of these, how sure the network is, and what
    the labels of mixing partners gain."""

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
            logits: `(b, classes)` of any device; nobody may write into them.
            labels: `(b,)` matched.
            others: `(b,)` each, of the batches before and after.
        """
        if len(others) < 2:
            return None
        if self._waiting and self._waiting[0][0].shape[1] != logits.shape[1]:
            self._work_out()  # a network with another head
        self._waiting.append((logits, labels, *others))
        held = sum(batch.nbytes for batch, *_ in self._waiting)
        if held < _MOST_WAITING and len(self._waiting) + len(self._found) % _WINDOW < _WINDOW:
            return None
        self._work_out()
        return self._verdict() if len(self._found) and len(self._found) % _WINDOW == 0 else None

    def _work_out(self) -> None:
        """Finds the figures of what waits, all at once, since this is run in the loop."""
        logits, *columns = (torch.cat([batch.cpu() for batch in part]) for part in zip(*self._waiting, strict=True))
        labels, sizes = torch.stack(columns, 1), torch.tensor([len(batch) for batch, *_ in self._waiting])
        self._waiting = []
        batch = torch.arange(len(sizes)).repeat_interleave(sizes)
        size, start = sizes[batch], (sizes.cumsum(0) - sizes)[batch]

        def mean(rows: Tensor) -> Tensor:
            return rows.new_zeros(len(sizes), rows.shape[1]).index_add_(0, batch, rows / size[:, None])

        place = torch.arange(len(batch)) - start
        partner = torch.stack([size - 1 - place, (place - 1) % size], 1)  # in mixup and cutmix: timm's, torchvision's
        log_p = logits.log_softmax(1)
        own, before, after, *mixed = log_p.gather(1, torch.cat([labels, labels[:, 0][start[:, None] + partner]], 1)).T
        p, other = log_p.exp(), partner != place[:, None]  # no row is its own partner
        partners = (torch.stack(mixed, 1) - (before + after)[:, None] / 2) * other
        figures = [
            torch.stack([own - before, own - after, -before, -after], 1),
            ((p - mean(p)[batch]) * log_p).sum(1, keepdim=True),
        ]
        found = torch.cat([*map(mean, figures), mean(partners) / mean(other.float()).clamp(min=1e-9)], 1)
        self._found = torch.cat([self._found, found[found.isfinite().all(1)].double()])

    def _verdict(self) -> str | None:
        gains, shifted, expected, partners = self._found.split([2, 2, 1, 2], 1)
        z, gain, z_mixed = _z(gains), gains.mean(), _z(partners)
        likely = bool(((partners.mean(0) > _MIXED[1] * gain) & (z_mixed > _CLEARLY[0])).any())
        if likely and bool((z_mixed > _MIXED[0]).any()):
            return "its rows fit the labels of others of their batch: it is given mixtures, as of mixup or cutmix"
        if bool((z > _CLEARLY[0]).all()) and not likely:
            self.confirmed = True
            self._clear()
        elif bool(((z < _CLEARLY[1]) & (shifted.mean(0) < self.chance)).any()):
            return "the labels of another batch fit its predictions better than those of the matched examples"
        elif len(gains) >= _MOST_WINDOWS * _WINDOW:
            self._clear()
            if expected.mean() > _SURE and gain < 0.1 * expected.mean():
                return "the labels of the matched examples do not fit its predictions, although it is sure of these"
        return None

    def _clear(self) -> None:
        self._waiting, self._found = [], torch.zeros(0, 7, dtype=torch.float64)


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
