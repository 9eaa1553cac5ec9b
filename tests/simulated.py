"""Predictions whose truth is known: what the tests of label noise share."""

from __future__ import annotations

import torch
from torch import Tensor

from coreset_sampler.selection.scores import ScoreStore


def predictions(
    n: int, classes: int, *, signal: float = 3.0, temperature: float = 1.0, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """True classes and logits of a network that is exactly calibrated at this temperature.

    By Bayes' rule: if x has mean `signal` in the column of its class and 0 elsewhere, with unit variance, the log
    probabilities of the classes are `signal * x` up to a constant.
    """
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randint(classes, (n,), generator=generator)
    x = torch.randn(n, classes, generator=generator, dtype=torch.float64)
    x[torch.arange(n), truth] += signal
    return truth, temperature * signal * x


def labelled(truth: Tensor, matrix: Tensor, seed: int = 1) -> Tensor:
    """A label for each true class, by its row of the matrix."""
    return torch.multinomial(matrix[truth], 1, generator=torch.Generator().manual_seed(seed))[:, 0]


def symmetric(rate: float, classes: int) -> Tensor:
    matrix = torch.full((classes, classes), rate / (classes - 1), dtype=torch.float64)
    return matrix.fill_diagonal_(1 - rate)


def pairs(rate: float, classes: int) -> Tensor:
    """Each class is taken for the next."""
    eye = torch.eye(classes, dtype=torch.float64)
    return (1 - rate) * eye + rate * eye.roll(1, 1)


def area_under_curve(score: Tensor, wrong: Tensor) -> float:
    rank = score.argsort().argsort().double()
    right, total = int((~wrong).sum()), len(wrong)
    return float((rank[~wrong].sum() - right * (right - 1) / 2) / (right * (total - right)))


def observed(
    logits: Tensor, labels: Tensor, *, visits: int = 1, seen: int | None = None, spread: float = 0.0
) -> ScoreStore:
    """A store that saw these logits of the first `seen` examples, `visits` times, with noise of this spread on them."""
    store, generator = ScoreStore(labels, logits.shape[1]), torch.Generator().manual_seed(7)
    at = torch.arange(len(labels) if seen is None else seen)
    for epoch in range(visits):
        for rows in at.split(500):
            said = logits[rows].float()
            store.observe(rows, said + spread * torch.randn(said.shape, generator=generator), epoch)
    return store
