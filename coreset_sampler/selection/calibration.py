r"""A linear calibration of a network's logits, fitted to labels of which some are wrong.

$$q = \mathrm{softmax}(e^t (I + D) z + b)$$

with a Gaussian prior on $D$ and $b$. One temperature makes a network surer or less sure of everything; $D$ and $b$ also
undo what it takes for what: classes it favours, and those that it confuses because it was trained on confused labels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_SPREAD = 0.05  # standard deviation of the prior of each entry of D and b
_MOST_CLASSES = 32  # above that there is no D: as many numbers as classes times classes
_ITERATIONS = 40
_LEAST = 1e-300


class Fit(NamedTuple):
    """Of a calibration: how good it is, the numbers, the rate of wrong labels, and what it says of the rows fitted to."""

    loglik: float
    """Of all labels, with the logarithm of the prior."""
    numbers: Tensor
    """t, b and, row by row, D; float64."""
    rate: float
    probabilities: Tensor
    """`(classes, n)` float64."""


def centred(logits: Tensor) -> Tensor:
    """`(classes, n)` float64, with mean zero for each example: short rows are slow."""
    columns = logits.T.to(torch.float64, memory_format=torch.contiguous_format)
    return columns - columns.mean(0)


def fit_calibration(
    logits: Tensor, ways: Tensor, others: Tensor | None = None, *, rate: float = 0.5, numbers: Tensor | None = None,
    iterations: int = _ITERATIONS,
) -> Fit:  # fmt: skip
    """The calibration under which the labels are likeliest, by L-BFGS.

    A label has the likelihood of the sum over true classes `k` of `q_k ways_k`. With `others` it is that of
    `(1 - e) ways + e others`, and `e` is fitted too.

    Args:
        logits: `(classes, n)`, of `centred`.
        ways: `(classes, n)` the probability of each example's label if its true class is `k`.
        others: the same of wrong labels.
        rate: of wrong labels, to begin with.
        numbers: to begin with; by default those that change nothing.
        iterations: at most.
    """
    if numbers is None:
        classes = len(logits)
        numbers = logits.new_zeros(1 + classes + (classes**2 if classes <= _MOST_CLASSES else 0))
    learned = [] if others is None else [numbers.new_tensor([rate]).logit()]
    at = torch.nn.Parameter(torch.cat([numbers, *learned]))
    best = Fit(-torch.inf, numbers, rate, logits)

    @torch.no_grad()
    def loss() -> float:
        nonlocal best
        now, slope = _evaluated(logits, ways, others, at, len(numbers))
        at.grad = slope.div_(-logits.shape[1])
        if now.loglik > best.loglik:
            best = now
        return -now.loglik / logits.shape[1]

    torch.optim.LBFGS([at], max_iter=iterations, line_search_fn="strong_wolfe", tolerance_change=1e-7).step(loss)
    return best


def _evaluated(logits: Tensor, ways: Tensor, others: Tensor | None, at: Tensor, size: int) -> tuple[Fit, Tensor]:
    """The fit at these `size` numbers, followed by the logarithm of the odds of a wrong label; and its gradient."""
    classes, numbers = len(logits), at[:size].clone()
    scale, bias, turn = numbers[0].exp(), numbers[1 : 1 + classes], numbers[1 + classes :]
    turned = logits.add(turn.view(classes, classes) @ logits) if len(turn) else logits
    q = turned.mul(scale).add_(bias[:, None]).softmax(0)
    rate = 0.0 if others is None else float(at[-1].sigmoid())
    joint = q * (ways if others is None else ways.lerp(others, rate))
    likely = joint.sum(0).clamp_(_LEAST)
    pull = joint.div_(likely).sub_(q)  # the gradient in the calibrated logits
    parts = [(pull * turned).sum().mul(scale)[None], pull.sum(1)]
    if len(turn):
        parts.append((pull @ logits.T).mul_(scale).flatten())
    slope = torch.cat(parts)
    slope[1:] -= numbers[1:] / _SPREAD**2
    if others is not None:
        slope = torch.cat([slope, ((q * (others - ways)).sum(0) / likely).sum()[None] * rate * (1 - rate)])
    loglik = float(likely.log().sum() - numbers[1:].square().sum() / (2 * _SPREAD**2))
    return Fit(loglik, numbers, rate, q), slope
