"""`fit`: trains a model on a coreset as its recipe says, and tells how well it fits what it saw and what it did not."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Generator, Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ..layers import device_of, devices_of
from ..randomness import check_default_device, seeded
from .dataset import SyntheticCoreset
from .muon import MUON_RATE, Muon, hidden_matrices
from .per_image import changed, mixed, one_hot, pasted
from .targets import Targets, loss_of, targets_as
from .training import TrainingRecipe, recipe_for

_AT_ONCE = 250  # examples whose activations are in memory together when accuracy is measured
_PRECISIONS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_KEPT = 2**28  # bytes of inputs that are made once and kept; more are made again at every visit


class Adapted(Protocol):
    """A coreset made ready for somebody's model: what `for_timm` and `for_huggingface` give."""

    coreset: SyntheticCoreset
    asked: Targets | None
    """The kind of targets that somebody asked for."""

    def __len__(self) -> int:
        """How many examples."""

    def __getitem__(self, index: int) -> Any:
        """An input and its target, or a dict with `pixel_values` and `labels`."""


@dataclass(frozen=True)
class Fit:
    """What `fit` gives: the trained model, the recipe, and accuracies.

    A low `train_accuracy` says that the model underfits: more steps, or another rate. A high one beside a low
    `test_accuracy` says that the set does not carry over to this kind of network.
    """

    model: nn.Module
    recipe: TrainingRecipe
    train_accuracy: float
    test_accuracy: float | None


def fit(
    model: nn.Module,
    train_set: SyntheticCoreset | Adapted,
    recipe: TrainingRecipe | None = None,
    *,
    test: Any = None,
    seed: int = 0,
    bf16: bool = False,
) -> Fit:
    """Trains `model`, in place, on a coreset, and measures how well it fits.

    Args:
        model: any classifier that gives logits, or an object with `logits` as Hugging Face models do. It is trained
            from the weights that it has, where they are, and left in evaluation mode.
        train_set: a coreset, for models that take its inputs as they are; or what `for_timm` or `for_huggingface` made
            of one.
        recipe: how; `recipe_for(coreset, model)` if not said.
        test: what to measure accuracy on afterwards; see `accuracy_on`.
        seed: of batches, augmentation and dropout. Global random state stays as it was.
        bf16: train under bfloat16 autocast; weights stay as they are, and accuracy is measured without it. Pays on GPUs,
            and on CPUs with bfloat16 instructions for some networks (a VGG, a ViT); others get slower (GroupNorm): try.

    Returns:
        The model, its recipe, and the accuracy on training images beside that on test images.

    Example:
        >>> train_set, test_set = for_timm(coreset, model, size=32), for_timm(real_images, model, size=32)
        >>> fit(model, train_set, test=test_set).test_accuracy
    """
    check_default_device()
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "model must have parameters to train, all have requires_grad=False: unfreeze its head at least"
        )
    recipe, examples = _prepared(model, train_set, recipe)
    generator = torch.Generator().manual_seed(seed)
    with seeded(seed, devices_of(model)), torch.enable_grad():
        _train(model, examples, recipe, generator, bf16)
    classes = examples.targets if examples.targets.ndim == 1 else examples.targets.argmax(1)
    numbers = torch.arange(len(classes)).split(_AT_ONCE)
    seen = _share_right(model, ((examples.inputs(rows), classes[rows]) for rows in numbers))
    return Fit(model, recipe, seen, None if test is None else accuracy_on(model, test))


def accuracy_on(model: nn.Module, data: Any) -> float:
    """The share of examples that the model classifies right; the model is left in evaluation mode.

    Args:
        model: gives logits, or an object that has them.
        data: inputs and class numbers as two tensors, as a data set (a coreset of real images, `for_timm(...)`, ...)
            or as a `DataLoader`. Class numbers are `(n,)` or `(n, 1)`; of `(n, classes)` the largest counts.
    """
    if isinstance(data, (tuple, list)) and len(data) == 2 and all(isinstance(each, Tensor) for each in data):
        data = TensorDataset(*data)
    own = torch.Generator()  # a loader without one draws from the global random state
    batches = DataLoader(data, batch_size=_AT_ONCE, generator=own) if isinstance(data, Dataset) else data
    if not isinstance(batches, Iterable) or isinstance(batches, (str, Tensor)):
        raise TypeError(
            f"test must be (inputs, class numbers), a data set or a DataLoader, got a {type(data).__name__}"
        )
    return _share_right(model, (_pair(batch) for batch in batches))


def logits_of(outputs: Any) -> Tensor:
    """The logits among what a model returned."""
    logits = outputs[0] if isinstance(outputs, tuple) else getattr(outputs, "logits", outputs)
    if not isinstance(logits, Tensor):
        raise TypeError(f"model must give logits, or an object that has them, got a {type(outputs).__name__}")
    return logits


def as_taken_by(model: nn.Module, inputs: Tensor) -> Tensor:
    """Inputs on the model's device; floats in the precision of its first parameter, which no layer casts by itself."""
    taken = next((p.dtype for p in model.parameters() if p.dtype in _PRECISIONS), inputs.dtype)
    return inputs.to(device_of(model), taken if inputs.is_floating_point() else None)


@dataclass(frozen=True)
class _Examples:
    """Inputs by their numbers, and all targets."""

    source: SyntheticCoreset | Adapted
    coreset: SyntheticCoreset
    targets: Tensor
    kept: Tensor | None

    def inputs(self, rows: Tensor) -> Tensor:
        return _stacked(self.source, rows.tolist()) if self.kept is None else self.kept[rows]


def _stacked(source: Any, rows: Iterable[int]) -> Tensor:
    return torch.stack([_pair(source[row])[0] for row in rows])


def _prepared(
    model: nn.Module, train_set: SyntheticCoreset | Adapted, recipe: TrainingRecipe | None
) -> tuple[TrainingRecipe, _Examples]:
    """The recipe, and the examples with targets as it wants them."""
    coreset = train_set if isinstance(train_set, SyntheticCoreset) else getattr(train_set, "coreset", None)
    if not isinstance(coreset, SyntheticCoreset):
        raise TypeError(
            "train_set must be a SyntheticCoreset or what for_timm or for_huggingface made of one, got a "
            f"{type(train_set).__name__}"
        )
    made_with: Targets | None = None if isinstance(train_set, SyntheticCoreset) else train_set.asked
    recipe = recipe_for(coreset, model, labels=made_with) if recipe is None else recipe
    if made_with not in (None, recipe.labels):
        raise ValueError(
            f"recipe.labels is {recipe.labels!r}, but train_set was made with targets {made_with!r}; make it with "
            f"targets={recipe.labels!r}, or pass recipe_for(coreset, model, labels={made_with!r})"
        )
    recipe.check(coreset)
    targets = targets_as(coreset, recipe.labels)
    size = _pair(train_set[0])[0].numel() * 4 * len(train_set)
    kept = _stacked(train_set, range(len(train_set))) if size <= _KEPT else None
    return recipe, _Examples(train_set, coreset, targets, kept)


def _train(model: nn.Module, examples: _Examples, recipe: TrainingRecipe, generator: Generator, bf16: bool) -> None:
    """All steps of the recipe; a loss that is not finite ends it with what to lower."""
    optimizers = _optimizers(model, recipe)
    schedules = [OneCycleLR(each, each.defaults["lr"], total_steps=recipe.steps) for each in optimizers]
    device = device_of(model)
    model.train()
    for step, rows in enumerate(_batches(len(examples.targets), recipe, generator)):
        x, y = _augmented(examples, rows, recipe, generator)
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            logits = logits_of(model(as_taken_by(model, x)))
        _check_classes(logits, y, examples.coreset)
        loss = loss_of(examples.coreset, recipe.labels, logits.float() if bf16 else logits, y.to(device))
        if not math.isfinite(float(loss.detach())):
            raise ValueError(_diverged(step, recipe, float(loss.detach())))
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()


def _check_classes(logits: Tensor, targets: Tensor, coreset: SyntheticCoreset) -> None:
    """Refuses a model for fewer classes: on a GPU a class number beyond its outputs ends the process."""
    exact = targets.ndim == 2
    needed = targets.shape[1] if exact else coreset.num_classes
    if needed is not None and logits.ndim == 2 and (logits.shape[1] < needed or (exact and logits.shape[1] > needed)):
        raise ValueError(
            f"model must give a logit for each of the coreset's {needed} classes, it gives {logits.shape[1]}; make its head "
            f"for {needed}"
        )


def _augmented(
    examples: _Examples, rows: Tensor, recipe: TrainingRecipe, generator: Generator
) -> tuple[Tensor, Tensor]:
    """A batch after all changes of the recipe."""
    x, y = examples.inputs(rows), examples.targets[rows]
    x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x  # CPUs cannot scale images in halves
    x = changed(x, recipe.augmentation, generator)
    if not (recipe.mixing or recipe.cutmix):
        return x, y
    y = y if y.is_floating_point() else one_hot(y, examples.coreset.num_classes or 0)
    paste = recipe.cutmix and (not recipe.mixing or bool(torch.rand((), generator=generator) < 0.5))
    if paste:
        return pasted(x, y, recipe.cutmix, generator)
    return mixed(x, y, recipe.mixing, generator)


def _diverged(step: int, recipe: TrainingRecipe, loss: float) -> str:
    lower = f"lower lr: replace(recipe, lr={recipe.lr / 3:.1g})"
    soft = ", or fit probabilities: recipe_for(coreset, model, labels='soft')" if recipe.labels == "own" else ""
    return f"the loss became {loss} at step {step} of {recipe.steps} ({recipe.loss}, lr {recipe.lr:g}); {lower}{soft}"


def _optimizers(model: nn.Module, recipe: TrainingRecipe) -> list[torch.optim.Optimizer]:
    """One, or Muon for the matrices that it is made for and AdamW for what is left."""
    lr, decay = recipe.lr, recipe.weight_decay
    matrices = hidden_matrices(model) if recipe.optimizer == "muon" else []
    taken = {id(weight) for weight in matrices}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in taken]
    if recipe.optimizer == "sgd":
        return [torch.optim.SGD(others, lr, momentum=0.9, weight_decay=decay)]
    muon = [Muon(matrices, MUON_RATE * lr, weight_decay=decay)] if matrices else []
    return [*muon, *([torch.optim.AdamW(others, lr, weight_decay=decay)] if others or not muon else [])]


def _batches(n: int, recipe: TrainingRecipe, generator: Generator) -> Iterable[Tensor]:
    """Numbers of the examples of each step: all examples in a new order, and again."""
    rows, size = torch.empty(0, dtype=torch.long), min(recipe.batch_size, n)
    for _ in range(recipe.steps):
        if len(rows) < size:
            rows = torch.cat([rows, torch.randperm(n, generator=generator)])
        yield rows[:size]
        rows = rows[size:]


@torch.no_grad()
def _share_right(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    model.eval()
    right, count = 0, 0
    for x, y in batches:
        found, classes = logits_of(model(as_taken_by(model, x))).argmax(1).cpu(), _class_numbers(y).cpu()
        if found.shape != classes.shape:
            raise ValueError(
                f"test must have a class number for each input, got targets {tuple(y.shape)} for {len(x)} inputs"
            )
        right += int((found == classes).sum())
        count += len(classes)
    if not count:
        raise ValueError("test must hold at least one example, got none")
    return right / count


def _class_numbers(targets: Tensor) -> Tensor:
    """`(n,)`: a column `(n, 1)` holds class numbers as well, several columns a number for each class."""
    if targets.ndim == 2:
        return targets.argmax(1) if targets.shape[1] > 1 else targets[:, 0]
    return targets


def _pair(example: Any) -> tuple[Tensor, Tensor]:
    """Input and target of an example or a batch, as tuples or as Hugging Face has them."""
    return (example["pixel_values"], example["labels"]) if isinstance(example, dict) else (example[0], example[1])
