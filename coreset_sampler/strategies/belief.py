"""How likely each candidate's label is right, by what the model expects under the draws of a posterior."""

from __future__ import annotations

import torch
from torch import Tensor

_ROUNDS = 30  # of expectation-maximisation; the estimate changes by less than 0.01 after a dozen


def label_probability(gradients: Tensor, labels: Tensor) -> Tensor:
    """What the draws give each label on average `(k,)`; `gradients` are `(draws, k, classes)`."""
    rows = torch.arange(len(labels))
    return 1 + gradients[:, rows, labels].double().mean(0)  # the gradient at the label is p(label) - 1


def label_belief(probability: Tensor, lengths: Tensor, classes: int) -> Tensor:
    r"""The probability `(k,)` that each candidate's label is right, by the `probability` $q$ that the draws give it.

    If a share $\epsilon$ of the labels was replaced by one of the $C - 1$ others at random, Bayes' rule says that a label
    is right with probability

    $$r = \frac{(1 - \epsilon)\, q}{(1 - \epsilon)\, q + \epsilon\, (1 - q) / (C - 1)}.$$

    $\epsilon$ is not known: $\epsilon = 1 - \bar r$ is iterated to its fixed point over each pool, `lengths` candidates
    each: pools are shared out over processes, and the answer must not depend on how. At $\epsilon = 1/2$ a label is
    likelier right than wrong if the model finds it likelier than chance. An untrained model knows nothing and doubts all
    labels alike; one that has learned clean labels finds next to none wrong.
    """
    q = probability.clamp(1e-12, 1.0)
    if classes < 2:
        return torch.ones_like(q)
    pool = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    wrong_share = torch.full((len(lengths),), 0.5, dtype=torch.float64)
    for _ in range(_ROUNDS):
        epsilon = wrong_share.clamp(1e-6, 1 - 1e-6)[pool]
        right = (1 - epsilon) * q
        right = right / (right + epsilon * (1 - q) / (classes - 1))
        wrong_share = torch.zeros_like(wrong_share).index_add_(0, pool, 1 - right) / lengths
    return right
