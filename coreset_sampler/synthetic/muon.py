"""`Muon`: momentum with every singular value made about one, for the weight matrices of a network."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

MUON_RATE = 30.0
"""Its rate for AdamW's of 1: 0.06 beside 2e-3 was better than 0.02, and level with 0.12 (docs/results.md)."""

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_ITERATIONS = 5
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Jordan et al.: singular values end between 0.7 and 1.2


class Muon(torch.optim.Optimizer):
    r"""Steps of the same length in every direction of a weight matrix (Jordan et al. 2024).

    $$B \leftarrow \mu B + G, \qquad W \leftarrow (1 - \eta w) W - \eta \sqrt{\max(1, m / n)}\; \mathrm{orth}(G + \mu B)$$

    for a matrix $W$ of $m$ rows and $n$ columns with gradient $G$, where $\mathrm{orth}(U S V^\top) \approx U V^\top$ by
    five Newton-Schulz iterations, in float32. A convolution is the matrix of its filters, one a row; `torch.optim.Muon`
    takes matrices alone, and is of torch 2.9 and later. A step costs
    about $2 m n s + 20 s^3$ multiplications for each matrix, $s = \min(m, n)$, whatever the batch: little for narrow
    networks, and more than all the rest for a ResNet-18 on small images on a CPU.

    Args:
        params: of two or more dimensions; see `hidden_matrices`.
        lr: $\eta$; `MUON_RATE` times what AdamW would take.
        momentum: $\mu$.
        weight_decay: $w$.
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float, *, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch's promises a loss for a closure
        """One step of every parameter that has a gradient."""
        if closure is not None:
            raise TypeError("closure must be left out: Muon looks at one gradient for each step")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group["lr"], group["momentum"], group["weight_decay"])

    def _step(self, parameter: Tensor, lr: float, momentum: float, weight_decay: float) -> None:
        gradient = parameter.grad.float()  # type: ignore[union-attr]
        state = self.state[parameter]
        mean = state.setdefault("momentum", torch.zeros_like(gradient)).mul_(momentum).add_(gradient)
        rows, columns = len(gradient), gradient[0].numel()
        direction = orthogonal((gradient + momentum * mean).reshape(rows, columns))
        parameter.mul_(1 - lr * weight_decay)
        parameter.add_(direction.reshape(gradient.shape).to(parameter.dtype), alpha=-lr * max(1, rows / columns) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """A matrix `(m, n)` of the same singular vectors, with all singular values but the tiniest between 0.7 and 1.2."""
    wide = matrix if len(matrix) <= matrix.shape[1] else matrix.T
    wide = wide / (wide.norm() + 1e-7)
    first, third, fifth = _COEFFICIENTS
    gram, identity = wide @ wide.T, torch.eye(len(wide), dtype=wide.dtype, device=wide.device)
    factor = identity
    for _ in range(_ITERATIONS):  # X <- (a + b XX' + c (XX')^2) X, followed by what it does to XX', which is smaller
        change = first * identity + third * gram + fifth * gram @ gram
        factor, gram = change @ factor, change @ gram @ change
    turned: Tensor = factor @ wide
    return turned if len(matrix) <= matrix.shape[1] else turned.T


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """What Muon is for: trainable weights of linear layers and convolutions, but for the last one, which gives the logits.

    Convolutions in groups are left out: their filters do not see the same channels.
    """
    layers = [module for module in model.modules() if isinstance(module, _LAYERS)]
    head = layers[-1].weight if layers else None
    weights = [layer.weight for layer in layers if getattr(layer, "groups", 1) == 1]
    trained = [weight for weight in weights if isinstance(weight, nn.Parameter) and weight.requires_grad]
    return list({id(weight): weight for weight in trained if weight is not head}.values())
