"""ScoreStore: what the training's own forward passes said of each example, over all visits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from .visits import later_more, to_mean, visits

MANY_CLASSES = 64  # above that gradients are projected
PROJECTED = 40  # numbers that a projected gradient has
_MOST_LOGITS = 4_000_000  # numbers that the logits of first visits may take
_LEAST_FIRST, _MOST_FIRST = 2_000, 20_000  # of these logits, in rows, whatever the classes

_SAVED = ("counts", "last_seen", "label_probability", "margin", "_gradient", "_first_at", "_first_logits")
_SAVED_WHOLE = ("log_probabilities",)
_SAVED_PROJECTED = ("_vote", "_votes", "_largest")


class ScoreStore:
    """For each example the mean over all visits of its logit gradient `softmax - onehot`, and when it was seen.

    Up to 64 classes the mean of the log probabilities is kept too: it tells wrong labels better than the mean probability,
    since a visit at which the network knew nothing hardly changes it. In it the k-th visit counts min(k, 3)² times: the
    network knows more by then, and what it said before it learned labels by heart is not forgotten.

    Above 64 classes a gradient is kept as a fixed random projection onto 40 numbers, which keeps distances on average. At
    1.28 million examples and 1,000 classes that is 260 MB.

    Example:
        >>> store = ScoreStore(labels, classes=10)
        >>> store.observe(indices, model(x), epoch=3)
        >>> store.label_probability[indices]

    Args:
        labels: `(n,)` int64, every example's class.
        classes: columns of the model's logits.
    """

    labels: Tensor
    classes: int
    n: int
    projected: bool
    """Whether gradients are projections, and `probabilities` cannot be had."""
    counts: Tensor
    """`(n,)` int32: visits."""
    last_seen: Tensor
    """`(n,)` int32: epoch of the last visit, -1 for none."""
    label_probability: Tensor
    """`(n,)` float32: mean of the softmax at the label, NaN where never seen."""
    margin: Tensor
    """`(n,)` float32: mean of the label's logit minus the largest other one, NaN where never seen."""
    log_probabilities: Tensor
    """`(n, classes)` float32: mean of the log softmax, the k-th visit min(k, 3)² times; NaN where never seen; empty if
    projected."""
    skipped: int
    """Rows left out because a logit was NaN or infinite."""

    @torch.inference_mode(mode=False)  # an inference tensor could not be written to when training goes on
    def __init__(self, labels: Tensor, classes: int) -> None:
        if labels.ndim != 1 or labels.is_floating_point():
            raise ValueError(f"labels must be whole numbers (n,), got shape {tuple(labels.shape)} of {labels.dtype}")
        highest = int(labels.max()) if len(labels) else -1
        if classes < 2 or highest >= classes:
            raise ValueError(
                f"classes must be at least 2 and above the highest label, {highest}, got {classes}: it is the number of "
                "the model's logits. Labels count from 0."
            )
        self.labels, self.classes, self.n = labels, classes, len(labels)
        self.projected = classes > MANY_CLASSES
        self.skipped = self._firsts = 0
        self.counts = torch.zeros(self.n, dtype=torch.int32)
        self.last_seen = torch.full((self.n,), -1, dtype=torch.int32)
        self.label_probability, self.margin = _unseen(self.n), _unseen(self.n)
        self._gradient = _unseen(self.n, PROJECTED if self.projected else classes)
        self.log_probabilities = _unseen(0 if self.projected else self.n, classes)
        rows = max(_LEAST_FIRST, min(_MOST_FIRST, _MOST_LOGITS // classes))
        self._first_rows = min(rows, self.n - self.n // 2)
        self._first_at = torch.full((self._first_rows,), -1, dtype=torch.int64)
        self._first_logits = torch.zeros(self._first_rows, classes, dtype=torch.float16)
        if self.projected:
            self._projection = _projection(classes)
            self._vote = torch.full((self.n,), -1, dtype=torch.int32)  # the class that leads, and by how many votes
            self._votes = torch.zeros(self.n, dtype=torch.int32)
            self._largest = _unseen(self.n)  # mean of the largest probability

    def __repr__(self) -> str:
        return f"ScoreStore(n={self.n}, classes={self.classes}, coverage={self.coverage:.3f})"

    @property
    def coverage(self) -> float:
        """The share of examples that were seen at least once."""
        return float((self.counts > 0).sum()) / max(1, self.n)

    @property
    def predicted(self) -> Tensor:
        """`(n,)` int64: the class that the model would give, -1 where never seen.

        The largest mean probability; of projected scores the class that was the likeliest most often, by a running vote.
        """
        if self.projected:
            return self._vote.long()
        return torch.where(self.counts > 0, self.probabilities().argmax(1), -1)

    @property
    def predicted_probability(self) -> Tensor:
        """`(n,)` float32: its mean probability; of projected scores the mean of the largest one. NaN where never seen."""
        return self._largest if self.projected else self.probabilities().amax(1)

    def gradients(self, indices: Tensor) -> Tensor:
        """`(k, classes)`, or `(k, 40)` if projected: the mean of `softmax - onehot`, NaN where never seen.

        Args:
            indices: `(k,)` examples.
        """
        return self._gradient[indices]

    def probabilities(self, indices: Tensor | None = None) -> Tensor:
        """`(k, classes)` mean softmax, NaN where never seen.

        Args:
            indices: `(k,)` examples; all by default.
        """
        if self.projected:
            raise ValueError(
                f"probabilities are not kept for {self.classes} classes: above {MANY_CLASSES} the store has a projection "
                "of the gradients. Read label_probability, predicted and predicted_probability."
            )
        at = slice(None) if indices is None else indices
        return self._gradient[at] + one_hot(self.labels[at], self.classes)

    def first_visits(self) -> tuple[Tensor, Tensor]:
        """Indices `(k,)` and logits `(k, classes)` of first visits, when nothing was trained on these examples yet.

        A random sample of those after the first n/2 of them: at most 20,000, and no more than 2,000 or 4 million numbers.
        """
        filled = self._first_at >= 0
        return self._first_at[filled], self._first_logits[filled].float()

    def age(self, epoch: int) -> float:
        """The mean number of epochs since the last visit, over the examples seen; NaN if there are none.

        Args:
            epoch: the epoch that is now.
        """
        return float((epoch - self.last_seen[self.counts > 0]).double().mean())

    @torch.no_grad()
    def observe(self, indices: Tensor, logits: Tensor, epoch: int, gradients: Tensor | None = None) -> None:
        """Takes in what a forward pass said; a row with NaN or infinity is skipped, and counted in `skipped`.

        Args:
            indices: `(b,)` examples, also the same one more than once.
            logits: `(b, classes)` on any device.
            epoch: of the visit.
            gradients: `(b, classes)` to keep in place of the logits' own, such as means under noise.
        """
        indices, logits = indices.to("cpu", torch.int64), logits.to("cpu", torch.float32)
        extra = None if gradients is None else gradients.to("cpu", torch.float32)
        given = [part for part in (logits, extra) if part is not None]
        if not all(math.isfinite(float(part.sum())) for part in given):  # no NaN is lost in a sum, and no infinity
            good = torch.cat(given, 1).isfinite().all(1)
            self.skipped += int((~good).sum())
            indices, logits, extra = indices[good], logits[good], None if extra is None else extra[good]
        for rows in visits(indices):
            self._visit(indices[rows], logits[rows], epoch, None if extra is None else extra[rows])

    def _visit(self, at: Tensor, logits: Tensor, epoch: int, gradient: Tensor | None) -> None:
        """One visit of each example in `at`, all different."""
        labels, seen = self.labels[at][:, None], self.counts[at]
        first: Tensor | None = seen == 0
        if bool(first.any()):  # type: ignore[union-attr]
            self._keep_first(at[first], logits[first])
        else:
            first = None
        log_probability = logits.log_softmax(1)
        probability = log_probability.exp()
        weight, own = (seen + 1).float().reciprocal(), probability.gather(1, labels)
        margin = logits.gather(1, labels) - logits.scatter(1, labels, -torch.inf).amax(1, keepdim=True)
        to_mean(self.label_probability, at, own[:, 0], weight, first)
        to_mean(self.margin, at, margin[:, 0], weight, first)
        if self.projected:
            largest, likeliest = probability.max(1)
            to_mean(self._largest, at, largest, weight, first)
            self._count_vote(at, likeliest.int())
        else:
            to_mean(self.log_probabilities, at, log_probability, later_more(seen + 1), first)
        if gradient is None:
            gradient = probability.scatter_(1, labels, own - 1)
        gradient = gradient @ self._projection if self.projected else gradient
        to_mean(self._gradient, at, gradient, weight, first)
        self.counts.index_copy_(0, at, seen + 1)
        self.last_seen.index_fill_(0, at, epoch)

    def _count_vote(self, at: Tensor, likeliest: Tensor) -> None:
        """A running majority vote: the leader gains a vote or loses one, and at none the next one leads."""
        leader, votes = self._vote[at], self._votes[at]
        new = votes == 0
        self._vote[at] = torch.where(new, likeliest, leader)
        self._votes[at] = torch.where(new | (leader == likeliest), votes + 1, votes - 1)

    def _keep_first(self, at: Tensor, logits: Tensor) -> None:
        """Puts first visits into a reservoir; which stay depends on their number alone, so that runs can be repeated.

        The k-th (from 0) takes place k while there is one, then a random place below k + 1, if there is such a place.
        """
        number = np.arange(self._firsts, self._firsts + len(at)) - self.n // 2
        self._firsts += len(at)
        place = np.where(number < self._first_rows, number, _scrambled(number) % np.maximum(number + 1, 1))
        kept = np.flatnonzero((number >= 0) & (place < self._first_rows))
        chosen = dict(zip(place[kept].tolist(), kept.tolist(), strict=True))  # of one place the last
        if chosen:
            places, rows = (torch.tensor(list(part)) for part in (chosen.keys(), chosen.values()))
            self._first_at[places] = at[rows]
            limit = torch.finfo(torch.float16).max
            self._first_logits[places] = logits[rows].clamp(-limit, limit).half()

    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers to save; a copy, so that later visits do not change it."""
        numbers = {"n": self.n, "classes": self.classes, "skipped": self.skipped, "firsts": self._firsts}
        return {**numbers, **{name.lstrip("_"): value.clone() for name, value in self._tensors()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the scores of a store of the same data. An error changes nothing.

        Args:
            state: what `state_dict` gave.
        """
        own = self.state_dict()
        if not isinstance(state, Mapping) or state.keys() != own.keys():
            raise ValueError(f"the state of the scores is damaged; it was not made by state_dict(): {state!r:.200}")
        for key in ("n", "classes"):
            if state[key] != own[key]:
                raise ValueError(f"the scores were saved with {key}={state[key]}, here it is {own[key]}: other data")
        for key, value in own.items():
            found = state[key]
            if isinstance(value, Tensor):
                good = isinstance(found, Tensor) and found.shape == value.shape and found.dtype == value.dtype
            else:
                good = type(found) is int and found >= 0
            if not good:
                raise ValueError(f"the state's scores are damaged: {key} is {found!r:.100}")
        self.skipped, self._firsts = state["skipped"], state["firsts"]
        for name, value in self._tensors():
            value.copy_(state[name.lstrip("_")])

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name in _SAVED + (_SAVED_PROJECTED if self.projected else _SAVED_WHOLE):
            yield name, getattr(self, name)


def _unseen(*shape: int) -> Tensor:
    return torch.full(shape, torch.nan, dtype=torch.float32)


def _projection(classes: int) -> Tensor:
    """`(classes, 40)` random signs, scaled so that squared lengths stay what they are on average."""
    signs = np.random.Generator(np.random.PCG64(0)).integers(0, 2, (classes, PROJECTED))
    return torch.from_numpy(signs).float().mul_(2).sub_(1).div_(PROJECTED**0.5)


def _scrambled(numbers: np.ndarray) -> np.ndarray:
    """Numbers of at least 0 that look random, one for each number (the last steps of splitmix64)."""
    x = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x >> np.uint64(2), dtype=np.int64)
