"""The methods by name, and their settings by data set and images per class: the papers', and shorter ones for a CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from .augment import Moves
from .contrastive_divergence import ContrastiveDivergence
from .forward_kl import ForwardKL
from .reverse_kl import ReverseKL
from .state import Distiller
from .teacher import Teacher
from .variational import Variational
from .wasserstein import Wasserstein

Method = Literal["vbpc", "rkl", "w", "fkl", "cd"]
PresetName = Literal["cpu", "paper"]

METHODS: dict[Method, Callable[..., Distiller]] = {
    "rkl": ReverseKL,
    "w": Wasserstein,
    "fkl": ForwardKL,
    "cd": ContrastiveDivergence,
    "vbpc": Variational,
}


@dataclass(frozen=True)
class ExpertPreset:
    """How to train the experts that a method learns from; what is not said is as in `train_experts`.

    Args:
        max_start: the latest epoch at which a segment begins.
        examples: train on a random part of so many real examples; all if not said.
        training: arguments of `train_experts`: experts, epochs, lr, batch.
    """

    max_start: int
    examples: int | None = None
    training: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Preset:
    """How to make a coreset.

    Args:
        steps: in all.
        settings: of the method, where they differ from its defaults.
        widths: of the ConvNet; 128 in every block if not said.
        experts: for the methods that need them.
        decays: learning rates fall until the last step.
        teacher: whose probabilities the targets begin with; class numbers if not said.
    """

    steps: int
    settings: dict[str, Any] = field(default_factory=dict)
    widths: tuple[int, ...] | None = None
    experts: ExpertPreset | None = None
    decays: bool = False
    teacher: Teacher | None = None

    def over(self, steps: int | None, settings: Mapping[str, Any]) -> Preset:
        """The same with other steps, where these are said, and with these settings over its own."""
        steps = self.steps if steps is None else steps
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}; leave them out for the preset's {self.steps}")
        decay = {"decay": steps} if self.decays else {}
        return replace(self, steps=steps, settings=self.settings | decay | dict(settings))


# Kim et al. 2022, table 2, and the released code for pixels (lr 1000, momentum 0.5; plain steps for reverse KL).
_PAPER: dict[str, dict[str, Any]] = {
    "rkl": {"samples": 10, "noise": 0.01, "batch": 1000, "lr": 1000.0, "momentum": 0.0},
    "w": {"epochs": 2, "inner_lr": 0.01, "lr": 1000.0, "momentum": 0.5},
    "fkl": {"epochs": 1, "samples": 30, "noise": 0.01, "lr": 1000.0, "momentum": 0.5},
    "cd": {"epochs": 2, "inner_steps": 10, "inner_lr": 0.03, "momentum": 0.5},
}
_PAPER_BY_SIZE = {  # images per class: max_start, inner_steps, inner_lr, inner_lr_lr
    1: (2, 50, 0.01, 1e-7),
    10: (20, 30, 0.03, 1e-5),
    20: (30, 30, 0.03, 1e-5),
}
# Tiwary et al. 2024: pixel learning rates at 1, 10 and 50 images per class.
_CD_LR = {
    "mnist": (1000.0, 1.0, 1.0),
    "fashion-mnist": (1.0, 1.0, 1.0),
    "svhn": (10.0, 1.0, 1.0),
    "cifar10": (1.0, 1000.0, 1000.0),
}

# For a ConvNet of widths 16, 32, 64 on Fashion-MNIST; two to four settings of reverse KL and Wasserstein were compared on
# held-out images after 50 steps, the other rates are such that early steps move the coreset by a twentieth of its norm.
_CPU: dict[str, dict[str, Any]] = {
    "rkl": {"inner_steps": 10, "inner_lr": 0.03, "samples": 10, "batch": 256},
    "w": {"inner_steps": 10, "inner_lr": 0.03, "epochs": 1, "inner_lr_lr": 1e-6},
    "fkl": {"inner_steps": 10, "inner_lr": 0.03, "epochs": 1, "samples": 5},
    "cd": {"inner_steps": 10, "inner_lr": 0.03, "epochs": 1},
}
_CPU_BY_SIZE: dict[str, tuple[tuple[int, float], tuple[int, float]]] = {
    # steps and lr, below 10 images per class and from there on
    "rkl": ((100, 3000.0), (40, 3000.0)),
    "w": ((200, 300.0), (40, 1000.0)),
    "fkl": ((200, 100.0), (100, 500.0)),
    "cd": ((300, 100.0), (150, 500.0)),
}
# For several kinds of networks, from 10 images per class on: a fifth, the better of the two on held-out images
# (docs/results.md). Reverse KL and fewer images were not tried.
_CPU_LR_SEVERAL = {"w": 200.0, "fkl": 100.0, "cd": 100.0}
_CPU_EXPERTS = ExpertPreset(4, examples=10_000, training={"experts": 6, "epochs": 8, "lr": 0.03, "batch": 64})

# VBPC on a CPU, chosen on training images (docs/cards/variational.md). Short lives: in a few thousand steps networks
# that live long are few, and images come to fit those few.
_SHORT_LIVES: dict[str, Any] = {"max_age": 30, "fit_steps": 30}
_TEN = _SHORT_LIVES | {"lr": 0.03, "label_lr": 0.03}
VBPC: dict[tuple[str, int], Preset] = {
    ("digits", 1): Preset(3000, _SHORT_LIVES | {"batch": 64}, (32, 64)),
    ("digits", 10): Preset(2000, _TEN, (32, 64)),
    ("fashion-mnist", 1): Preset(5000, {"max_age": 10, "fit_steps": 10, "batch": 64}, (64, 128, 256)),
    ("fashion-mnist", 10): Preset(5000, _TEN | {"max_age": 100, "train_every": 3}, (32, 64, 128)),
    ("cifar10", 10): Preset(3200, _TEN, (32, 64, 128)),
}


def paper(method: Method, data: str, images_per_class: int) -> Preset:
    """What the method's paper used; between the sizes that it has, the next smaller one's."""
    _check(method, images_per_class)
    if method == "vbpc":
        return Preset(steps=100_000)  # the paper does not say its settings; a long run with the defaults
    row = max((size for size in _PAPER_BY_SIZE if size <= images_per_class), default=1)
    max_start, inner_steps, inner_lr, inner_lr_lr = _PAPER_BY_SIZE[row]
    settings = dict(_PAPER[method])
    if method in ("rkl", "fkl"):
        settings |= {"inner_steps": inner_steps, "inner_lr": inner_lr}
    if method == "w":
        settings |= {"inner_steps": inner_steps, "inner_lr_lr": inner_lr_lr}
    if method == "cd":
        rates = _CD_LR.get(data, (1.0, 1.0, 1.0))
        settings["lr"] = rates[(images_per_class >= 10) + (images_per_class >= 50)]
    return Preset(5000, settings, experts=ExpertPreset(max_start))


def cpu(method: Method, data: str, images_per_class: int) -> Preset:
    """Minutes instead of hours: few and short experts on a part of the data, short unrolls, fewer samples.

    For VBPC what is known of this data set, or of Fashion-MNIST: the most images per class that are no more than asked.
    """
    _check(method, images_per_class)
    if method == "vbpc":
        known = [key for key in VBPC if key[0] == data] or [key for key in VBPC if key[0] == "fashion-mnist"]
        fitting = [key for key in known if key[1] <= images_per_class] or known[:1]
        return VBPC[max(fitting, key=lambda key: key[1])]
    steps, lr = _CPU_BY_SIZE[method][images_per_class >= 10]
    return Preset(steps, _CPU[method] | {"lr": lr}, (16, 32, 64), _CPU_EXPERTS)


PRESETS: dict[PresetName, Callable[[Method, str, int], Preset]] = {"paper": paper, "cpu": cpu}


def preset(name: PresetName, method: Method, data: str, images_per_class: int, *, kinds: int = 1) -> Preset:
    """Settings by the preset's name, an unknown one lists the known ones; `kinds` of networks, if they are several."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; known: {', '.join(get_args(PresetName))}")
    found = PRESETS[name](method, data, images_per_class)
    if method == "vbpc":
        found = replace(found, decays=True)
        return _for_several(found, data) if kinds > 1 else found
    if kinds > 1 and name == "cpu" and images_per_class >= 10 and method in _CPU_LR_SEVERAL:
        found = replace(found, settings=found.settings | {"lr": _CPU_LR_SEVERAL[method]})
    return _with_experts_of(found, kinds) if kinds > 1 else found


# Teachers by data set, for `teach` and for sets for several kinds, which begin with their probabilities: worth 4 to 7 points
# by themselves on Fashion-MNIST.
TEACHERS = {
    "fashion-mnist": Teacher(),
    "mnist": Teacher(mirror=False),
    "cifar10": Teacher("convnet-batch:48-96-192", epochs=8),
}


def _for_several(plan: Preset, data: str) -> Preset:
    """Small batches and short lives, so that many networks are seen; images move, mirrored where that keeps the class."""
    moves = Moves(mirror=data not in ("digits", "mnist", "svhn"), each=True)
    settings = {"batch": 64, "pool": 12, "max_age": 40, "train_every": 1, "lr": 0.01, "label_lr": 0.01, "pool_lr": 2e-3}
    return replace(
        plan, settings=plan.settings | settings | {"augmentation": moves}, widths=None, teacher=TEACHERS.get(data)
    )


def _with_experts_of(plan: Preset, kinds: int) -> Preset:
    """Two experts of each kind at least."""
    assert plan.experts is not None
    training = plan.experts.training
    more = {"experts": max(training["experts"], 2 * kinds)} if "experts" in training else {}
    return replace(plan, widths=None, experts=replace(plan.experts, training=training | more))


def _check(method: str, images_per_class: int) -> None:
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; known: {', '.join(METHODS)}")
    if images_per_class < 1:
        raise ValueError(f"images_per_class must be at least 1, got {images_per_class}")
