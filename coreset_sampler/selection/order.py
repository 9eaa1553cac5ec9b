"""The order in which an epoch shows a coreset, and how often it shows each example."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from .coreset import Coreset

Weighting = Literal["resample", "loss", "none"]
"""What becomes of a coreset's weights; see `CoresetSampler`."""
WEIGHTINGS: tuple[Weighting, ...] = get_args(Weighting)


def epoch_order(
    coreset: Coreset, weighting: Weighting, generator: torch.Generator
) -> tuple[list[int], list[float] | None]:
    """As many indices as the coreset has, and for `"loss"` their weights, of mean one."""
    size = len(coreset)
    if weighting == "resample":
        return systematic_draw(coreset, size, generator).tolist(), None
    order = torch.randperm(size, generator=generator)
    indices = coreset.indices[order].tolist()
    if weighting == "none":
        return indices, None
    return indices, (coreset.weights[order] * size / coreset.weights.sum()).tolist()


def distinct_share(coreset: Coreset, weighting: Weighting) -> float:
    """The share of an epoch's indices that are the first of their example, on average over epochs."""
    if weighting != "resample":
        return 1.0
    size = len(coreset)
    times = coreset.weights * (size / coreset.weights.sum())  # that each is drawn, on average
    return float(times.clamp(max=1).sum()) / size


def systematic_draw(coreset: Coreset, size: int, generator: torch.Generator) -> Tensor:
    """`(size,)` indices in random order, each as often as its weight says, rounded up or down at random.

    Systematic resampling is unbiased, and has less variance than independent draws.
    """
    shuffled, weights = torch.randperm(len(coreset), generator=generator), coreset.weights
    drawn = coreset.indices[shuffled]
    if size == len(coreset) and weights.min() == weights.max():  # each once, as a comb would have it
        torch.rand((), generator=generator, dtype=torch.float64)  # which takes one number
    else:
        drawn = drawn.repeat_interleave(comb(weights[shuffled], size, generator), output_size=size)
    return drawn[torch.randperm(size, generator=generator)]


def comb(mass: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """`(k,)` how many teeth of an even comb of `size`, placed by one uniform number, meet the cumulated `mass` of each.

    Masses 1, 2, 5 and `size=4` give cumulated shares 0.5, 1.5, 4; teeth at 0.3, 1.3, 2.3, 3.3 (offset 0.3) meet the
    examples 1, 1 and 2 times.
    """
    edges = torch.cumsum(mass, 0)
    offset = torch.rand((), generator=generator, dtype=torch.float64)
    teeth = torch.ceil(edges * (size / edges[-1]) - offset).clamp_(0, size).long()  # below each edge
    teeth[-1] = size
    return teeth.diff(prepend=teeth.new_zeros(1))
