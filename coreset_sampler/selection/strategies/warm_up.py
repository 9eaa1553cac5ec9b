"""Warm-up: uniform sampling until the model has something to say about the examples."""

from __future__ import annotations

from functools import partial

import torch

from ..coreset import Coreset
from ..types import Strategy, View
from .uniform import random_subset


def warm_up(strategy: Strategy, *, selections: int) -> Strategy:
    """Keeps a random subset at the first `selections` and leaves the later ones to `strategy`.

    At its random start a network gives all examples of a class nearly the same gradient, and what covers those well says
    nothing. Cost: nothing, and the first looks through the model are spared.
    """
    if selections < 0:
        raise ValueError(f"selections must be 0 or more, got {selections}")
    return partial(_first_at_random, strategy=strategy, selections=selections)


def _first_at_random(
    view: View, size: int, generator: torch.Generator, *, strategy: Strategy, selections: int
) -> Coreset:
    done = int(view.memory.get("warm_up", torch.zeros(())))
    if done >= selections:
        return strategy(view, size, generator)
    view.memory["warm_up"] = torch.tensor(done + 1)
    return random_subset(view, size, generator)
