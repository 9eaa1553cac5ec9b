"""`recipe_for`: how to train this model on that coreset. What fits one kind of network makes another one fail.

Squared error on learned targets is right for the ConvNets that a set was learned with; others underfit or diverge by
it, and want probabilities, AdamW, and images that look different at every visit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn

from ..layers import is_norm, unwrapped
from .checks import check_positive
from .dataset import SyntheticCoreset
from .per_image import CHANGES
from .targets import Targets
from .views import keep_class_mirrored

Kind = Literal["batch norm", "instance norm", "group norm", "transformer", "no norm"]
"""What a network is made of, as far as it matters for training on few images."""

Loss = Literal["cross-entropy", "squared-error"]
Optimizer = Literal["adamw", "sgd", "muon"]


@dataclass(frozen=True)
class TrainingRecipe:
    """How to train a model on a coreset. `fit` follows it; `dataclasses.replace(recipe, lr=1e-3)` changes it.

    Args:
        kind: of network that it is for; only said, not used.
        loss: `"cross-entropy"`, or `"squared-error"` on targets that were learned for it.
        labels: `"own"` as stored, `"soft"` probabilities, `"hard"` class numbers.
        optimizer: `"adamw"`; `"sgd"` with momentum 0.9; or `"muon"`: orthogonalised momentum for weight matrices, AdamW for
            norms, biases and the head. All along one cycle: up for a third of the steps, then down.
        lr, weight_decay: of the optimizer; the rate is that of the cycle's top. Weight matrices under `"muon"` get 30
            times `lr`, so that one `lr` does for it and for AdamW.
        steps, batch_size: how many batches, of how many images.
        augmentation: changes drawn for each image at each visit, of `"shift"`, `"flip"`, `"scale"` and `"cutout"`.
        mixing, cutmix: alpha of mixup and of cutmix, drawn for each image; 0 for none. With both, each batch gets one of
            them, by chance.

    Example:
        >>> recipe = recipe_for(coreset, model)
        >>> fit(model, coreset, replace(recipe, steps=1000))
    """

    kind: str
    loss: Loss = "cross-entropy"
    labels: Targets = "soft"
    optimizer: Optimizer = "adamw"
    lr: float = 3e-3
    weight_decay: float = 0.01
    steps: int = 300
    batch_size: int = 50
    augmentation: tuple[str, ...] = ("shift", "flip")
    mixing: float = 0.0
    cutmix: float = 0.0

    def __post_init__(self) -> None:
        for name, known in (("loss", Loss), ("labels", Targets), ("optimizer", Optimizer)):
            if getattr(self, name) not in get_args(known):
                rule = f"{name} must be one of {', '.join(get_args(known))}"
                raise ValueError(f"{rule}, got {getattr(self, name)!r}")
        for name in ("lr", "steps", "batch_size"):
            check_positive(name, getattr(self, name), whole=name != "lr")
        for name in ("weight_decay", "mixing", "cutmix"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if isinstance(self.augmentation, str) or any(each not in CHANGES for each in self.augmentation):
            rule = f"augmentation must be a tuple of {', '.join(CHANGES)}, or empty"
            raise ValueError(f"{rule}, got {self.augmentation!r}")
        if self.loss == "squared-error" and self.labels != "own":
            raise ValueError(
                f"squared-error needs the targets that were learned for it, labels='own', got {self.labels!r}; "
                "for probabilities and class numbers pass loss='cross-entropy'"
            )

    def check(self, coreset: SyntheticCoreset) -> None:
        """Refuses a loss that the coreset's targets are not meant for."""
        own = "squared-error" if self.labels == "own" and coreset.target_kind == "regression" else "cross-entropy"
        if self.loss != own:
            raise ValueError(
                f"loss must be {own!r} for labels={self.labels!r} of {coreset.target_kind} targets, got {self.loss!r}; "
                f"recipe_for(coreset, model, labels={self.labels!r}) goes together"
            )


def recipe_for(coreset: SyntheticCoreset, model: nn.Module, *, labels: Targets | None = None) -> TrainingRecipe:
    """How to train `model` on `coreset`: loss, labels, optimizer, rate, steps, augmentation.

    A shallow ConvNet with InstanceNorm is at home with a learned set and fits its targets by squared error. Any other
    network gets cross-entropy on probabilities (class numbers where the set has them). On probabilities networks with
    InstanceNorm are trained by Muon. Rates were looked at on held-out training images of Fashion-MNIST, one seed each, for
    learned and for real images alike (docs/results.md).

    Args:
        coreset: learned or real images.
        model: the network to train, with random or with pre-trained weights; it is only looked at.
        labels: `"own"`, `"soft"` or `"hard"` in place of what is best for this kind of network.

    Example:
        >>> recipe_for(load_coreset("fashion-mnist/vbpc-10"), timm.create_model("resnet18"))
        TrainingRecipe(kind='batch norm', loss='cross-entropy', labels='soft', optimizer='adamw', lr=0.002, ...)
    """
    kind, home = kind_of(model), at_home(coreset, model)
    if labels is None:
        labels = "own" if home else "hard" if coreset.target_kind == "hard" else "soft"
    if labels == "own" and coreset.target_kind == "regression":
        return TrainingRecipe(kind, "squared-error", "own", lr=_RATES[kind], augmentation=())
    soft = labels != "hard" and coreset.target_kind != "hard"  # class numbers are learned by heart, and Muon goes on
    return TrainingRecipe(
        kind,
        "cross-entropy",
        labels,
        "muon" if kind == "instance norm" and soft else "adamw",
        lr=_RATES[kind],
        steps=1800 if kind in _SLOW else 900,
        augmentation=_augmentation(coreset),
    )


_RATES: dict[Kind, float] = {
    "batch norm": 2e-3,
    "instance norm": 2e-3,
    "group norm": 2e-3,
    "transformer": 1e-3,
    "no norm": 1e-3,
}


_SLOW: tuple[Kind, ...] = ("transformer", "instance norm")  # gain by more steps on views; on real images nobody does


def kind_of(model: nn.Module) -> Kind:
    """What a network normalises with; a transformer if it has attention and no BatchNorm."""
    modules = list(unwrapped(model).modules())
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in modules):
        return "batch norm"
    if any("attention" in type(module).__name__.lower() for module in modules):
        return "transformer"
    norms = [module for module in modules if is_norm(module)]
    if not norms:
        return "no norm"
    return "instance norm" if all(_by_channel(norm) for norm in norms) else "group norm"


def at_home(coreset: SyntheticCoreset, model: nn.Module) -> bool:
    """Whether a learned set was made for networks like this: InstanceNorm and at most four convolutions."""
    layers = sum(isinstance(module, nn.Conv2d) for module in model.modules())
    return coreset.target_kind == "regression" and 1 <= layers <= 4 and kind_of(model) == "instance norm"


def _by_channel(norm: nn.Module) -> bool:
    """Whether each channel of each image is normalised by itself."""
    if isinstance(norm, nn.GroupNorm):
        return norm.num_groups == norm.num_channels
    return isinstance(norm, nn.modules.instancenorm._InstanceNorm)


def _augmentation(coreset: SyntheticCoreset) -> tuple[str, ...]:
    """Shifts and flips of images; no flips of digits and letters, nothing for other inputs, nor for views, moved already."""
    if coreset.stored.ndim != 4 or coreset.views is not None:
        return ()
    return ("shift", "flip") if keep_class_mirrored(coreset.class_names) else ("shift",)
