"""Expert trajectories: what networks that train on the full data go through, for coresets to imitate.

A folder holds `expert_0003_epoch_007.safetensors`, the flat parameters of expert 3 after 7 epochs (0 being the start), one
file for each, and `experts.json`, what they were trained on and how. Of k kinds of networks expert e is of kind e mod k. A
trajectory never has to fit in memory, and a killed run continues after the last epoch that was written.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from ...distributed import share
from ...layers import devices_of
from ...randomness import check_default_device, seeded
from .. import file as coreset_file
from ..formats.experts import Trajectory, open_buffers
from ..networks import Network, fresh, makers
from .augment import Augmentation, augment
from .claim import remove_leftovers
from .inner import Loss
from .pixels import check_number
from .real_data import RealData

_NAME = re.compile(r"expert_(\d+)_epoch_(\d+)\.safetensors")
_GROWS = ("experts", "epochs")


class Experts:
    """A folder of trajectories, ours or MTT's `replay_buffer_*.pt`, as the source that distillers learn from.

    Nothing is read but the two points that a segment ends at.

    Args:
        folder: of the trajectories.
        data: gives the real batches that reverse KL needs.
        max_start: segments begin at this epoch at the latest: the early part of training is where the data say most.
    """

    def __init__(
        self, folder: str | os.PathLike[str], data: RealData | None = None, *, max_start: int | None = None
    ) -> None:
        if max_start is not None and max_start < 0:
            raise ValueError(f"max_start must be an epoch, 0 or more, got {max_start}")
        self.folder, self.data, self.max_start = Path(folder), data, max_start
        if not self.folder.is_dir():
            raise FileNotFoundError(f"there is no folder {folder}; coreset-sampler experts {folder} ... makes one")
        mtt = any(self.folder.glob("replay_buffer_*.pt"))
        self._points: _Points = _Buffers(self.folder) if mtt else _Files(self.folder)
        if not self._points.epochs:
            raise FileNotFoundError(f"{folder} holds no experts: neither expert_*.safetensors nor replay_buffer_*.pt")

    def __len__(self) -> int:
        return len(self._points.epochs)

    @cached_property
    def n(self) -> int:
        """Real training examples in all."""
        if self.data is not None:
            return self.data.n
        described = read_description(self.folder)
        if "n" not in described:
            raise ValueError(f"{self.folder} does not say on how many examples its experts were trained: pass data")
        return int(described["n"])

    def batch(self, size: int, generator: Generator) -> tuple[Tensor, Tensor]:
        """Random real examples."""
        if self.data is None:
            raise ValueError("this method looks at real examples too: Experts(folder, RealData(inputs, targets))")
        return self.data.batch(size, generator)

    @cached_property
    def kinds(self) -> int:
        """Kinds of networks among the experts; MTT's are of one."""
        kinds = read_description(self.folder).get("kinds", 1)
        if type(kinds) is not int or kinds < 1:
            raise ValueError(f"{self.folder / 'experts.json'} is damaged: kinds must be a count, got {kinds!r}")
        return kinds

    def of_kind(self, kind: int) -> dict[int, int]:
        """The last epoch of each expert of a kind."""
        if not 0 <= kind < self.kinds:
            raise ValueError(
                f"{self.folder} holds experts of {self.kinds} kind(s) of networks, and one of kind {kind} (from 0) is "
                "asked for: name a folder of experts that were trained for all of the networks"
            )
        return {expert: last for expert, last in self._points.epochs.items() if expert % self.kinds == kind}

    def segment(self, epochs: int, generator: Generator, kind: int = 0) -> tuple[Tensor, Tensor]:
        """The parameters of a random expert of a kind at a random early epoch, and `epochs` later."""
        there = self.of_kind(kind)
        long_enough = [(expert, last) for expert, last in there.items() if last >= epochs]
        if not long_enough:
            of, longest = f" of kind {kind} (from 0)" if self.kinds > 1 else "", max(there.values(), default=0)
            raise ValueError(f"no expert{of} in {self.folder} has {epochs} epochs, the longest has {longest}: train on")
        expert, last = long_enough[int(torch.randint(len(long_enough), (), generator=generator))]
        latest = last - epochs if self.max_start is None else min(self.max_start, last - epochs)
        start = int(torch.randint(latest + 1, (), generator=generator))
        return self.theta(expert, start), self.theta(expert, start + epochs)

    def theta(self, expert: int, epoch: int) -> Tensor:
        """One expert's flat parameters after an epoch."""
        theta = self._points.theta(expert, epoch)
        if not bool(torch.isfinite(theta).all()):
            raise ValueError(f"expert {expert} of {self.folder} has NaN or infinity at epoch {epoch}: train it anew")
        return theta


def train_experts(
    network: Network | Sequence[Network],
    data: RealData,
    folder: str | os.PathLike[str],
    *,
    experts: int = 100,
    epochs: int = 50,
    lr: float = 0.01,
    batch: int = 256,
    loss: Loss = functional.cross_entropy,
    augmentation: Augmentation | None = augment,
    seed: int = 0,
    about: dict[str, Any] | None = None,
    report: Callable[[str], None] | None = None,
) -> Experts:
    """Trains what is missing in the folder: plain SGD, the parameters at the start and after each epoch written.

    Expert e depends on `seed`, e and the settings alone, so runs may be killed, continued, made longer or split over
    ranks (in a process group each trains its share). Experts of other settings in the same folder are refused.

    Args:
        network: makes a fresh network; or several such makers, which the experts take in turn.
        data: what experts are trained on.
        folder: where trajectories are kept, one file per epoch.
        experts, epochs: how many, and how long each.
        lr, batch: of SGD.
        loss: outputs and targets to a mean over the examples.
        augmentation: of the images; `None` for data that are no images.
        seed: of weights and batches.
        about: what else should be the same for all experts of a folder, the data's name for one.
        report: gets a line after every epoch.
    """
    check_default_device()
    for name, value in {"experts": experts, "epochs": epochs, "lr": lr, "batch": batch}.items():
        check_number(name, value, count=name != "lr")
    kinds = makers(network)
    if experts < len(kinds):
        raise ValueError(f"experts must be at least one for each of the {len(kinds)} networks, got {experts}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder, rf"{_NAME.pattern}|experts\.json", older=600)  # other ranks may be writing
    description = {"n": data.n, "lr": lr, "batch": batch, "seed": seed, "augmentation": _name(augmentation)}
    description |= {"kinds": len(kinds)} if len(kinds) > 1 else {}
    _write_description(folder, description | (about or {}) | {"experts": experts, "epochs": epochs})
    for expert in share(range(experts)):
        model = fresh(kinds[expert % len(kinds)], Generator().manual_seed(_seed(seed, expert, 0))).to(data.device)
        done = _Files(folder).epochs.get(expert, -1)
        if done < 0:
            _write(folder, expert, 0, model)
        elif done < epochs:
            restore(model, _Files(folder).theta(expert, done), folder)
        for epoch in range(max(done, 0) + 1, epochs + 1):
            generator = Generator().manual_seed(_seed(seed, expert, epoch))
            mean = _train_epoch(model, data, loss, lr, batch, augmentation, generator)
            _write(folder, expert, epoch, model)
            if report is not None:
                report(f"expert {expert + 1}/{experts}  epoch {epoch}/{epochs}  loss {mean:.4f}")
    return Experts(folder, data)


def _train_epoch(
    model: nn.Module,
    data: RealData,
    loss: Loss,
    lr: float,
    batch: int,
    augmentation: Augmentation | None,
    generator: Generator,
) -> float:
    """One epoch of SGD; the mean loss."""
    total = 0.0
    parameters: list[Tensor] = list(model.parameters())
    model.train()
    dropout = int(torch.randint(2**62, (), generator=generator))
    with seeded(dropout, devices_of(model)):
        for inputs, targets in data.epoch(batch, generator):
            seen = inputs if augmentation is None else augmentation(inputs, generator)
            value = loss(model(seen), targets)
            gradients = torch.autograd.grad(value, parameters)
            with torch.no_grad():
                torch._foreach_add_(parameters, gradients, alpha=-lr)
            total += float(value.detach()) * len(inputs)
    if not total < float("inf"):
        raise ValueError(f"an expert's loss became {total}: lower lr, which is {lr}")
    return total / data.n


def read_description(folder: Path) -> dict[str, Any]:
    """What the experts in a folder say of themselves; nothing for MTT's."""
    path = folder / "experts.json"
    if not path.exists():
        return {}
    try:
        described: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return described


def unfinished(folder: Path) -> bool:
    """True if less is in the folder than `experts.json` says was to be trained."""
    described, there = read_description(folder), _Files(folder).epochs
    return any(there.get(expert, -1) < described["epochs"] for expert in range(described.get("experts", 0)))


def _write_description(folder: Path, description: dict[str, Any]) -> None:
    before = read_description(folder)
    there, asked = ({"kinds": 1} | each for each in (before, json.loads(json.dumps(description))))
    for name, value in asked.items():
        if before and name not in _GROWS and there.get(name) != value:
            raise ValueError(
                f"{folder} holds experts with {name} {there.get(name)!r}, asked for {value!r}: "
                "name another folder, or the settings of this one"
            )
    for name in _GROWS:
        description[name] = max(description[name], before.get(name, 0))
    temporary = folder / f".experts.json.{os.getpid()}"
    temporary.write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, folder / "experts.json")


def _path(folder: Path, expert: int, epoch: int) -> Path:
    return folder / f"expert_{expert:04d}_epoch_{epoch:03d}.safetensors"


def _write(folder: Path, expert: int, epoch: int, model: nn.Module) -> None:
    theta = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    coreset_file.write(_path(folder, expert, epoch), {"theta": theta}, {"expert": expert, "epoch": epoch})


def restore(model: nn.Module, theta: Tensor, folder: Path) -> None:
    """Puts an expert's flat parameters into a network; one of another size is refused."""
    sizes = [parameter.numel() for parameter in model.parameters()]
    if theta.numel() != sum(sizes):
        raise ValueError(
            f"{folder} holds experts of {theta.numel()} parameters, the network has {sum(sizes)}: name another folder"
        )
    with torch.no_grad():
        for parameter, values in zip(model.parameters(), theta.split(sizes), strict=True):
            parameter.copy_(values.view_as(parameter))


def _seed(seed: int, expert: int, epoch: int) -> int:
    return ((seed * 1_000_003 + expert) * 10_007 + epoch) % 2**63


def _name(augmentation: Augmentation | None) -> str | None:
    return None if augmentation is None else getattr(augmentation, "__name__", type(augmentation).__name__)


class _Points(Protocol):
    """Where trajectories are kept: the last epoch of each expert, and one point."""

    epochs: dict[int, int]

    def theta(self, expert: int, epoch: int) -> Tensor: ...


class _Files:
    """Our layout. An expert counts up to its first missing epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        there = {(int(m[1]), int(m[2])) for entry in os.listdir(folder) if (m := _NAME.fullmatch(entry))}
        self.epochs: dict[int, int] = {}
        for expert in sorted({expert for expert, _ in there}):
            last = next(epoch for epoch in range(len(there) + 1) if (expert, epoch) not in there) - 1
            self.epochs |= {expert: last} if last >= 0 else {}

    def theta(self, expert: int, epoch: int) -> Tensor:
        return coreset_file.read(_path(self.folder, expert, epoch))[0]["theta"]


class _Buffers:
    """MTT's. Files are mapped, so that only what is asked for is read."""

    def __init__(self, folder: Path) -> None:
        self.trajectories: list[Trajectory] = list(open_buffers(folder))
        self.epochs = {expert: len(points) - 1 for expert, points in enumerate(self.trajectories)}

    def theta(self, expert: int, epoch: int) -> Tensor:
        return torch.cat([part.detach().reshape(-1) for part in self.trajectories[expert][epoch]])
