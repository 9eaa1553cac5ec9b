"""How likely each candidate's label is right, by what the model predicts under the draws of a posterior."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..evidence import above_chance

_ROUNDS = 30  # of expectation-maximisation; the estimate changes by less than 0.01 after a dozen
_ERRORS_ABOVE_CHANCE = 2  # standard errors that the agreement must be above chance
_SUREST = 0.98  # the quantile of the highest probabilities that says how sure the model ever is
_TOLERANCE = 0.005


def label_probability(gradients: Tensor, labels: Tensor) -> Tensor:
    """The mean probability `(k,)` of each label over the draws; `gradients` are `(draws, k, classes)`."""
    rows = torch.arange(len(labels))
    return 1 + gradients[:, rows, labels].double().mean(0)  # the gradient at the label is p(label) - 1


class Predictions(NamedTuple):
    """What the draws predict for candidates, on average."""

    label: Tensor
    """The probability `(k,)` of each one's label."""
    highest: Tensor
    """The highest probability `(k,)` of any class."""
    likeliest: Tensor
    """That class `(k,)`."""

    @classmethod
    def of(cls, gradients: Tensor, labels: Tensor) -> Predictions:
        """By their `gradients` `(draws, k, classes)`."""
        mean = gradients.double().mean(0)
        mean[torch.arange(len(labels)), labels] += 1
        return cls(label_probability(gradients, labels), *mean.max(1))

    @classmethod
    def joined(cls, parts: Sequence[Predictions]) -> Predictions:
        """Of candidates in several parts."""
        return cls(*(torch.cat(column) for column in zip(*parts, strict=True)))


def knows_labels(predicted: Predictions, labels: Tensor) -> bool:
    """Whether the likeliest classes agree with the labels more often than if they had nothing to do with each other."""
    return above_chance(predicted.likeliest, labels, _ERRORS_ABOVE_CHANCE)


def noise_rate(estimate: float, predicted: Predictions, labels: Tensor) -> float | None:
    """The estimated share of wrong labels, or None where the model cannot tell.

    That is, where it knows nothing of the labels; and where it has learned them with their mistakes: then it is sure of
    nothing beyond the share of right ones, takes every label for as likely as it has to be, and the estimate falls to 0.
    """
    if not knows_labels(predicted, labels):
        return None
    surest = float(predicted.highest.kthvalue(max(1, int(_SUREST * len(labels)))).values)
    return None if estimate + _TOLERANCE < (1 - surest) / 2 else estimate


def label_confidence(probability: Tensor, lengths: Tensor, classes: int) -> Tensor:
    r"""The probability `(k,)` that each candidate's label is right, by the `probability` $q$ that the draws give it.

    If a share $\epsilon$ of the labels was replaced by one of the $C - 1$ others at random, Bayes' rule says that a label
    is right with probability

    $$r = \frac{(1 - \epsilon)\, q}{(1 - \epsilon)\, q + \epsilon\, (1 - q) / (C - 1)}.$$

    $\epsilon$ is not known: $\epsilon = 1 - \bar r$ is iterated to its fixed point over each pool, `lengths` candidates
    each: pools are shared out over processes, and the answer must not depend on how. At $\epsilon = 1/2$ a label is
    likelier right than wrong if the model finds it likelier than chance. An untrained model knows nothing, which
    `knows_labels` tells; one that has learned clean labels finds next to none wrong.
    """
    q = probability.clamp(1e-12, 1.0)
    if classes < 2:
        return torch.ones_like(q)
    pool = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    wrong = torch.full((len(lengths),), 0.5, dtype=torch.float64)
    for _ in range(_ROUNDS):
        epsilon = wrong.clamp(1e-6, 1 - 1e-6)[pool]
        right = (1 - epsilon) * q
        right = right / (right + epsilon * (1 - q) / (classes - 1))
        wrong = torch.zeros_like(wrong).index_add_(0, pool, 1 - right) / lengths
    return right
