"""Networks trained on a coreset as `recipe_for` says for their kind: the inference for networks of any kind."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..checks import check_positive
from ..dataset import SyntheticCoreset
from ..fitting import fit
from ..networks import Network, fresh
from ..targets import Targets
from ..training import Optimizer, recipe_for
from .predict import Inference, Predictive, averaged


def by_recipe(
    *,
    networks: int = 1,
    labels: Targets | None = None,
    optimizer: Optimizer | None = None,
    lr: float | None = None,
    weight_decay: float | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    mixing: float | None = None,
    cutmix: float | None = None,
    augmentation: str | None = None,
    bf16: bool = False,
) -> Inference:
    """Networks trained by `fit` with `recipe_for`; several make a deep ensemble. What is said overrules the recipe.

    `augmentation` is text, `"shift+flip+cutout"`, so that the command line can say it.
    """
    said: dict[str, Any] = {"optimizer": optimizer, "lr": lr, "weight_decay": weight_decay, "steps": steps}
    said |= {"batch_size": batch_size, "mixing": mixing, "cutmix": cutmix}
    changes = {name: value for name, value in said.items() if value is not None}
    if augmentation is not None:
        changes["augmentation"] = tuple(part for part in augmentation.split("+") if part)
    check_positive("networks", networks, whole=True)

    def infer(coreset: SyntheticCoreset, make: Network, seed: int) -> Predictive:
        generator = torch.Generator().manual_seed(seed)
        models = [fresh(make, generator).to(coreset.inputs.device) for _ in range(networks)]
        for number, model in enumerate(models):
            recipe = replace(recipe_for(coreset, model, labels=labels), **changes)
            fit(model, coreset, recipe, seed=seed + 1_000_003 * number, bf16=bf16)
        return partial(averaged, models[0], models)

    return infer
