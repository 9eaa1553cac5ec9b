"""VBPC: the coreset's closed-form posterior over the last layer should predict the full data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from ..dataset import on_simplex
from ..inference.last_layer import LastLayerPosterior, features_of
from ..networks import Network, fresh
from . import adam, pixels
from .augment import Augmentation
from .state import DivergedError, Info, Source, State

Pass = Callable[[dict[str, Tensor], Tensor], Tensor]


@dataclass(frozen=True)
class Variational:
    r"""Minimises the variational free energy of the full data under the last layer that the coreset determines.

    For features $\phi$ of a network from the pool, coreset images and targets give $q(W)$ in closed form
    (`LastLayerPosterior`), and a step of Adam on both descends, on a batch of the n real examples,

    $$\tfrac1{|B|} \sum_{(x, y) \in B} -\log \mathrm{softmax}_y\frac{m(x)}{\sqrt{1 + \frac\pi8 v(x)}}
    + \tfrac{w}{n}\,\mathrm{KL}(q \| p)$$

    (Lee, Lee, Lee 2025, equation 27, divided by n). Then the network that was used takes one step of Adam on the coreset
    with the Gaussian likelihood; at `max_age` of them a fresh one takes its place. Ages begin `max_age / pool` apart.

    Time: the coreset forward and back twice and the real batch forward once, as no gradient goes through it. Memory:
    one pass over the coreset, and three copies of each network of the pool. Learned targets fit the squared error.

    Args:
        network: makes a fresh classifier.
        rho, gamma, beta: prior precision, likelihood precision and weight of the KL term for the coreset: only
            `rho * beta / gamma` matters to the mean, only `rho` to the size of the variance.
        weight: of the KL term in the loss over the full data; 1 is the free energy itself, whose prior is strong where n
            is small.
        label_scale: targets begin as centred one-hot vectors times this.
        lr, label_lr: of Adam on the images and on the targets.
        decay: steps over which both fall to a hundredth, along a cosine; without it they stay.
        batch: real examples in a step.
        pool, max_age, pool_lr: networks, steps in the life of each, and Adam's learning rate for them.
        train_every: steps between two of the pool: more spends less on networks and more on the coreset.
        fit_steps: that a new network takes on the finished coreset before its last layer is solved for.
        augmentation: changes real images and coreset alike, by the same draw.
        compiled: runs the networks through `torch.compile`, channels last: on CPUs about twice as fast after a minute of
            compiling.
    """

    network: Network
    _: KW_ONLY
    rho: float = 100.0
    gamma: float = 1.0
    beta: float = 1e-4
    weight: float = 0.01
    label_scale: float = 5.0
    lr: float = 0.1
    label_lr: float = 0.1
    decay: int | None = None
    batch: int = 128
    pool: int = 10
    max_age: int = 100
    pool_lr: float = 1e-3
    train_every: int = 1
    fit_steps: int = 100
    augmentation: Augmentation | None = None
    compiled: bool = False
    name: ClassVar[str] = "vbpc"

    def __post_init__(self) -> None:
        pixels.check_settings(self)

    def init(self, inputs: Tensor, targets: Tensor, *, seed: int = 0) -> State:
        """The state before the first step: these examples, their targets centred and scaled, a pool of fresh networks."""
        begun = pixels.begin(inputs, targets, seed)
        generator = Generator().manual_seed(begun.generator().initial_seed() ^ 0x5EED)
        memory = adam.begin("inputs", begun.inputs)
        for i in range(self.pool):
            memory |= self._newborn(i, generator, inputs)
        memory["ages"] = torch.arange(self.pool) * self.max_age // self.pool
        with torch.no_grad():
            num_classes = fresh(self.network, generator).to(inputs.dtype).eval()(inputs[:1].cpu()).shape[-1]
        learned = self.label_scale * _centred(targets, num_classes).to(inputs)
        return replace(begun, targets=learned, memory=memory | adam.begin("targets", learned))

    def step(self, state: State, source: Source) -> tuple[State, Info]:
        """One update of inputs and targets, and one of the network that was looked through."""
        generator = state.generator()
        chosen = int(torch.randint(self.pool, (), generator=generator))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(torch.randint(2**62, (), generator=generator)))  # dropout
            gradients, info = self._look(state, chosen, source, generator)
            state = self._move(state, gradients)
            if state.step % self.train_every == 0:
                state = self._train(state, chosen, generator)
        return replace(state, step=state.step + 1), info

    def describe(self, state: State) -> dict[str, Any]:
        """Targets are for squared error; `last_layer` is what `inference.by_last_layer` needs."""
        numbers = {name: getattr(self, name) for name in ("rho", "gamma", "beta")}
        fit = {"steps": self.fit_steps, "learning_rate": self.pool_lr}
        return {"target_kind": "regression", "last_layer": numbers | fit}

    def loss(self, features: Tensor, targets: Tensor, real: Tensor, labels: Tensor, n: int) -> tuple[Tensor, Info]:
        """The objective, by features of the coreset `(n, h)` and of real examples `(b, h)`; differentiable."""
        posterior = LastLayerPosterior(features, targets, rho=self.rho, gamma=self.gamma, beta=self.beta)
        logits = posterior.logits(real)
        cross_entropy = functional.cross_entropy(logits, labels.to(logits) if labels.ndim == 2 else labels)
        kl = posterior.kl()
        right = logits.argmax(-1) == (labels.argmax(-1) if labels.ndim == 2 else labels)
        figures = pixels.figures(cross_entropy=cross_entropy.detach(), kl=kl.detach(), accuracy=right.double().mean())
        return cross_entropy + self.weight / n * kl, figures

    def _look(self, state: State, chosen: int, source: Source, generator: Generator) -> tuple[tuple[Tensor, ...], Info]:
        """The gradients of the loss in inputs and targets, through one network."""
        parameters = self._parameters(state.memory, chosen)
        real, labels = source.batch(self.batch, generator)
        inputs, targets = (value.detach().requires_grad_() for value in (state.inputs, state.targets))
        seen, real = self._augmented(generator, inputs, real.to(inputs))
        with torch.no_grad():
            real = self._features(parameters, real)
        try:
            loss, info = self.loss(self._features(parameters, seen), targets, real, labels.to(real.device), source.n)
        except ValueError as error:
            raise self._diverged(state, str(error)) from error
        gradients = torch.autograd.grad(loss, (inputs, targets))
        if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
            raise self._diverged(state, "a gradient is NaN or infinite")
        return gradients, {"loss": float(loss.detach()), **info}

    def _move(self, state: State, gradients: tuple[Tensor, ...]) -> State:
        share = 1.0 if self.decay is None else min(1.0, state.step / self.decay)
        fall = 0.01 + 0.99 * (1 + math.cos(math.pi * share)) / 2
        count = state.step + 1
        inputs, memory = adam.move("inputs", state.inputs, gradients[0], state.memory, lr=self.lr * fall, count=count)
        targets, more = adam.move(
            "targets", state.targets, gradients[1], state.memory, lr=self.label_lr * fall, count=count
        )
        return replace(state, inputs=inputs, targets=targets, memory=state.memory | memory | more)

    def _train(self, state: State, chosen: int, generator: Generator) -> State:
        """One step of Adam on the coreset for this network, or a fresh one if it is too old."""
        ages, memory = state.memory["ages"].clone(), dict(state.memory)
        ages[chosen] += 1
        if ages[chosen] >= self.max_age:
            ages[chosen] = 0
            memory |= self._newborn(chosen, generator, state.inputs)
        else:
            memory |= self._trained(state, chosen, generator)
        return replace(state, memory=memory | {"ages": ages})

    def _trained(self, state: State, chosen: int, generator: Generator) -> dict[str, Tensor]:
        name = f"network.{chosen}"
        theta = state.memory[name].detach().requires_grad_()
        (seen,) = self._augmented(generator, state.inputs)
        error = functional.mse_loss(self._outputs(self._parameters({name: theta}, chosen), seen), state.targets)
        (gradient,) = torch.autograd.grad(error, theta)
        count = state.memory[f"{name}.count"] + 1
        moved, memory = adam.move(name, theta.detach(), gradient, state.memory, lr=self.pool_lr, count=int(count))
        if not bool(torch.isfinite(moved).all()):
            raise self._diverged(state, "a network of the pool holds NaN or infinity")
        return memory | {name: moved, f"{name}.count": count}

    def _newborn(self, chosen: int, generator: Generator, like: Tensor) -> dict[str, Tensor]:
        name, network = f"network.{chosen}", fresh(self.network, generator)
        theta = torch.cat([p.detach().reshape(-1) for p in network.parameters()]).to(like)
        return {name: theta, f"{name}.count": torch.tensor(0), **adam.begin(name, theta)}

    def _augmented(self, generator: Generator, *batches: Tensor) -> tuple[Tensor, ...]:
        if self.augmentation is None:
            return batches
        draw = int(torch.randint(2**62, (), generator=generator))
        return tuple(self.augmentation(batch, Generator().manual_seed(draw)) for batch in batches)

    def _parameters(self, memory: dict[str, Tensor], chosen: int) -> dict[str, Tensor]:
        """Views into a network of the pool by parameter name."""
        shapes = {name: p.shape for name, p in self._template.named_parameters()}
        parts = memory[f"network.{chosen}"].split([math.prod(shape) for shape in shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}

    @cached_property
    def _template(self) -> nn.Module:
        """Says which parameters there are; what weights it was made with does not matter."""
        return fresh(self.network, Generator().manual_seed(0))

    @cached_property
    def _outputs(self) -> Pass:
        return self._pass(self._template)

    @cached_property
    def _features(self) -> Pass:
        return self._pass(features_of(self._template))

    def _pass(self, module: nn.Module) -> Pass:
        """A module as a function of parameters and inputs, flat outputs; buffers are copies."""
        names, last = [name for name, _ in module.named_parameters()], self.compiled

        def run(parameters: dict[str, Tensor], inputs: Tensor) -> Tensor:
            values = {name: _channels_last(parameters[name]) if last else parameters[name] for name in names}
            buffers = {name: buffer.to(inputs.device, copy=True) for name, buffer in module.named_buffers()}
            outputs: Tensor = functional_call(module, values | buffers, (_channels_last(inputs) if last else inputs,))
            return outputs.flatten(1)

        # code of its own, since torch.compile keeps eight variants of a piece of code, for all distillers of a process
        own = FunctionType(run.__code__.replace(), run.__globals__, closure=run.__closure__)
        return torch.compile(own, dynamic=False) if self.compiled else run

    def _diverged(self, state: State, why: str) -> DivergedError:
        lower = f"lower lr (now {self.lr:g}), label_lr (now {self.label_lr:g}) or pool_lr (now {self.pool_lr:g})"
        return DivergedError(f"step {state.step}: {why}: {lower}, and go on from before it")


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


def _centred(targets: Tensor, num_classes: int) -> Tensor:
    """Class numbers or probabilities as vectors `(n, num_classes)` that sum to zero."""
    if targets.ndim == 1 and not targets.is_floating_point():
        if int(targets.min()) < 0 or int(targets.max()) >= num_classes:
            found = f"{int(targets.min())}..{int(targets.max())}"
            raise ValueError(
                f"targets must be classes 0..{num_classes - 1}, which the network has outputs for, got {found}"
            )
        return functional.one_hot(targets.long(), num_classes).float() - 1 / num_classes
    if targets.ndim != 2 or targets.shape[1] != num_classes or not on_simplex(targets):
        raise ValueError(
            f"targets must be class numbers (n,) or probabilities (n, {num_classes}), got {targets.dtype} "
            f"{tuple(targets.shape)}"
        )
    return targets - 1 / num_classes
