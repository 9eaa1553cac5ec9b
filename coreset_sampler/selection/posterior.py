"""Where to score: the weights themselves, Gaussians around them, other weights of the network, those it trains through."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..layers import is_norm, modules_of, parameter_names, unwrapped
from .describe import describe
from .types import Draw, Layers, View

_log = logging.getLogger("coreset_sampler")


def _normal_like(value: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(
        value.shape, generator=generator, dtype=torch.float32
    )  # on the CPU: a seed means the same anywhere
    return noise.to(value.device, value.dtype)


def _check_scale(scale: float) -> None:
    if not (scale >= 0 and scale < float("inf")):
        raise ValueError(f"scale must be a non-negative number, got {scale}")


@dataclass(frozen=True)
class PointMass:
    """The current weights and nothing else."""

    def draw(self, view: View, draws: int, generator: torch.Generator) -> list[Draw]:
        """The model as it is, `draws` times."""
        return [{}] * draws


@dataclass(frozen=True, repr=False)
class SphericalGaussian:
    r"""The current weights plus noise $\mathcal N(0, \text{scale}^2)$ in the chosen layers.

    The noise is absolute, not relative to the weight. With `redraw=k` only the last `k` of the layers, as the model lists
    them, are drawn afresh for each draw and those before share one: every draw has the same distribution as without, so
    expectations stay unbiased, and whatever comes before the `k`-th last layer is computed once for all draws.

    Args:
        scale: standard deviation of the noise.
        layers: `"norm"`, `"head"`, `"all"`, names of modules, or a function of a module's name and the module; `"auto"` is
            the norm layers, or the head of a network that has none.
        redraw: how many of the last layers each draw has noise of its own in; None for all of them.
    """

    scale: float = 0.1
    layers: Layers = "norm"
    redraw: int | None = None

    def __post_init__(self) -> None:
        _check_scale(self.scale)
        if self.redraw is not None and self.redraw < 1:
            raise ValueError(f"redraw must be at least 1 layer, or None for all of them, got {self.redraw}")

    def __repr__(self) -> str:
        return describe(self)

    def draw(self, view: View, draws: int, generator: torch.Generator) -> list[Draw]:
        """Independent draws, but for the layers that `redraw` leaves to be shared."""
        modules = modules_of(view.model, self.layers)
        if self.layers == "auto" and not any(is_norm(module) for module in modules.values()):
            _log.info("%s has no norm layer: perturbing %s", type(view.model).__name__, list(modules) or "nothing")
        parameters = dict(view.model.named_parameters(remove_duplicate=False))
        fresh = set(parameter_names(dict(list(modules.items())[-self.redraw :] if self.redraw else modules.items())))

        def noisy(name: str) -> Tensor:
            value = parameters[name].detach()
            return value + self.scale * _normal_like(value, generator)

        names = [name for name in parameter_names(modules) if name in parameters]
        shared = {name: noisy(name) for name in names if name not in fresh}
        return [{**shared, **{name: noisy(name) for name in names if name in fresh}} for _ in range(draws)]


@dataclass(frozen=True, repr=False)
class DiagonalLaplace:
    r"""The Laplace approximation with a diagonal Fisher matrix: wide where the loss is flat.

    $\mathcal N(w, \text{scale}^2 (n F + \text{prior})^{-1})$ with $F$ the diagonal Fisher information over `examples`
    random examples, labels drawn from the model. The papers call it Hessian-Gaussian.

    Args:
        scale: factor on the standard deviations.
        layers: which layers are drawn, as in `SphericalGaussian`.
        prior: precision of the prior, which limits how wide a flat direction gets.
        examples: how many the Fisher matrix is estimated on, anew at every scoring pass.
    """

    scale: float = 1.0
    layers: Layers = "norm"
    prior: float = 100.0
    examples: int = 256

    def __post_init__(self) -> None:
        _check_scale(self.scale)
        if self.prior <= 0 or self.examples < 1:
            raise ValueError(f"prior and examples must be positive, got {self.prior} and {self.examples}")

    def __repr__(self) -> str:
        return describe(self)

    def draw(self, view: View, draws: int, generator: torch.Generator) -> list[Draw]:
        """Draws of the posterior at the current weights; the Fisher matrix is estimated anew."""
        names = parameter_names(modules_of(view.model, self.layers))
        parameters = {
            name: p.detach() for name, p in view.model.named_parameters(remove_duplicate=False) if name in set(names)
        }
        fisher = view.fisher(list(parameters), self.examples, generator)
        n = len(view.labels)
        deviation = {name: self.scale / (n * fisher[name] + self.prior).sqrt() for name in parameters}
        return [
            {name: p + deviation[name] * _normal_like(p, generator) for name, p in parameters.items()}
            for _ in range(draws)
        ]


@dataclass(repr=False)
class Snapshots:
    """Other weights of the same network: members of an ensemble, or states of this run kept with `add`.

    The latest `draws` of them are used; they live in memory once.

    Args:
        states: state dicts: parameters, and buffers where they are there.
    """

    states: Sequence[Mapping[str, Tensor]] = field(default_factory=tuple)

    def add(self, model: nn.Module, keep: int = 4) -> None:
        """Keeps a copy of the model as it is now, and drops all but the latest `keep`."""
        state = unwrapped(model).state_dict()
        copy = {name: value.detach().clone() for name, value in state.items() if isinstance(value, Tensor)}
        self.states = (*self.states, copy)[-keep:]

    def __repr__(self) -> str:
        return describe(self)

    def draw(self, view: View, draws: int, generator: torch.Generator) -> list[Draw]:
        """The latest `draws` states."""
        if len(self.states) < draws:
            raise ValueError(
                f"Snapshots holds {len(self.states)} states but draws={draws} were asked for; "
                "pass as many state dicts as draws, or call add(model) as training goes on"
            )
        own: dict[str, Tensor] = {
            **dict(view.model.named_parameters(remove_duplicate=False)),
            **dict(view.model.named_buffers(remove_duplicate=False)),
        }
        once = {id(value): name for name, value in reversed(own.items())}  # tied weights under their first name
        for state in self.states[-draws:]:
            wrong = [name for name, value in state.items() if name not in own or own[name].shape != value.shape]
            if wrong:
                raise ValueError(f"a snapshot does not fit the model: {wrong[:3]} are unknown or of another shape")
        return [
            {name: value.to(own[name].device) for name, value in state.items() if once[id(own[name])] == name}
            for state in self.states[-draws:]
        ]


@dataclass(frozen=True, repr=False)
class Trajectory:
    r"""The weights that training passes through: the draws are already paid for, nothing extra is run.

    SGD with a constant step samples around a minimum (Mandt et al. 2017). So the mean of what the training's own forward
    passes said of an example, visit after visit, is a mean over draws. The sampler collects it in `sampler.scores`.

    `Stable`, `LabelConfidence` and `LossPruning` read it.

    Args:
        noise: more draws around each of these weights, in the head alone: its input is caught in the training's forward
            pass, and noisy heads are small matrix products. `SphericalGaussian(0.1, "head")`, or None.
    """

    noise: SphericalGaussian | None = None

    observes: ClassVar[bool] = True
    """That it reads what training said, and has no draws to run."""

    def __post_init__(self) -> None:
        if self.noise is not None and (not isinstance(self.noise, SphericalGaussian) or self.noise.layers != "head"):
            raise ValueError(
                f"noise must be a SphericalGaussian in the head or None, got {describe(self.noise)}. Other layers need "
                'forward passes of their own: pass SphericalGaussian(0.1, "head"), or this posterior without Trajectory.'
            )

    def __repr__(self) -> str:
        return describe(self)

    def draw(self, view: View, draws: int, generator: torch.Generator) -> list[Draw]:
        """Raises: there is nothing to run."""
        raise TypeError(
            "Trajectory has no draws to run: its scores come from the training itself. Stable, LabelConfidence and "
            "LossPruning read them; for other strategies pass PointMass() or SphericalGaussian()."
        )
