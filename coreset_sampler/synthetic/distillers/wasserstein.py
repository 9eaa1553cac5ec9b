"""BPC-W: training on the coreset should end where training on the full data does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import inner, pixels
from .expert_matching import ExpertMatching
from .state import DivergedError, Info, Source, State


@dataclass(frozen=True, kw_only=True)
class Wasserstein(ExpertMatching):
    r"""Minimises the 2-Wasserstein distance between the posteriors of the full data and of the coreset.

    Taken for Gaussians of one covariance around $\theta_x$, an expert's parameters, and $\theta_u$, where `inner_steps` of
    SGD on the coreset lead from the expert's start $\theta_0$, it is their distance, normalised as

    $$\lVert \theta_u - \theta_x \rVert^2 / \lVert \theta_0 - \theta_x \rVert^2$$

    (Kim, Choi, Lee, Lee, Ha, Lee 2022, equation 15; the objective of MTT, Cazenavette et al. 2022). The gradient goes
    back through all inner steps and also moves the inner learning rate. `recompute` keeps the parameters of each step and
    nothing else of it, and runs the step again on the way back: the memory of one step and `inner_steps` parameter
    vectors; without it the graphs of all steps are kept. The gradient is the same up to rounding.

    Args:
        loss: outputs and targets to a mean over the examples.
        epochs: how many epochs after the start the expert is that the coreset should lead to.
        inner_lr: where the learned inner learning rate begins.
        inner_lr_lr: the learning rate of the inner learning rate (MTT's `lr_lr`); 0 leaves it as it is.
        recompute: trade a third more time for the memory of one step.
        network, inner_steps, lr, momentum, augmentation, bounds: as for every method that learns from experts
            (`ExpertMatching`).
    """

    loss: inner.Loss = functional.cross_entropy
    epochs: int = 2
    inner_lr: float = 0.01
    inner_lr_lr: float = 1e-7
    recompute: bool = True
    name: ClassVar[str] = "wasserstein"

    def init(self, inputs: Tensor, targets: Tensor, *, seed: int = 0) -> State:
        """The state before the first step."""
        inner_lr = inputs.new_tensor(self.inner_lr, dtype=torch.promote_types(inputs.dtype, torch.float32))
        return pixels.begin(inputs, targets, seed, inner_lr=inner_lr, inner_lr_momentum=torch.zeros_like(inner_lr))

    def step(self, state: State, source: Source) -> tuple[State, Info]:
        """One update of the inputs and of the inner learning rate."""
        generator = state.generator()
        start, expert = self._segment(source, state, self.epochs, generator)
        draws = torch.randint(2**62, (self.inner_steps,), generator=generator).tolist()
        distance = self.recomputed if self.recompute else self.unrolled
        with sdpa_kernel(SDPBackend.MATH):  # the other kinds of attention can be differentiated but once
            value, gradient, lr_gradient = distance(state, start, expert, draws)
        velocity = self.momentum * state.memory["inner_lr_momentum"] + lr_gradient
        inner_lr = state.memory["inner_lr"] - self.inner_lr_lr * velocity
        lower = {"lr": self.lr, "inner_lr_lr": self.inner_lr_lr, "inner_lr": self.inner_lr}
        memory = {"inner_lr": inner_lr, "inner_lr_momentum": velocity}
        moved = pixels.move(
            state, gradient, lr=self.lr, momentum=self.momentum, bounds=self.bounds, lower=lower, **memory
        )
        if inner_lr <= 0:
            raise DivergedError(
                f"the inner learning rate fell to {float(inner_lr):g} at step {state.step}: lower inner_lr_lr "
                f"(now {self.inner_lr_lr:g}), and go on from before it"
            )
        return moved, pixels.figures(loss=value, gradient=gradient.norm(), inner_lr=inner_lr)

    def unrolled(self, state: State, start: Tensor, expert: Tensor, draws: list[int]) -> tuple[float, Tensor, Tensor]:
        """The distance and its gradients for inputs and learning rate, by one graph through all steps."""
        inputs, inner_lr = (value.detach().requires_grad_() for value in (state.inputs, state.memory["inner_lr"]))
        theta = start.detach().requires_grad_()
        for draw in draws:
            theta = theta - inner_lr * self._gradient(state, theta, inputs, draw)
        value = _distance(theta, start, expert)
        gradient, lr_gradient = torch.autograd.grad(value, (inputs, inner_lr))
        return float(value.detach()), gradient, lr_gradient

    def recomputed(self, state: State, start: Tensor, expert: Tensor, draws: list[int]) -> tuple[float, Tensor, Tensor]:
        r"""The same with the graph of one step at a time.

        Back through $\theta' = \theta - r\,g(\theta, u)$ a gradient $\lambda$ becomes
        $\lambda - r\,\partial_\theta (\lambda \cdot g)$ and leaves $-r\,\partial_u (\lambda \cdot g)$ for the inputs and
        $-\lambda \cdot g$ for the learning rate.
        """
        inputs, inner_lr = state.inputs.detach().requires_grad_(), state.memory["inner_lr"]
        thetas = [start.detach().clone()]
        for draw in draws:
            step = self._gradient(state, thetas[-1].requires_grad_(), state.inputs, draw, graph=False)
            thetas.append(thetas[-1].detach() - inner_lr * step)
        last = thetas.pop().requires_grad_()
        value = _distance(last, start, expert)
        (adjoint,) = torch.autograd.grad(value, last)
        gradient, lr_gradient = torch.zeros_like(inputs), torch.zeros_like(inner_lr)
        for draw in reversed(draws):
            theta = thetas.pop()
            slope = adjoint @ self._gradient(state, theta, inputs, draw)
            of_theta, of_inputs = torch.autograd.grad(slope, (theta, inputs))
            gradient -= inner_lr * of_inputs
            lr_gradient -= slope.detach()
            adjoint = adjoint - inner_lr * of_theta
        return float(value.detach()), gradient, lr_gradient

    def _gradient(self, state: State, theta: Tensor, inputs: Tensor, draw: int, *, graph: bool = True) -> Tensor:
        """The gradient for the parameters, itself differentiable with `graph`."""
        if self.augmentation is not None:
            inputs = self.augmentation(inputs, Generator().manual_seed(draw))
        loss = self.loss(self.flat(state)(theta, inputs), state.targets)
        (gradient,) = torch.autograd.grad(loss, theta, create_graph=graph)
        return gradient

    def describe(self, state: State) -> dict[str, Any]:
        """The learned learning rate is the one to train on the coreset with."""
        inner_lr = float(state.memory["inner_lr"])
        return {"target_kind": pixels.target_kind(state.targets), "learning_rate": inner_lr}


def _distance(theta: Tensor, start: Tensor, expert: Tensor) -> Tensor:
    return (theta - expert).square().sum() / (start - expert).square().sum()
