"""VBPC: the coreset's closed-form posterior over the last layer should predict the full data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Generator, Tensor
from torch.nn import functional

from ...randomness import seeded
from ..inference.last_layer import LastLayerPosterior
from ..networks import Network, makers
from ..tiles import pack, unpack
from . import adam, pixels
from .augment import Augmentation
from .beginning import Bounds, bounded, check_bounds, learned_targets
from .pool import PoolNetwork, Precision
from .state import DivergedError, Info, Source, State

PoolLoss = Literal["squared", "cross-entropy"]


@dataclass(frozen=True)
class Variational:
    r"""Minimises the variational free energy of the full data under the last layer that the coreset determines.

    For features $\phi$ of a network from the pool, coreset images and targets give $q(W)$ in closed form
    (`LastLayerPosterior`), and a step of Adam on both descends, on a batch of the n real examples,

    $$\tfrac1{|B|} \sum_{(x, y) \in B} -\log \mathrm{softmax}_y\frac{m(x)}{\sqrt{1 + \frac\pi8 v(x)}}
    + \tfrac{w}{n}\,\mathrm{KL}(q \| p)$$

    (Lee, Lee, Lee 2025, equation 27, divided by n). Then the network that was used takes one step of Adam on the coreset
    with the Gaussian likelihood; at `max_age` of them a fresh one takes its place. Ages begin `max_age / pool` apart.

    BatchNorm has the coreset's statistics for coreset and real batch alike, as in a network that was trained on the
    coreset; so the loss pulls these statistics to where real images need them.

    Time: the coreset forward and back twice and the real batch forward once, as no gradient goes through it (with
    BatchNorm it does). Memory: one pass over the coreset, and three copies of each network of the pool. Learned targets
    fit the squared error.

    Args:
        network: makes a fresh classifier; or several such makers, one of which is drawn for every newborn, of the
            kinds that the pool has fewest of.
        rho, gamma, beta: prior precision, likelihood precision and weight of the KL term for the coreset: only
            `rho * beta / gamma` matters to the mean, only `rho` to the size of the variance.
        weight: of the KL term in the loss over the full data; 1 is the free energy itself, whose prior is strong where n
            is small.
        label_scale: targets begin as centred one-hot vectors times this.
        lr, label_lr: of Adam on the images and on the targets.
        decay: steps over which both fall to a hundredth, along a cosine; without it they stay.
        batch: real examples in a step.
        pool, max_age, pool_lr: networks, steps in the life of each, and Adam's learning rate for them.
        pool_loss: that they take these steps on: the squared error, or the cross-entropy to the softmax of the targets.
        train_every: steps between two of the pool: more spends less on networks and more on the coreset.
        fit_steps: that a new network takes on the finished coreset before its last layer is solved for.
        augmentation: changes real images and coreset alike, by the same draw.
        bounds: the lowest and the highest value of each channel, to which images are clamped after every step.
        compiled: runs the networks through `torch.compile`, channels last: on CPUs about twice as fast after a minute of
            compiling.
        precision: of the networks' passes, `"float32"` or `"bf16"`; the closed form is in float64 in any case.
        tiles: a stored image holds `tiles**2` examples, each with a target of its own (`synthetic.tiles`).
        images_per_step: stored images that a step looks at and trains on, drawn evenly over all; all of them if not said.
    """

    network: Network | Sequence[Network]
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
    pool_loss: PoolLoss = "squared"
    train_every: int = 1
    fit_steps: int = 100
    augmentation: Augmentation | None = None
    bounds: Bounds | None = None
    compiled: bool = False
    precision: Precision = "float32"
    tiles: int = 1
    images_per_step: int | None = None
    name: ClassVar[str] = "vbpc"

    def __post_init__(self) -> None:
        pixels.check_settings(self)
        makers(self.network)
        if self.pool_loss not in get_args(PoolLoss):
            raise ValueError(f"pool_loss must be one of {', '.join(get_args(PoolLoss))}, got {self.pool_loss!r}")
        if self.precision not in get_args(Precision):
            raise ValueError(f"precision must be one of {', '.join(get_args(Precision))}, got {self.precision!r}")
        check_bounds(self.bounds)

    def init(self, inputs: Tensor, targets: Tensor, *, seed: int = 0) -> State:
        """The state before the first step: these examples, their targets centred and scaled, a pool of fresh networks.

        Targets are class numbers or probabilities. With `tiles` the examples, neighbours together, are packed into images.
        """
        num_classes = self._num_classes(inputs)
        learned = learned_targets(targets, num_classes, self.label_scale).to(inputs)
        begun = pixels.begin(inputs, targets, seed)
        begun = replace(begun, inputs=pack(begun.inputs, self.tiles)) if self.tiles > 1 else begun
        generator = Generator().manual_seed(begun.generator().initial_seed() ^ 0x5EED)
        memory = adam.begin("inputs", begun.inputs)
        kinds: list[int] = []
        for i in range(self.pool):
            kinds.append(self._draw_kind(generator, kinds))
            memory |= self._newborn(i, generator, inputs, kinds[-1])
        memory["ages"] = torch.arange(self.pool) * self.max_age // self.pool
        memory |= {"kinds": torch.tensor(kinds)} if len(self._kinds) > 1 else {}
        return replace(begun, targets=learned, memory=memory | adam.begin("targets", learned))

    def step(self, state: State, source: Source) -> tuple[State, Info]:
        """One update of inputs and targets, and one of the network that was looked through."""
        if len(state.targets) != len(state.inputs) * self.tiles**2:
            raise ValueError(
                f"tiles must be what the run began with: {self.tiles} makes {self.tiles**2} examples of an image, and the "
                f"state has {len(state.inputs)} images and {len(state.targets)} targets"
            )
        generator = state.generator()
        chosen = int(torch.randint(self.pool, (), generator=generator))
        dropout = int(torch.randint(2**62, (), generator=generator))
        with seeded(dropout, [state.inputs.device]):
            gradients, info = self._look(state, chosen, source, generator)
            state = self._move(state, gradients)
            if state.step % self.train_every == 0:
                state = self._train(state, chosen, generator)
        return replace(state, step=state.step + 1), info

    def describe(self, state: State) -> dict[str, Any]:
        """Targets are for squared error; `last_layer` is what `inference.by_last_layer` needs."""
        numbers = {name: getattr(self, name) for name in ("rho", "gamma", "beta")}
        fit = {"steps": self.fit_steps, "learning_rate": self.pool_lr}
        tiles = {"tiles": self.tiles} if self.tiles > 1 else {}
        return {"target_kind": "regression", "last_layer": numbers | fit, **tiles}

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
        kind = self._kind(state.memory, chosen)
        parameters = kind.parameters(state.memory[f"network.{chosen}"])
        real, labels = source.batch(self.batch, generator)
        inputs, targets = (value.detach().requires_grad_() for value in (state.inputs, state.targets))
        seen, of_seen = self._examples(inputs, targets, generator)
        seen, real = self._augmented(generator, seen, real.to(inputs))
        features, real = kind.both_features(parameters, seen, real)
        try:
            loss, info = self.loss(features, of_seen, real, labels.to(real.device), source.n)
        except ValueError as error:
            raise self._diverged(state, str(error)) from error
        gradients = torch.autograd.grad(loss, (inputs, targets))
        if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
            raise self._diverged(state, "a gradient is NaN or infinite")
        return gradients, {"loss": float(loss.detach()), **info}

    def _examples(self, inputs: Tensor, targets: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        """What a step looks at: the examples in some or all of the images, and their targets."""
        each, n, some = self.tiles**2, len(inputs), self.images_per_step
        if some is not None and some < n:
            edges = torch.arange(some + 1) * n // some  # one of each stretch, so that no class is left out
            rows = (
                (edges[:-1] + torch.rand(some, generator=generator) * (edges[1:] - edges[:-1])).long().to(inputs.device)
            )
            inputs, targets = inputs[rows], targets.unflatten(0, (n, each))[rows].flatten(0, 1)
        return unpack(inputs, self.tiles) if self.tiles > 1 else inputs, targets

    def _move(self, state: State, gradients: tuple[Tensor, ...]) -> State:
        share = 1.0 if self.decay is None else min(1.0, state.step / self.decay)
        fall = 0.01 + 0.99 * (1 + math.cos(math.pi * share)) / 2
        count = state.step + 1
        inputs, memory = adam.move("inputs", state.inputs, gradients[0], state.memory, lr=self.lr * fall, count=count)
        targets, more = adam.move(
            "targets", state.targets, gradients[1], state.memory, lr=self.label_lr * fall, count=count
        )
        return replace(state, inputs=bounded(inputs, self.bounds), targets=targets, memory=state.memory | memory | more)

    def _train(self, state: State, chosen: int, generator: Generator) -> State:
        """One step of Adam on the coreset for this network, or a fresh one if it is too old."""
        ages, memory = state.memory["ages"].clone(), dict(state.memory)
        ages[chosen] += 1
        if ages[chosen] >= self.max_age:
            others = (
                [kind for i, kind in enumerate(memory["kinds"].tolist()) if i != chosen] if "kinds" in memory else []
            )
            ages[chosen], kind = 0, self._draw_kind(generator, others)
            memory |= self._newborn(chosen, generator, state.inputs, kind)
            if "kinds" in memory:
                memory["kinds"] = memory["kinds"].index_fill(0, torch.tensor(chosen), kind)
        else:
            memory |= self._trained(state, chosen, generator)
        return replace(state, memory=memory | {"ages": ages})

    def _trained(self, state: State, chosen: int, generator: Generator) -> dict[str, Tensor]:
        name, kind = f"network.{chosen}", self._kind(state.memory, chosen)
        theta = state.memory[name].detach().requires_grad_()
        seen, targets = self._examples(state.inputs, state.targets, generator)
        (seen,) = self._augmented(generator, seen)
        outputs = kind.outputs(kind.parameters(theta), seen)
        error = functional.mse_loss(outputs, targets)
        if self.pool_loss == "cross-entropy":
            error = functional.cross_entropy(outputs, targets.softmax(-1))
        (gradient,) = torch.autograd.grad(error, theta)
        count = state.memory[f"{name}.count"] + 1
        moved, memory = adam.move(name, theta.detach(), gradient, state.memory, lr=self.pool_lr, count=int(count))
        if not bool(torch.isfinite(moved).all()):
            raise self._diverged(state, "a network of the pool holds NaN or infinity")
        return memory | {name: moved, f"{name}.count": count}

    def _newborn(self, chosen: int, generator: Generator, like: Tensor, kind: int) -> dict[str, Tensor]:
        name, theta = f"network.{chosen}", self._kinds[kind].newborn(generator, like)
        return {name: theta, f"{name}.count": torch.tensor(0), **adam.begin(name, theta)}

    def _num_classes(self, inputs: Tensor) -> int:
        """The outputs of the networks, which all kinds must agree on."""
        outputs = [kind.num_outputs(inputs) for kind in self._kinds]
        if len(set(outputs)) > 1:
            raise ValueError(f"all networks must have the same number of outputs, got {outputs}")
        return outputs[0]

    def _draw_kind(self, generator: Generator, others: Sequence[int]) -> int:
        """One of the kinds that the others in the pool have fewest of: at random alone, some would be missing for long."""
        if len(self._kinds) == 1:
            return 0
        counts = torch.bincount(torch.tensor(others, dtype=torch.long), minlength=len(self._kinds))
        fewest = (counts == counts.min()).nonzero().flatten()
        return int(fewest[int(torch.randint(len(fewest), (), generator=generator))])

    def _kind(self, memory: dict[str, Tensor], chosen: int) -> PoolNetwork:
        """Of a network in the pool; `kinds` is remembered only where there are several."""
        return self._kinds[int(memory["kinds"][chosen]) if "kinds" in memory else 0]

    @cached_property
    def _kinds(self) -> tuple[PoolNetwork, ...]:
        return tuple(
            PoolNetwork(make, compiled=self.compiled, precision=self.precision) for make in makers(self.network)
        )

    def _augmented(self, generator: Generator, *batches: Tensor) -> tuple[Tensor, ...]:
        if self.augmentation is None:
            return batches
        draw = int(torch.randint(2**62, (), generator=generator))
        return tuple(self.augmentation(batch, Generator().manual_seed(draw)) for batch in batches)

    def _diverged(self, state: State, why: str) -> DivergedError:
        lower = f"lower lr (now {self.lr:g}), label_lr (now {self.label_lr:g}) or pool_lr (now {self.pool_lr:g})"
        return DivergedError(f"step {state.step}: {why}: {lower}, and go on from before it")
