"""`evaluate`: how well networks that know only a coreset do on the whole test set."""

from __future__ import annotations

import hashlib
import inspect
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from .corruptions import corrupted, corruption_names
from .dataset import SyntheticCoreset, load_coreset
from .distillers.augment import augment
from .distillers.claim import claimed
from .image_data import ImageData, Images, open_images
from .inference.predict import INFERENCES, Inference
from .metrics import accuracy, brier, ece, nll
from .networks import NETWORKS, Network, description, network
from .reporting import Progress, Reporter
from .results import Log, Results, Row

METRICS: dict[str, Callable[[Tensor, Tensor], float]] = {"accuracy": accuracy, "nll": nll, "ece": ece, "brier": brier}

BY: dict[str, Callable[..., Inference]] = INFERENCES | {
    "a-sgd": partial(INFERENCES["sgd"], augment=augment),
    "a-sghmc": partial(INFERENCES["sghmc"], augment=augment),
}

Corruptions = str | Sequence[str | tuple[str, int]]


def evaluate(
    coreset: SyntheticCoreset | str | os.PathLike[str],
    data: Images,
    *,
    by: Sequence[str] | Mapping[str, Inference] = ("sgd", "last-layer"),
    networks: Sequence[str] | Mapping[str, Network] | None = None,
    widths: Sequence[int] | None = None,
    seeds: int | Sequence[int] = 3,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    corruptions: Corruptions = (),
    severity: int = 3,
    image_size: int | None = None,
    validation: bool = False,
    output: str | os.PathLike[str] | None = None,
    progress: Progress = True,
) -> Results:
    """Accuracy, NLL, ECE and Brier score on the whole test set, of networks that know only the coreset.

    Each network is inferred once and measured on all test sets. Cost: a few seconds per network by SGD or in closed form,
    minutes by HMC.

    Args:
        coreset: a coreset, its file, or a name from the zoo.
        data: whose test images to use: a folder, `"digits"`, or `(images, labels)`.
        by: inferences by name (`BY` has all), or your own as `{name: inference}`.
        networks: names of `NETWORKS`, or your own as `{name: function that makes one}`; by default the network that the
            coreset was made with, or a ConvNet.
        widths: channels of the layers of every network; by default those the coreset was made with, or the network's own.
        seeds: how many fresh networks, or their seeds.
        settings: of the inferences, `{"hmc": {"steps": 200}}`.
        corruptions: more test sets, as `"all"`, names, or pairs of name and severity.
        severity: of corruptions that do not say theirs, 1 to 5.
        image_size: scale and crop images to so many pixels; by default if the coreset was made of images scaled so.
        validation: measure on a tenth of the training images in place of the test images.
        output: JSON file for the results. An evaluation that was killed continues from what it holds.
        progress: True for lines on stderr, or a function that gets them.

    Returns:
        Rows of figures, which print as a table.
    """
    coreset = coreset if isinstance(coreset, SyntheticCoreset) else load_coreset(coreset)
    report = Reporter(progress)
    chosen, settings = _inferences(by, settings or {}), settings or {}
    images = open_images(data, image_size=image_size or _scaled(coreset))
    images = images.validation_split() if validation else images
    _check(coreset, images, report)
    made, about_networks = _networks(networks, widths, coreset, images, report)
    test_sets = [None, *_corruptions(corruptions, severity)]
    about: Row = {"coreset": _digest(coreset), "data": images.name, "test_images": len(images.test[1])}
    about |= {"settings": {name: dict(values) for name, values in settings.items()}, "validation": validation}
    runs = [
        _Run(partial(chosen[name], coreset, made[net], seed), about | about_networks[net] | {"by": name, "seed": seed})
        for net in made
        for name in chosen
        for seed in (range(seeds) if isinstance(seeds, int) else seeds)
    ]
    path = None if output is None else Path(output)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    with nullcontext() if path is None else claimed(path):
        return _measured(runs, test_sets, _TestSets(images, coreset), Log(path), report)


@dataclass(frozen=True)
class _Run:
    """One network to infer, and what its rows say of it."""

    infer: Callable[[], Callable[[Tensor], Tensor]]
    row: Row


def _measured(
    runs: Sequence[_Run],
    corruptions: Sequence[tuple[str, int] | None],
    test_sets: _TestSets,
    log: Log,
    report: Reporter,
) -> Results:
    """A row for each run and test set, from the log where it holds it."""
    clock, results = _Clock(len(runs)), Results()
    for number, run in enumerate(runs, 1):
        wanted = [run.row | dict(zip(("corruption", "severity"), c or (None, None), strict=True)) for c in corruptions]
        missing = [row for row in wanted if log.find(row) is None]
        if missing:
            for row in _rows(run, missing, test_sets):
                log.add(row)
        done = [found for row in wanted if (found := log.find(row)) is not None]
        which = f"{run.row['network']} {run.row['by']} seed {run.row['seed']}"
        report.note(f"[{number}/{len(runs)}] {which}: {_line(done[0])}, {clock.left(number, bool(missing))}")
        results += done
    results.sort(key=lambda row: row["corruption"] is not None)  # clean ones first, otherwise in order
    log.finish(results)
    return results


def _rows(run: _Run, rows: Sequence[Row], test_sets: _TestSets) -> Iterator[Row]:
    begin = time.process_time()
    predictive = run.infer()
    inferred = time.process_time() - begin
    for row in rows:
        inputs, labels = test_sets.get(row["corruption"], row["severity"])
        begin = time.process_time()
        probabilities = predictive(inputs)
        seconds = round(inferred + time.process_time() - begin, 2)
        yield row | {name: metric(probabilities, labels) for name, metric in METRICS.items()} | {"cpu_seconds": seconds}


@dataclass
class _TestSets:
    """Test inputs as the coreset's networks see them, with labels. Corrupted pixels are kept as bytes."""

    data: ImageData
    coreset: SyntheticCoreset

    def __post_init__(self) -> None:
        self.made: dict[tuple[str | None, int | None], Tensor] = {(None, None): self.data.test[0]}

    def get(self, corruption: str | None, severity: int | None) -> tuple[Tensor, Tensor]:
        if corruption is not None and severity is not None and (corruption, severity) not in self.made:
            self.made[corruption, severity] = corrupted(self.data.test[0], corruption, severity=severity)
        return self.coreset.preprocessing(self.made[corruption, severity].float() / 255), self.data.test[1]


class _Clock:
    """Time left, from the runs that were made and not found in the log."""

    def __init__(self, runs: int) -> None:
        self.runs, self.began, self.made = runs, time.monotonic(), 0

    def left(self, number: int, ran: bool) -> str:
        self.made += ran
        each = (time.monotonic() - self.began) / max(self.made, 1)
        return f"{each * (self.runs - number) / 60:.1f} min left" if ran else "done before"


def _check(coreset: SyntheticCoreset, data: ImageData, report: Reporter) -> None:
    ours, theirs = tuple(coreset.inputs.shape[1:]), tuple(data.test[0].shape[1:])
    if ours != theirs:
        raise ValueError(
            f"the coreset's inputs are {ours}, images of {data.name} {theirs}; pass the data it was made from, or open "
            "them at its size (image_size) if it was made of images scaled to that"
        )
    if coreset.num_classes != data.num_classes:
        raise ValueError(f"the coreset has {coreset.num_classes} classes, {data.name} has {data.num_classes}")
    if not coreset.class_names or not data.named:
        unnamed = data.name if coreset.class_names else "the coreset"
        report.note(f"whether classes are the same is not checked: {unnamed} has no class names")
    elif coreset.class_names != data.class_names:
        same = set(coreset.class_names) == set(data.class_names)
        names = ", ".join(coreset.class_names[:5]), ", ".join(data.class_names[:5])
        raise ValueError(
            f"the classes of the coreset are {'in another order than' if same else 'not'} those of {data.name}: "
            f"{names[0]}, ... and {names[1]}, ...; pass the data it was made from"
        )


def _scaled(coreset: SyntheticCoreset) -> int | None:
    """The pixels of a side if the coreset was made of images scaled to them."""
    return coreset.inputs.shape[-1] if "image_size" in coreset.provenance else None


def _networks(
    asked: Sequence[str] | Mapping[str, Network] | None,
    widths: Sequence[int] | None,
    coreset: SyntheticCoreset,
    data: ImageData,
    report: Reporter,
) -> tuple[dict[str, Network], dict[str, Row]]:
    """Makers of networks and what rows say of them: what was asked for, else what the coreset was made with."""
    if isinstance(asked, Mapping):
        if widths:
            raise ValueError("widths must be left out where networks are functions that make them")
        return dict(asked), {name: {"network": name} for name in asked}
    recorded = coreset.provenance.get("network")
    own = recorded if isinstance(recorded, dict) and recorded.get("net") in NETWORKS else {}
    shape, made, about = (data.channels, data.num_classes, data.image_size), {}, {}
    for name in (own.get("net", "convnet"),) if asked is None else asked:
        same = own.get("widths") if name == own.get("net") else None
        used = description(name, widths or same)["widths"]
        source = "asked for" if widths else "what the coreset was made with" if same else "the network's own"
        report.note(f"{name}: widths {' '.join(map(str, used))}, {source}")
        made[name], about[name] = network(name, *shape, widths=used), {"network": name, "widths": used}
    return made, about


def _corruptions(asked: Corruptions, severity: int) -> list[tuple[str, int]]:
    if not asked:
        return []
    names = corruption_names() if asked == "all" else (asked,) if isinstance(asked, str) else asked
    pairs = [(each, severity) if isinstance(each, str) else each for each in names]
    for name, strength in pairs:
        if name not in corruption_names():
            raise ValueError(f"unknown corruption {name!r}; known: all, {', '.join(corruption_names())}")
        if strength not in range(1, 6):
            raise ValueError(f"severity must be 1 to 5, got {strength}")
    return pairs


def _inferences(
    by: Sequence[str] | Mapping[str, Inference], settings: Mapping[str, Mapping[str, Any]]
) -> dict[str, Inference]:
    if isinstance(by, Mapping):
        return dict(by)
    names = (by,) if isinstance(by, str) else by
    for name, values in settings.items():
        known = settings_of_inference(name)
        for unknown in (each for each in values if each not in known):
            raise ValueError(f"{name} has no setting {unknown!r}; it has {', '.join(known)}")
    return {name: _look_up(name)(**settings.get(name, {})) for name in names}


def settings_of_inference(name: str) -> list[str]:
    """The settings that an inference has."""
    parameters = inspect.signature(_look_up(name)).parameters
    return [key for key in parameters if key not in ("augment", "start", "report")]


def _look_up(name: str) -> Callable[..., Inference]:
    if name not in BY:
        raise ValueError(f"unknown inference {name!r}; known: {', '.join(BY)}")
    return BY[name]


def _line(row: Row) -> str:
    return f"accuracy {row['accuracy']:.1%}, NLL {row['nll']:.3f}, {row['cpu_seconds']:.0f} CPU s"


def _digest(coreset: SyntheticCoreset) -> str:
    digest = hashlib.sha256()
    for tensor in (coreset.inputs, coreset.targets):
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
