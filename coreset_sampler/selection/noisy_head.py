"""Logit gradients under noise in the head, from what the head was given in a training's forward pass."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import one_hot

from ..layers import head_name, innermost
from .forward import of_both_classes, precision
from .types import Posterior
from .watching import Hook, remove


class NoisyHead:
    """Catches the head's input in each forward pass; noisy heads are then small matrix products.

    Args:
        model: whose head it is.
        noise: draws parameters of the head.
        draws: heads that a gradient is the mean over.
    """

    def __init__(self, model: nn.Module, noise: Posterior, draws: int) -> None:
        model = innermost(model)
        self._model, self._noise, self._draws, self._name = model, noise, draws, head_name(model)
        self._head = model.get_submodule(self._name)
        self._input: Any = None
        self._output: Any = None
        self._dtype: torch.dtype | None = None  # of autocast, which may be on inside the model only
        handle = self._head.register_forward_hook(Hook(self._catch), with_kwargs=True)
        self.off = weakref.finalize(self, remove, [handle])

    def _catch(self, _: nn.Module, args: Any, named: Mapping[str, Any], output: Any) -> None:
        self._input, self._output = (args, named), output
        kind = output.device.type if isinstance(output, Tensor) else "cpu"
        self._dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    @torch.no_grad()
    def gradients(self, logits: Tensor, labels: Tensor, seed: int) -> Tensor | None:
        """`(b, classes)` mean of `softmax - onehot` over noisy heads; None if the logits are not what the head gave.

        Args:
            logits: `(b, classes)` of the same forward pass.
            labels: `(b,)`.
            seed: of the noise.
        """
        (args, named), output = self._input or ((), {}), of_both_classes(self._output, logits.shape[1])
        self._input = self._output = None
        if not isinstance(output, Tensor) or output.shape != logits.shape or not torch.equal(output, logits):
            return None
        view: Any = SimpleNamespace(model=self._model)  # all that a Gaussian asks for
        mean = torch.zeros(logits.shape, device=logits.device)
        for draw in self._noise.draw(view, self._draws, torch.Generator().manual_seed(seed)):
            own = {name.removeprefix(f"{self._name}."): value for name, value in draw.items()}
            with precision(self._dtype, logits.device):
                noisy = of_both_classes(functional_call(self._head, own, args, dict(named)), logits.shape[1])
            mean += noisy.float().softmax(1) / self._draws
        return mean - one_hot(labels.to(logits.device), logits.shape[1])


def noise_of(strategy: Any) -> tuple[Posterior, int] | None:
    """The noise in the head that a strategy's posterior asks for on top of the trajectory, and how many draws of it."""
    noise = getattr(getattr(strategy, "posterior", None), "noise", None)
    return None if noise is None else (noise, int(getattr(strategy, "draws", 1)))
