"""`coreset-sampler evaluate`: how well networks that know only a coreset do on the whole test set."""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from torch import Tensor

from ..synthetic.corruptions import corrupted, corruption_names
from ..synthetic.dataset import SyntheticCoreset, load_coreset
from ..synthetic.distillers.augment import augment
from ..synthetic.distillers.claim import claimed
from ..synthetic.image_data import ImageData, open_images
from ..synthetic.inference.predict import INFERENCES, Inference
from ..synthetic.metrics import accuracy, brier, ece, nll
from ..synthetic.networks import NETWORKS, Network, description, network
from .problem import add_widths
from .results import Log, Row, table

METRICS: dict[str, Callable[[Tensor, Tensor], float]] = {"accuracy": accuracy, "nll": nll, "ece": ece, "brier": brier}

BY: dict[str, Callable[..., Inference]] = INFERENCES | {
    "a-sgd": partial(INFERENCES["sgd"], augment=augment),
    "a-sghmc": partial(INFERENCES["sghmc"], augment=augment),
}


def add_evaluate(commands: Any) -> None:
    """Adds the command."""
    command = commands.add_parser(
        "evaluate",
        help="accuracy, NLL, ECE and Brier score on the whole test set",
        description="Judges networks that know only the coreset, by default of the kind that it was made with.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  coreset-sampler evaluate digits/vbpc-1 --data digits --by last-layer,sgd --seeds 3",
    )
    command.add_argument("file", metavar="FILE", help="a coreset of ours, or a name from the zoo")
    command.add_argument("--data", required=True, help="digits, or a folder that datasets.load_dataset opens")
    command.add_argument("--by", default="last-layer,sgd,hmc", help=f"any of {','.join(BY)} (default: %(default)s)")
    command.add_argument("--nets", help=f"any of {','.join(NETWORKS)} (default: the one that FILE names, or convnet)")
    add_widths(command, "channels of the layers of every net (default: those that FILE names, or the net's own)")
    command.add_argument("--size", type=int, help="scale and crop images to so many pixels (default: as FILE says)")
    command.add_argument("--seeds", type=int, default=3, help="networks to judge with (default: 3)")
    command.add_argument("--corruptions", metavar="NAMES", help="such as gaussian_noise,motion_blur, or all")
    command.add_argument("--severity", type=int, default=3, help="of corruptions, 1 to 5 (default: 3)")
    command.add_argument("--set", nargs="+", default=[], metavar="BY.NAME=VALUE", help="settings, as in hmc.steps=200")
    command.add_argument(
        "--validation", action="store_true", help="a tenth of the training images in place of the test"
    )
    command.add_argument("-o", "--output", metavar="JSON", type=Path, help="results; a killed run goes on from there")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    if options.output is None:
        return _evaluate(options)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with claimed(options.output):
        _evaluate(options)
    _write(sys.stdout, f"wrote {options.output}")


def _evaluate(options: argparse.Namespace) -> None:
    coreset = load_coreset(options.file)
    settings = _settings(options.set)
    data = open_images(options.data, size=options.size or _scaled(coreset))
    data = data.validation_split() if options.validation else data
    nets = _nets(options, coreset)
    shape = data.channels, len(data.classes), data.size
    rows = evaluate(
        coreset,
        data,
        by={name: _look_up(name)(**settings.get(name, {})) for name in options.by.split(",")},
        nets={name: network(name, *shape, widths=widths) for name, widths in nets.items()},
        seeds=range(options.seeds),
        corruptions=_corruptions(options),
        about={"settings": settings, "validation": options.validation},
        widths=nets,
        log=Log(options.output),
        say=lambda line: _write(sys.stderr, line),
    )
    _write(sys.stdout, table(rows))


def evaluate(
    coreset: SyntheticCoreset,
    data: ImageData,
    *,
    by: dict[str, Inference],
    nets: dict[str, Network],
    seeds: Sequence[int] = (0, 1, 2),
    corruptions: Sequence[tuple[str, int] | None] = (None,),
    about: Row | None = None,
    widths: Mapping[str, Sequence[int]] | None = None,
    log: Log | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """A row of figures on the whole test set for each net, inference, seed and corruption (`None`: images as they are).

    Each network is inferred once and judged on all test sets. Rows that `log` holds already are taken from it. Rows
    carry what `about` says of the whole run, and of `widths` those of their net.
    """
    _check(coreset, data, say)
    log = Log(None) if log is None else log
    about = {"coreset": _digest(coreset), "data": data.name, "test_images": len(data.test[1])} | (about or {})
    jobs = [(net, name, seed) for net in nets for name in by for seed in seeds]
    test_sets, clock, results = _TestSets(data, coreset), _Clock(len(jobs)), []
    for number, (net, name, seed) in enumerate(jobs, 1):
        start: Row = about | {"net": net, "by": name, "seed": seed}
        start |= {"widths": list(widths[net])} if widths else {}
        wanted = [start | dict(zip(("corruption", "severity"), c or (None, None), strict=True)) for c in corruptions]
        missing = [row for row in wanted if log.find(row) is None]
        if missing:
            for row in _judged(partial(by[name], coreset, nets[net], seed), missing, test_sets):
                log.add(row)
        done = [found for row in wanted if (found := log.find(row)) is not None]
        say(f"[{number}/{len(jobs)}] {net} {name} seed {seed}: {_line(done[0])}, {clock.left(number, bool(missing))}")
        results += done
    results.sort(key=lambda row: row["corruption"] is not None)  # clean ones first, otherwise in order
    log.finish(results)
    return results


def _judged(infer: Callable[[], Any], rows: Sequence[Row], test_sets: _TestSets) -> Iterator[Row]:
    begin = time.process_time()
    predictive = infer()
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
    """Time left, from the jobs that were run and not found in the log."""

    def __init__(self, jobs: int) -> None:
        self.jobs, self.began, self.ran = jobs, time.monotonic(), 0

    def left(self, number: int, ran: bool) -> str:
        self.ran += ran
        each = (time.monotonic() - self.began) / max(self.ran, 1)
        return f"{each * (self.jobs - number) / 60:.1f} min left" if ran else "done before"


def _check(coreset: SyntheticCoreset, data: ImageData, say: Callable[[str], None]) -> None:
    ours, theirs = tuple(coreset.inputs.shape[1:]), tuple(data.test[0].shape[1:])
    if ours != theirs:
        raise ValueError(
            f"the coreset's inputs are {ours}, images of {data.name} {theirs}; pass the data it was made from, or open "
            "them at its size (--size) if it was made of images scaled to that"
        )
    if coreset.num_classes != len(data.classes):
        raise ValueError(f"the coreset has {coreset.num_classes} classes, {data.name} has {len(data.classes)}")
    if not coreset.classes or not data.named:
        say(
            f"whether classes are the same is not checked: {data.name if coreset.classes else 'the coreset'} names none"
        )
    elif coreset.classes != data.classes:
        same = set(coreset.classes) == set(data.classes)
        names = ", ".join(coreset.classes[:5]), ", ".join(data.classes[:5])
        raise ValueError(
            f"the classes of the coreset are {'in another order than' if same else 'not'} those of {data.name}: "
            f"{names[0]}, ... and {names[1]}, ...; pass the data it was made from"
        )


def _scaled(coreset: SyntheticCoreset) -> int | None:
    """The pixels of a side if the coreset was made of images scaled by `--size`."""
    return coreset.inputs.shape[-1] if "image_size" in coreset.provenance else None


def _nets(options: argparse.Namespace, coreset: SyntheticCoreset) -> dict[str, list[int]]:
    """Networks with their widths: what was asked for, else what the coreset was made with, else the networks' own."""
    made = coreset.provenance.get("network")
    own = made if isinstance(made, dict) and made.get("net") in NETWORKS else {}
    nets: dict[str, list[int]] = {}
    for name in options.nets.split(",") if options.nets else [own.get("net", "convnet")]:
        recorded = own.get("widths") if name == own.get("net") else None
        nets[name] = description(name, options.widths or recorded)["widths"]
        source = "asked for" if options.widths else "what the coreset was made with" if recorded else "the net's own"
        _write(sys.stderr, f"{name}: widths {' '.join(map(str, nets[name]))}, {source}")
    return nets


def _corruptions(options: argparse.Namespace) -> list[tuple[str, int] | None]:
    if options.corruptions is None:
        return [None]
    names = corruption_names() if options.corruptions == "all" else options.corruptions.split(",")
    unknown = [name for name in names if name not in corruption_names()]
    if unknown:
        raise ValueError(f"unknown corruption {unknown[0]!r}; known: all, {', '.join(corruption_names())}")
    return [None, *((name, options.severity) for name in names)]


def _look_up(name: str) -> Callable[..., Inference]:
    if name not in BY:
        raise ValueError(f"unknown inference {name!r}; known: {', '.join(BY)}")
    return BY[name]


def _settings(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`["hmc.steps=200"]` as `{"hmc": {"steps": 200}}`, names checked against the function's."""
    settings: dict[str, dict[str, Any]] = {}
    for text in texts:
        path, equals, value = text.partition("=")
        by, _, name = path.partition(".")
        known = [key for key in inspect.signature(_look_up(by)).parameters if key not in ("augment", "start", "report")]
        if not equals or name not in known:
            raise ValueError(f"--set takes {by}.NAME=VALUE with NAME one of {', '.join(known)}, got {text!r}")
        settings.setdefault(by, {})[name] = json.loads(value)
    return settings


def _write(stream: TextIO, line: str) -> None:
    stream.write(line + "\n")
    stream.flush()


def _line(row: Row) -> str:
    return f"accuracy {row['accuracy']:.1%}, NLL {row['nll']:.3f}, {row['cpu_seconds']:.0f} CPU s"


def _digest(coreset: SyntheticCoreset) -> str:
    digest = hashlib.sha256()
    for tensor in (coreset.inputs, coreset.targets):
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
