"""Training a network on the coreset from somewhere on an expert's way, without keeping a graph."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor

from ..flat import FlatNetwork
from .augment import Augmentation
from .pixels import noise

Loss = Callable[[Tensor, Tensor], Tensor]
"""Outputs and targets to a mean over the examples."""


def descend(
    flat: FlatNetwork,
    theta: Tensor,
    inputs: Tensor,
    targets: Tensor,
    *,
    loss: Loss,
    steps: int,
    lr: float,
    generator: Generator,
    augmentation: Augmentation | None = None,
    temperature: float = 0.0,
) -> Tensor:
    r"""Parameters after `steps` of $\theta \leftarrow \theta - r\,\nabla L(\theta) + \sqrt{2 r T}\,\eta$.

    Gradient descent at temperature 0; at $T > 0$ Langevin dynamics, whose law nears $\exp(-L / T)$. The memory of one
    step, whatever their number: nothing is kept to differentiate through them.
    """
    inputs = inputs.detach()
    for _ in range(steps):
        seen = inputs if augmentation is None else augmentation(inputs, generator)
        theta = theta.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(flat(theta, seen), targets), theta)
        theta = theta.detach() - lr * gradient
        if temperature:
            theta = theta + noise(theta, math.sqrt(2 * lr * temperature), generator)
    return theta
