"""Whether experts serve a run: of its kinds of networks, and better than guessing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Generator
from torch.nn.modules.batchnorm import _BatchNorm

from ..networks import Network, description, fresh
from .experts import Experts, read_description, restore
from .real_data import RealData


def check_made_for(experts: Experts, about: Mapping[str, Any]) -> None:
    """Refuses experts of other networks than `about` names, as `Problem.about_network` does, and those that lack a kind.

    Experts that do not say their networks must be of as many kinds; what size these have is seen at the first step.
    """
    wanted, made = names(about), names(read_description(experts.folder))
    if made and [description(*each) for each in made] != [description(*each) for each in wanted]:
        raise ValueError(
            f"{experts.folder} holds experts of {_listed(made)}, asked for {_listed(wanted)}: pass the network that the "
            "experts were trained with (several in their order), or name another folder"
        )
    if experts.kinds != len(wanted):
        raise ValueError(
            f"{experts.folder} holds experts of {experts.kinds} kind(s) of networks, asked for {len(wanted)}: "
            f"{_listed(wanted)}; name another folder, or let them be trained in a new one"
        )
    for kind, each in enumerate(wanted):
        if not experts.of_kind(kind):
            raise ValueError(
                f"{experts.folder} holds no experts of {_listed([each])}: finish them by coreset-sampler experts"
            )


def names(about: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Name and widths of each kind that a record names; none if it names none."""
    if "networks" in about:
        return [(name, None) for name in about["networks"]]
    return [(about["network"], about.get("widths"))] if "network" in about else []


def untrained(
    experts: Experts, network: Network, data: RealData, *, kind: int = 0, called: str = "experts", most: int = 3
) -> str | None:
    """What to do about experts of a kind that guess no better on `data` than by its largest class; None if they do.

    Looks at the last epoch of the first `most`, with the statistics of 250 images at a time where there is BatchNorm.
    Experts of another network are left to the distiller to refuse.
    """
    model = fresh(network, Generator().manual_seed(0)).to(data.device).eval()
    for module in model.modules():
        module.train(isinstance(module, _BatchNorm))
    inputs, targets = data.rows(torch.arange(data.n))
    labels = targets.argmax(-1) if targets.ndim == 2 else targets
    chance = float(labels.bincount().max()) / data.n
    best = 0.0
    for expert, last in list(experts.of_kind(kind).items())[:most]:
        theta = experts.theta(expert, last)
        if theta.numel() != sum(parameter.numel() for parameter in model.parameters()):
            return None
        restore(model, theta, experts.folder)
        with torch.no_grad():
            found = torch.cat([model(part).argmax(-1) for part in inputs.split(250)])
        best = max(best, float((found == labels).float().mean()))
    if best > chance + 3 * (chance * (1 - chance) / data.n) ** 0.5:
        return None
    return (
        f"warning: the {called} in {experts.folder} learned nothing: accuracy {best:.2f} on held-out images, where the "
        f"largest class has {chance:.2f}. Train others, with more --epochs or another --lr: coreset-sampler experts"
    )


def _listed(names: list[tuple[str, Any]]) -> str:
    return ", ".join(name if widths is None else f"{name} of widths {widths}" for name, widths in names)
