"""Whether a network knows anything of the labels: its likeliest classes agree with them more often than by chance."""

from __future__ import annotations

import math

import torch
from torch import Tensor


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
