"""A kind of network in VBPC's pool: newborns as flat vectors, and passes as functions of such a vector."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from ..inference.last_layer import features_of
from ..networks import Network, fresh

Parameters = dict[str, Tensor]
Pass = Callable[[Parameters, Tensor], Tensor]
Precision = Literal["float32", "bf16"]


class PoolNetwork:
    """What the networks of one maker have in common.

    Args:
        network: makes a fresh classifier.
        compiled: runs it through `torch.compile`, channels last.
        precision: of convolutions and matrix products: `"float32"`, or `"bf16"` by autocast. What a pass gives has the
            type of its inputs.
    """

    def __init__(self, network: Network, *, compiled: bool = False, precision: Precision = "float32") -> None:
        self._make, self._compiled, self._precision = network, compiled, precision
        template = fresh(network, Generator().manual_seed(0))  # its weights do not matter
        self._shapes = {name: p.shape for name, p in template.named_parameters()}
        self._template, trunk = template, features_of(template)
        self.has_batch_norm = any(isinstance(module, _BatchNorm) for module in template.modules())
        self.outputs, self.features = self._pass(template), self._pass(trunk)
        self._by_rows: dict[int, Pass] = {}
        self._trunk = trunk

    def newborn(self, generator: Generator, like: Tensor) -> Tensor:
        """The parameters of a fresh network, `(size,)`."""
        network = fresh(self._make, generator)
        return torch.cat([p.detach().reshape(-1) for p in network.parameters()]).to(like)

    def parameters(self, theta: Tensor) -> Parameters:
        """Views into the vector by parameter name."""
        parts = theta.split([math.prod(shape) for shape in self._shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}

    def num_outputs(self, inputs: Tensor) -> int:
        """How many numbers the classifier gives for each input."""
        with torch.no_grad():
            network = fresh(self._make, Generator().manual_seed(0)).to(inputs.dtype).eval()
            return int(network(inputs[:1].cpu()).shape[-1])

    def both_features(self, parameters: Parameters, coreset: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """Features of coreset `(n, h)` and real batch `(b, h)`, as a network has them that was trained on the coreset.

        BatchNorm uses the coreset's statistics for both, and the gradient runs through the real batch into these.
        Without BatchNorm nothing in the real batch's pass depends on the coreset, and no gradient is kept.
        """
        if not self.has_batch_norm:
            with torch.no_grad():
                seen = self.features(parameters, real)
            return self.features(parameters, coreset), seen
        rows = len(coreset)
        if rows not in self._by_rows:
            self._by_rows[rows] = self._pass(self._trunk, rows)
        both = self._by_rows[rows](parameters, torch.cat([coreset, real]))
        return both[:rows], both[rows:]

    def _pass(self, module: nn.Module, rows: int | None = None) -> Pass:
        """A module as a function of parameters and inputs, flat outputs; buffers are copies."""
        names, last = [name for name, _ in module.named_parameters()], self._compiled

        def run(parameters: Parameters, inputs: Tensor) -> Tensor:
            values = {name: _channels_last(parameters[name]) if last else parameters[name] for name in names}
            values |= {name: buffer.to(inputs.device, copy=True) for name, buffer in module.named_buffers()}
            seen = (_channels_last(inputs) if last else inputs,)
            half = torch.autocast(inputs.device.type, torch.bfloat16, enabled=self._precision == "bf16")
            with half, FirstRowsStatistics(rows) if rows is not None else nullcontext():
                outputs: Tensor = functional_call(module, values, seen)
            return outputs.flatten(1).to(inputs.dtype)

        # code of its own, since torch.compile keeps eight variants of a piece of code, for all distillers of a process
        own = FunctionType(run.__code__.replace(), run.__globals__, closure=run.__closure__)
        return torch.compile(own, dynamic=False) if self._compiled else run


class FirstRowsStatistics(TorchFunctionMode):
    """Inside, BatchNorm in training mode normalises all rows by mean and variance of the first `rows` of them."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replaces `batch_norm`, wherever it is called; the rest is as it was."""
        if func is functional.batch_norm:
            return _batch_norm(self.rows, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _batch_norm(
    rows: int,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not training:
        return functional.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    full = torch.promote_types(input.dtype, torch.float32)  # statistics, also of bf16
    var, mean = torch.var_mean(input[:rows].to(full), [0, *range(2, input.ndim)], correction=0)
    scale = (var + eps).rsqrt() if weight is None else weight * (var + eps).rsqrt()
    shift = -mean * scale if bias is None else bias - mean * scale
    column = (-1, *[1] * (input.ndim - 2))
    return input * scale.view(column).to(input.dtype) + shift.view(column).to(input.dtype)


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor
