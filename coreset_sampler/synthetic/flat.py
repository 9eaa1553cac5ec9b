"""A network as a function of one flat vector of parameters, which is what posteriors and trajectories are about."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.func import functional_call


class FlatNetwork:
    """Runs a network at any parameters `theta` `(size,)`, differentiably in both `theta` and the inputs.

    The network given is only read: its buffers (BatchNorm statistics) are used as copies, and what a forward does to
    them is lost. It runs in the mode that it is in.

    Example:
        >>> flat = FlatNetwork(network)
        >>> logits = flat(flat.theta(), x)
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.names = [name for name, _ in network.named_parameters()]
        self.shapes = [parameter.shape for parameter in network.parameters()]
        self.sizes = [math.prod(shape) for shape in self.shapes]
        self.size = sum(self.sizes)

    def theta(self, tensors: Iterable[Tensor] | None = None) -> Tensor:
        """The flat vector of these tensors, in the order of the network's parameters; of the network's own by default."""
        parts = [p.detach() for p in self.network.parameters()] if tensors is None else list(tensors)
        return torch.cat([part.reshape(-1) for part in parts])

    def parameters(self, theta: Tensor) -> dict[str, Tensor]:
        """Views into the vector by parameter name."""
        parts = theta.split(self.sizes)
        return {name: part.view(shape) for name, part, shape in zip(self.names, parts, self.shapes, strict=True)}

    def __call__(self, theta: Tensor, inputs: Tensor) -> Tensor:
        """The network's outputs at these parameters."""
        values = self.parameters(theta)
        values |= {name: buffer.to(theta.device, copy=True) for name, buffer in self.network.named_buffers()}
        outputs: Tensor = functional_call(self.network, values, (inputs,))
        return outputs
