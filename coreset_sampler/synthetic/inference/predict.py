"""Predictive probabilities from a coreset: train, sample or solve on it, then average over what was found.

Each `by_*` takes settings and gives an `Inference`, a function of a coreset, a maker of networks and a seed. Its
answer, a `Predictive`, maps test inputs to probabilities and may be asked as often as one likes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from ...randomness import seeded
from ..checks import check_positive
from ..dataset import SyntheticCoreset
from ..fitting import as_taken_by, logits_of
from ..flat import FlatNetwork
from ..networks import Network, fresh
from .hmc import hmc
from .last_layer import LastLayerPosterior, features_of
from .potential import Augment, Report, longest_stable_step, network_potential, tensors_of
from .sghmc import sghmc

Predictive = Callable[[Tensor], Tensor]
"""Test inputs `(t, ...)`, preprocessed as the coreset is, to probabilities `(t, k)` of the model average."""

Inference = Callable[[SyntheticCoreset, Network, int], Predictive]
"""Coreset, maker of networks and seed to what was inferred."""

Start = Callable[[SyntheticCoreset, Network, Generator], nn.Module]
"""Finds the network that a chain starts from; `partial(train, steps=..., learning_rate=...)`."""

_AT_ONCE = 250  # test inputs in memory as activations together


def by_sgd(
    *,
    networks: int = 1,
    steps: int = 200,
    learning_rate: float = 0.02,
    momentum: float = 0.9,
    weight_decay: float = 5e-4,
    batch_size: int = 256,
    augment: Augment | None = None,
) -> Inference:
    """Networks trained on the coreset with `coreset.loss` by SGD; several make a deep ensemble.

    The learning rate falls to zero along a cosine. A `learning_rate` that the coreset has is not taken: it was learned for
    other training (plain SGD in BPC, steps of decay in MTT and DATM); pass it to have it. Regression targets are fitted
    by squared error and the outputs then taken for logits.
    """
    _positive(networks=networks, steps=steps, learning_rate=learning_rate, batch_size=batch_size)
    fit = partial(
        train,
        steps=steps,
        learning_rate=learning_rate,
        momentum=momentum,
        weight_decay=weight_decay,
        batch_size=batch_size,
        augment=augment,
    )

    def infer(coreset: SyntheticCoreset, make: Network, seed: int) -> Predictive:
        generator = torch.Generator().manual_seed(seed)
        trained = [fit(coreset, make, generator) for _ in range(networks)]
        return partial(averaged, trained[0], [network.eval() for network in trained])

    return infer


def by_hmc(
    *,
    steps: int = 60,
    leapfrog: int = 5,
    step_size: float = 0.03,
    burn_in: int = 30,
    thin: int = 3,
    weight_decay: float = 0.1,
    temperature: float = 1e-3,
    target_acceptance: float | None = 0.8,
    start: Start | None = None,
    report: Report | None = None,
) -> Inference:
    r"""The model average over HMC samples of all parameters, from the network that SGD (or `start`) finds.

    Samples the density $\propto e^{-U/T}$ with `network_potential`'s $U = \sum_i \ell_i + \lambda\|\theta\|^2$. Steps
    are measured as at `temperature` 1, momenta being $N(0, T)$, and begin at half of the longest stable one at most.
    """
    _positive(temperature=temperature, step_size=step_size)

    def sample(coreset: SyntheticCoreset, network: FlatNetwork, seed: int) -> Tensor:
        potential = network_potential(coreset, network, weight_decay=weight_decay)
        return hmc(
            lambda theta: potential(theta) / temperature,
            network.theta(),
            steps=steps,
            leapfrog=leapfrog,
            step_size=_short_enough(step_size, coreset, network, weight_decay) * math.sqrt(temperature),
            burn_in=burn_in,
            thin=thin,
            target_acceptance=target_acceptance,
            seed=seed,
            report=report,
        )

    return partial(_sampled, sample, start)


def by_sghmc(
    *,
    steps: int = 300,
    step_size: float = 0.03,
    friction: float = 0.1,
    burn_in: int = 150,
    thin: int = 15,
    weight_decay: float = 0.1,
    temperature: float = 1e-3,
    augment: Augment | None = None,
    start: Start | None = None,
    report: Report | None = None,
) -> Inference:
    """The model average over SGHMC samples of all parameters, from the network that SGD (or `start`) finds.

    With `augment` every gradient sees the coreset changed at random: the A-SGHMC of Kim et al. 2022. The step
    size is shortened to half of the longest stable one at the start.
    """

    def sample(coreset: SyntheticCoreset, network: FlatNetwork, seed: int) -> Tensor:
        potential = network_potential(coreset, network, weight_decay=weight_decay, augment=augment, seed=seed)
        return sghmc(
            potential,
            network.theta(),
            steps=steps,
            step_size=_short_enough(step_size, coreset, network, weight_decay),
            friction=friction,
            burn_in=burn_in,
            thin=thin,
            temperature=temperature,
            seed=seed,
            report=report,
        )

    return partial(_sampled, sample, start)


def by_last_layer(
    *,
    steps: int = 100,
    learning_rate: float = 1e-3,
    rho: float = 100.0,
    gamma: float = 1.0,
    beta: float = 1e-4,
    label_scale: float = 5.0,
) -> Inference:
    r"""The closed-form posterior over the last layer of a network trained on the coreset, as VBPC has it.

    The network is trained for `steps` full steps of Adam on the Gaussian likelihood, then its head is replaced by
    `LastLayerPosterior`. A coreset that says its own `last_layer` numbers overrules `rho`, `gamma` and `beta` (and, if
    it names them, `steps` and `learning_rate`). Targets that are no regression targets become probabilities, centred
    and times `label_scale`.
    """
    _positive(steps=steps, learning_rate=learning_rate, rho=rho, gamma=gamma, beta=beta, label_scale=label_scale)

    def infer(coreset: SyntheticCoreset, make: Network, seed: int) -> Predictive:
        own = dict(coreset.last_layer or {})
        prior = {name: own.get(name, default) for name, default in (("rho", rho), ("gamma", gamma), ("beta", beta))}
        network = fresh(make, torch.Generator().manual_seed(seed)).to(coreset.targets.device)
        inputs, targets = tensors_of(coreset, network)[0], regression_targets(coreset, label_scale)
        count, rate = int(own.get("steps", steps)), own.get("learning_rate", learning_rate)
        _fit(network, inputs, targets, steps=count, learning_rate=rate, seed=seed)
        features = features_of(network.eval())
        with torch.no_grad():
            posterior = LastLayerPosterior(logits_of(features(inputs)).flatten(1), targets, **prior)
        return lambda test: _in_parts(
            lambda x: posterior.probabilities(logits_of(features(x)).flatten(1)), test, network
        )

    return infer


INFERENCES: dict[str, Callable[..., Inference]] = {
    "last-layer": by_last_layer,
    "sgd": by_sgd,
    "ensemble": partial(by_sgd, networks=5),
    "hmc": by_hmc,
    "sghmc": by_sghmc,
}


def regression_targets(coreset: SyntheticCoreset, label_scale: float) -> Tensor:
    """Targets `(n, k)` to fit by squared error: the coreset's own, or centred probabilities times `label_scale`."""
    if coreset.target_kind == "regression":
        return coreset.targets.float()
    soft = coreset.with_targets("soft").targets.float()
    return label_scale * (soft - 1 / soft.shape[1])


def train(
    coreset: SyntheticCoreset,
    make: Network,
    generator: Generator,
    *,
    steps: int,
    learning_rate: float,
    momentum: float = 0.9,
    weight_decay: float = 5e-4,
    batch_size: int = 256,
    augment: Augment | None = None,
) -> nn.Module:
    """A fresh network trained on the coreset by SGD with a cosine schedule; global random state stays as it was."""
    network = fresh(make, generator).to(coreset.targets.device).train()
    inputs, targets = tensors_of(coreset, network)
    optimizer = torch.optim.SGD(network.parameters(), lr=learning_rate, momentum=momentum, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    dropout = int(torch.randint(2**62, (), generator=generator))
    with seeded(dropout, [inputs.device]), torch.enable_grad():
        for rows in _batches(len(inputs), batch_size, steps, generator):
            x = inputs[rows] if augment is None else augment(inputs[rows], generator)
            optimizer.zero_grad(set_to_none=True)
            loss = coreset.loss(logits_of(network(x)), targets[rows])
            if not math.isfinite(float(loss.detach())):
                raise ValueError(
                    f"the loss became {float(loss.detach())} while training on the coreset; lower learning_rate"
                )
            loss.backward()
            optimizer.step()
            schedule.step()
    return network


def _fit(network: nn.Module, inputs: Tensor, targets: Tensor, *, steps: int, learning_rate: float, seed: int) -> None:
    """Steps of Adam on the squared error, all examples at once: a pool member's life in VBPC."""
    optimizer = torch.optim.Adam(network.parameters(), lr=learning_rate)
    network.train()
    with seeded(seed, [inputs.device]), torch.enable_grad():
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            functional.mse_loss(logits_of(network(inputs)), targets).backward()
            optimizer.step()


def _sampled(
    sample: Callable[[SyntheticCoreset, FlatNetwork, int], Tensor],
    start: Start | None,
    coreset: SyntheticCoreset,
    make: Network,
    seed: int,
) -> Predictive:
    """Averages over samples of the parameters that start from a trained network."""
    generator = torch.Generator().manual_seed(seed)
    start = partial(train, steps=100, learning_rate=0.02) if start is None else start
    network = start(coreset, make, generator).eval()
    flat = FlatNetwork(network)
    samples = sample(coreset, flat, seed)
    return partial(averaged, network, [partial(flat, theta) for theta in samples])


def _short_enough(step_size: float, coreset: SyntheticCoreset, network: FlatNetwork, weight_decay: float) -> float:
    potential = network_potential(coreset, network, weight_decay=weight_decay)
    return min(step_size, longest_stable_step(potential, network.theta()) / 2)


def averaged(network: nn.Module, models: Sequence[Callable[[Tensor], Tensor]], inputs: Tensor) -> Tensor:
    """Probabilities `(t, k)`, the mean of what the logits of models say, which take inputs as this network does."""
    return _in_parts(lambda x: sum(logits_of(model(x)).softmax(-1) for model in models) / len(models), inputs, network)


def _in_parts(probabilities: Callable[[Tensor], Any], inputs: Tensor, network: nn.Module) -> Tensor:
    with torch.no_grad():
        return torch.cat([probabilities(as_taken_by(network, part)) for part in inputs.split(_AT_ONCE)])


def _batches(n: int, size: int, steps: int, generator: Generator) -> Iterable[Tensor | slice]:
    if size >= n:
        yield from (slice(None) for _ in range(steps))
        return
    rows = torch.empty(0, dtype=torch.long)
    for _ in range(steps):
        if len(rows) < size:
            rows = torch.cat([rows, torch.randperm(n, generator=generator)])
        yield rows[:size]
        rows = rows[size:]


def _positive(**values: float) -> None:
    for name, value in values.items():
        check_positive(name, value, whole=name in ("networks", "steps", "batch_size"))
