"""`evaluate`: how well networks that know only a coreset do on the whole test set."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .corruptions import corrupted, corruption_names
from .dataset import SyntheticCoreset, as_float, load_coreset
from .distillers.claim import claimed
from .image_data import ImageData, Images, open_images
from .inference.by_name import default_inferences, inferences
from .inference.predict import Inference
from .judged_networks import Judge, judges
from .metrics import accuracy, brier, ece, nll
from .networks import Network
from .real_images import RealImages
from .reporting import Progress, Reporter
from .results import Log, Results, Row
from .targets import targets_as

METRICS: dict[str, Callable[[Tensor, Tensor], float]] = {"accuracy": accuracy, "nll": nll, "ece": ece, "brier": brier}

Corruptions = str | Sequence[str | tuple[str, int]]


def evaluate(
    coreset: SyntheticCoreset | str | os.PathLike[str],
    data: Images,
    *,
    by: Sequence[str] | Mapping[str, Inference] | None = None,
    networks: Sequence[str] | Mapping[str, Network] | None = None,
    widths: Sequence[int] | None = None,
    norm: str | None = None,
    against: Sequence[str] = (),
    seeds: int | Sequence[int] = 3,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    corruptions: Corruptions = (),
    severity: int | Sequence[int] = 3,
    image_size: int | None = None,
    validation: bool = False,
    output: str | os.PathLike[str] | None = None,
    progress: Progress = True,
) -> Results:
    """Accuracy, NLL, ECE and Brier score on the whole test set, of networks that know only the coreset.

    Each network is inferred once and measured on all test sets. Accuracy on the coreset's own images stands beside it: low,
    the network underfits; high beside a low one on test images, the set does not carry over to this network. The
    comparison that counts is with as many real images: `against=("random", "herding")`. Cost: a few seconds per small
    network, minutes by HMC and for networks of timm.

    Args:
        coreset: a coreset, its file, or a name from the zoo.
        data: whose test images to use: a folder, `"digits"`, or `(images, labels)`.
        by: inferences by name (`BY` has all), or your own as `{name: inference}`. By default `"sgd"` and `"last-layer"`
            for the network that the coreset was made with, `"recipe"` (training as `recipe_for` says) for others and
            wherever real images are compared with.
        networks: names of `NETWORKS`, `"timm:resnet18"`, `"timm:vit_tiny_patch16_224+depth=4"`, `"hf:DIR"` (a folder with
            a `config.json`), or your own as `{name: function that makes one}`; by default the network that the coreset
            was made with, or a ConvNet. Those of timm and Hugging Face get random weights and the data's channels and
            image size.
        widths: channels of the layers of every network of ours; by default those the coreset was made with, or the
            network's own.
        norm: `"batch"`, `"instance"` or `"group"` in the networks of ours, in place of their own.
        against: also train on as many real images as the coreset stores, `"random"` (others for each seed) or by
            `"herding"`; where a stored image holds several examples also on `"random-packed"`, as many as it has examples,
            shrunk and packed the same way.
        seeds: how many fresh networks, or their seeds.
        settings: of the inferences, `{"hmc": {"steps": 200}}`.
        corruptions: more test sets, as `"all"`, names, or pairs of name and severity.
        severity: of corruptions that do not say theirs, 1 to 5; several for each of them.
        image_size: scale and crop images to so many pixels; by default if the coreset was made of images scaled so.
        validation: measure on a tenth of the training images in place of the test images; not on those in the coreset.
        output: JSON file for the results. An evaluation that was killed continues from what it holds.
        progress: True for lines on stderr, or a function that gets them.

    Returns:
        Rows of figures, which print as a table.
    """
    numbers = range(seeds) if isinstance(seeds, int) else seeds
    if not len(numbers):
        raise ValueError(f"seeds must be at least 1, or the seeds themselves, got {seeds!r}")
    coreset = coreset if isinstance(coreset, SyntheticCoreset) else load_coreset(coreset)
    report, settings = Reporter(progress), settings or {}
    chosen = inferences(by, settings)
    images = open_images(data, image_size=image_size or _scaled(coreset))
    images = images.validation_split(without=coreset.pixels(stored=True)) if validation else images
    _check(coreset, images, report)
    test_sets = [None, *_corruptions(corruptions, severity)]
    about: Row = {"coreset": _digest(coreset), "data": images.name, "test_images": len(images.test[1])}
    about |= {"settings": {name: dict(values) for name, values in settings.items()}, "validation": validation}
    if against:
        report.note(f"the coreset: {coreset.size}")
    real = [_real(images, coreset, how, about, report) for how in _names(against)]
    sources = [_Source(lambda _: coreset, about), *real]
    runs = [
        _Run(source, judge, name, infer, seed)
        for judge in judges(networks, widths, norm, coreset, images, report)
        for name, infer in (
            default_inferences(judge.home and coreset.views is None, bool(against), settings)
            if chosen is None
            else chosen
        ).items()
        for source in sources
        for seed in numbers
    ]
    path = None if output is None else Path(output)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    with nullcontext() if path is None else claimed(path):
        return _measured(runs, test_sets, _TestSets(images, coreset), Log(path), report)


@dataclass(frozen=True)
class _Source:
    """Images to train on, given a seed, and what rows say of them."""

    images: Callable[[int], SyntheticCoreset]
    row: Row


def _real(data: ImageData, coreset: SyntheticCoreset, how: str, about: Row, report: Reporter) -> _Source:
    real = RealImages(data, coreset, how)
    report.note(f"{how}: {real.size}")
    return _Source(real.coreset, about | {"coreset": f"{how}, {real.size} as {about['coreset']}", "images": how})


@dataclass(frozen=True)
class _Run:
    """One network to infer."""

    source: _Source
    judge: Judge
    by: str
    infer: Inference
    seed: int

    @property
    def row(self) -> Row:
        """What its rows say of it."""
        return self.source.row | self.judge.row | {"by": self.by, "seed": self.seed}


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
        which = f"{run.row['network']} {run.by} on {run.row.get('images', 'the coreset')} seed {run.seed}"
        report.note(f"[{number}/{len(runs)}] {which}: {_line(done[0])}, {clock.left(number, bool(missing))}")
        results += done
    results.sort(key=lambda row: row["corruption"] is not None)  # clean ones first, otherwise in order
    log.finish(results)
    return results


def _rows(run: _Run, rows: Sequence[Row], test_sets: _TestSets) -> Iterator[Row]:
    begin, trained_on = time.process_time(), run.source.images(run.seed)
    predictive = run.infer(trained_on, run.judge.make, run.seed)
    inferred = time.process_time() - begin
    fitted = accuracy(predictive(as_float(trained_on.inputs)), targets_as(trained_on, "hard"))
    for row in rows:
        inputs, labels = test_sets.get(row["corruption"], row["severity"])
        begin = time.process_time()
        probabilities = predictive(inputs)
        seconds = round(inferred + time.process_time() - begin, 2)
        figures = {name: metric(probabilities, labels) for name, metric in METRICS.items()}
        yield row | figures | {"train_accuracy": fitted, "cpu_seconds": seconds}


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
    ours, theirs = tuple(coreset.stored.shape[1:]), tuple(data.test[0].shape[1:])
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
    return coreset.stored.shape[-1] if "image_size" in coreset.provenance else None


def _corruptions(asked: Corruptions, severity: int | Sequence[int]) -> list[tuple[str, int]]:
    if not asked:
        return []
    levels = (severity,) if isinstance(severity, int) else severity
    names = corruption_names() if asked == "all" else _names(asked)
    pairs = [pair for each in names for pair in ([(each, s) for s in levels] if isinstance(each, str) else [each])]
    for name, strength in pairs:
        if name not in corruption_names():
            raise ValueError(f"unknown corruption {name!r}; known: all, {', '.join(corruption_names())}")
        if strength not in range(1, 6):
            raise ValueError(f"severity must be 1 to 5, got {strength}")
    return pairs


def _names(names: Sequence[Any]) -> Sequence[Any]:
    """A name alone is one name, not its letters."""
    return (names,) if isinstance(names, str) else names


def _line(row: Row) -> str:
    fitted = f" (training {row['train_accuracy']:.1%})" if "train_accuracy" in row else ""
    return f"accuracy {row['accuracy']:.1%}{fitted}, NLL {row['nll']:.3f}, {row['cpu_seconds']:.0f} CPU s"


def _digest(coreset: SyntheticCoreset) -> str:
    digest = hashlib.sha256()
    for tensor in (coreset.stored, coreset.targets):
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())  # numpy has no bfloat16
    digest.update(b"" if coreset.tiles == 1 else f"{coreset.tiles} tiles".encode())
    digest.update(b"" if coreset.views is None else repr(coreset.views).encode())
    return digest.hexdigest()[:16]
