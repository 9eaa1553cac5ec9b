"""What the benchmarks share: a grid of runs that survives a kill, tuning on validation data, tables, time to accuracy.

A benchmark says which settings and contestants there are and how one run goes, and hands them to `main` as a `Study`:

    run         one contestant
    tune        every contestant, the same trials, on validation data
    table       the tuned contestants on test data
    time        accuracy against time, as ratios and a picture
    ablation    one thing changed at a time, on validation data

Finished runs are lines of JSON in --results and are not run again; a run in progress is in a `Checkpoint` beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from origin import origin
from time_to_accuracy import as_many_epochs, time_to_accuracy
from torch import distributed
from tqdm import tqdm

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
"""What seconds can be counted by; those of the CPU where others use the machine."""

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What `--setting` chooses; a benchmark adds what its training needs."""

    passes: float  # over the training examples; ten epochs of a tenth are one
    noises: tuple[float, ...]
    lengths: tuple[float, ...] = ()  # passes that `time` tries; the longest run on full data sets the aim
    trials: tuple[Row, ...]  # entries of a job that `tune` tries for every contestant
    tuned: Mapping[tuple[float, str], Row] = field(default_factory=dict)  # by (noise, contestant or "any")

    def trial(self, noise: float, name: str) -> Row:
        """As tuned, or the first."""
        return self.tuned.get((noise, name)) or self.tuned.get((noise, "any")) or self.trials[0]


@dataclass(frozen=True)
class Study:
    """A benchmark: `train(job, args)` gives the figures of one run, `accuracy`, the clocks, and others in [0, 1]."""

    name: str  # of its files
    examples: str  # what they are called
    settings: Mapping[str, Setting]
    contestants: Sequence[str]
    ablation: Sequence[str]
    train: Callable[[Row, argparse.Namespace], Row]
    seeds: int = 3


def jobs_of(study: Study, args: argparse.Namespace) -> list[Row]:
    """The runs of a command."""
    setting, seeds = study.settings[args.setting], range(args.seed, args.seed + args.seeds)
    noises, names, lengths = args.noise or setting.noises, args.strategy or study.contestants, [setting.passes]
    if args.command == "run":
        noises, names, seeds = args.noise or [0.0], args.strategy or ["stable"], range(args.seed, args.seed + 1)
    elif args.command == "tune":
        seeds = range(100, 101)
    elif args.command == "time":
        lengths = list(args.lengths or setting.lengths)
        if "full" not in names:
            raise SystemExit("time compares with full data: add full to --strategy")
    elif args.command == "ablation":
        names, seeds = args.strategy or study.ablation, range(200, 200 + args.seeds)
    on = "validation" if args.command in ("tune", "ablation") or args.validation else "test"

    def trials(noise: float, name: str) -> tuple[Row, ...]:
        asked = {entry: getattr(args, entry) for entry in _entries(study)}
        asked = {entry: value for entry, value in asked.items() if value is not None}
        return setting.trials if args.command == "tune" else (setting.trial(noise, name) | asked,)

    return [
        dict(setting=args.setting, on=on, noise=noise, strategy=name)
        | trial | dict(passes=float(trial.get("passes", length)), seed=seed)
        for seed in seeds for noise in noises for length in lengths for name in names for trial in trials(noise, name)
    ]  # fmt: skip


def run_all(jobs: Sequence[Row], work: Callable[[Row], Row], file: Path, *, workers: int = 1) -> list[Row]:
    """The row of every job: what it says and what `work` found. Jobs have the same keys and go into JSON.

    Each row is written to `file`, a line, as soon as it is there, and jobs that have a line already are not run again:
    an experiment that was killed goes on. With `workers` above 1 so many run at a time, in processes of their own, so
    `work` must be a function that can be pickled.
    """
    if not jobs:
        return []
    jobs = [json.loads(json.dumps(job)) for job in jobs]

    def key(row: Row) -> str:
        return json.dumps([row.get(name) for name in sorted(jobs[0])])

    done = {key(row): row for row in rows_of(file)}
    todo = list({key(job): job for job in jobs if key(job) not in done}.values())
    for row in tqdm(_rows(todo, work, min(workers, len(todo))), "runs", len(todo), disable=not todo):
        done[key(row)] = row
        if is_first():
            with file.open("a") as out:
                out.write(json.dumps(row) + "\n")
            tqdm.write(_short(row), file=sys.stderr)
    return [done[key(job)] for job in jobs]


def rows_of(file: Path) -> list[Row]:
    """What `run_all` has written so far. A last line that was cut off by a kill is taken out of the file."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        return []
    text = file.read_bytes()
    *lines, cut_off = text.split(b"\n")
    if cut_off and is_first():
        os.truncate(file, len(text) - len(cut_off))
    return [json.loads(line) for line in lines]


class Checkpoint:
    """A run in progress, in a file beside the results: `parts` have a state_dict, the rest are figures."""

    def __init__(self, name: str, job: Row, args: argparse.Namespace, parts: Mapping[str, Any]) -> None:
        self.file = args.results.parent / (f"{name}-" + "-".join(str(value) for value in job.values()) + ".pt")
        self.parts, self.every, self.last = parts, args.save_every, time.perf_counter()

    def load(self, figures: Row) -> Row:
        """The parts as they were, and their figures; those given if there is nothing to go on from."""
        if not self.file.exists():
            return figures
        saved = torch.load(self.file, weights_only=True, map_location="cpu")
        for name, part in self.parts.items():
            part.load_state_dict(saved[name])
        return {name: saved[name] for name in figures}

    def save(self, figures: Row) -> bool:
        """If the last time is long enough ago; says whether it did."""
        if not is_first() or time.perf_counter() - self.last < self.every:
            return False
        state = {name: part.state_dict() for name, part in self.parts.items()}
        torch.save(state | figures, self.file.with_suffix(".new"))
        os.replace(self.file.with_suffix(".new"), self.file)
        self.last = time.perf_counter()
        return True

    def remove(self) -> None:
        """The run is finished."""
        if is_first():
            self.file.unlink(missing_ok=True)


def grouped(rows: Sequence[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """The rows that agree in these entries, in order of appearance."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def mean_of(rows: Sequence[Row], name: str) -> float:
    """The mean of one entry."""
    return statistics.fmean(row[name] for row in rows)


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation."""
    return f"{statistics.fmean(values):.3f} ± {statistics.stdev(values) if len(values) > 1 else 0.0:.3f}"


def report(study: Study, rows: Sequence[Row], args: argparse.Namespace) -> None:
    """The table in markdown; what tuning chose; how soon each is as good as full data."""
    shown = [name for name in ("share", "clean", "distinct") if name in rows[0]]
    titles = dict(share="selection", clean="clean labels", distinct="different examples")
    entries = _entries(study)
    columns = ["noise", "strategy", ", ".join(entries), "accuracy", "seconds", *(titles[name] for name in shown)]
    print(f"| {' | '.join(columns)} |\n" + "|---" * len(columns) + "|")
    for cell, found in grouped(rows, "noise", "strategy", *entries).items():
        trial = ", ".join(f"{value:g}" for value in cell[2:])
        costs = [f"{mean_of(found, name):{'.0%' if name == 'share' else '.2f'}}" for name in shown]
        cells = [
            *cell[:2],
            trial,
            spread([row["accuracy"] for row in found]),
            f"{mean_of(found, args.clock):.0f}",
            *costs,
        ]
        print("| " + " | ".join(map(str, cells)) + " |")
    where = f"{rows[0]['on']} {study.examples}, n = {len(found)} seeds"
    print(f"\n{where}, mean ± standard deviation; {args.clock} seconds")
    for cell, found in grouped(rows, "noise", "strategy").items() if args.command == "tune" else ():
        best = max(found, key=lambda row: row["accuracy"])
        print(f"    {cell}: { ({name: best[name] for name in entries}) },  # {best['accuracy']:.4f}")
    for (noise,), some in grouped(rows, "noise").items() if args.command == "time" else ():
        picture = args.picture.with_stem(f"{args.picture.stem}-{noise:g}")
        title = f"{study.name}, {noise:.0%} of the labels wrong"
        told = time_to_accuracy(curves(some, args.clock), picture, title=title, deviation=deviation_of_best(some))
        epochs = {
            cell: (mean_of(runs, args.clock), mean_of(runs, "accuracy"))
            for cell, runs in grouped([row for row in some if "epochs" in row], "strategy", "epochs").items()
        }
        print(*told, *as_many_epochs(epochs), f"picture: {picture}", sep="\n")


def curves(rows: Sequence[Row], clock: str) -> dict[str, list[tuple[float, float]]]:
    """For each strategy the mean seconds and accuracy of its runs, a point for each number of `passes`.

    A point is a run of its own whose learning rate has come down to zero: what can be had in that time.
    """
    lines: dict[str, list[tuple[float, float]]] = {}
    for (name, _), found in sorted(grouped(rows, "strategy", "passes").items()):
        lines.setdefault(name, []).append((mean_of(found, clock), mean_of(found, "accuracy")))
    return lines


def deviation_of_best(rows: Sequence[Row]) -> float | None:
    """The standard deviation of full data's best accuracy over seeds; None for a single one."""
    runs = grouped([row for row in rows if row["strategy"] == "full"], "passes").values()
    best = [row["accuracy"] for row in max(runs, key=lambda found: mean_of(found, "accuracy"))]
    return statistics.stdev(best) if len(best) > 1 else None


def with_other_lengths(rows: Sequence[Row], file: Path) -> list[Row]:
    """The rows, and those in the file that differ from one of them in `passes` and what came of it alone."""
    names = ("setting", "on", "noise", "strategy", "lr", "batch_size", "seed")
    wanted = {tuple(row.get(name) for name in names) for row in rows}
    return [row for row in rows_of(file) if tuple(row.get(name) for name in names) in wanted]


def recipe(name: str) -> Any:
    """A recipe as a module, so that what is measured is what people copy."""
    spec = spec_from_file_location(f"recipe_{name}", Path(__file__).parents[1] / "recipes" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def is_first() -> bool:
    """Whether this is the process that writes, under torchrun or not."""
    return int(os.environ.get("RANK", 0)) == 0


@contextmanager
def processes() -> Iterator[torch.device]:
    """The device of this process; under torchrun they are connected meanwhile."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        distributed.init_process_group("nccl" if cuda else "gloo")
    try:
        yield device
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


def main(study: Study, about: str | None, more: Callable[[argparse.ArgumentParser], None]) -> None:
    """The command line of a benchmark; `more` adds its own options."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    lengths = any(setting.lengths for setting in study.settings.values())
    add("command", choices=["run", "tune", "table", *["time"] * lengths, *["ablation"] * bool(study.ablation)])
    add("--data", required=True, help="folder or hub id for datasets.load_dataset")
    add("--setting", choices=study.settings, default=next(iter(study.settings)), help="default: %(default)s")
    names = dict.fromkeys((*study.contestants, *study.ablation))
    add("--strategy", choices=names, nargs="+", help="default: stable for run, all for the others")
    add("--noise", type=float, nargs="+", help="shares of wrong labels (default: the setting's; 0 for run)")
    for entry in _entries(study):
        kind = type(next(iter(study.settings.values())).trials[0].get(entry, 0.0))
        add(f"--{entry.replace('_', '-')}", type=kind, help="default: as tuned, or the setting's first trial")
    add("--lengths", type=float, nargs="+", help="passes that time tries (default: the setting's)")
    add("--validation", action="store_true", help=f"score on {study.examples} set aside from training, not on test")
    add("--seed", type=int, default=0, help="of run, the first of table and time (default: %(default)s)")
    add("--seeds", type=int, default=study.seeds, help="for table, time and ablation (default: %(default)s)")
    add("--clock", choices=CLOCKS, default="wall", help="to report; cpu where others use the machine")
    add("--jobs", type=int, default=1, help="runs at a time (default: %(default)s)")
    add("--threads", type=int, default=1, help="of the CPU, for a run (default: %(default)s)")
    add("--results", type=Path, default=Path(f"runs/{study.name}.jsonl"), help="default: %(default)s")
    add("--picture", type=Path, default=Path(f"runs/{study.name}_time.png"), help="of time (default: %(default)s)")
    more(parser)
    args = parser.parse_args()
    with processes() as args.device:
        rows = run_all(jobs_of(study, args), partial(study.train, args=args), args.results, workers=args.jobs)
        if is_first():
            report(study, with_other_lengths(rows, args.results) if args.command == "time" else rows, args)


def _entries(study: Study) -> list[str]:
    trial = next(iter(study.settings.values())).trials[0]
    return list(dict.fromkeys((*trial, "passes")))


def _rows(todo: Sequence[Row], work: Callable[[Row], Row], workers: int) -> Iterator[Row]:
    if workers <= 1:
        for job in todo:
            yield {**job, **work(job), **origin()}
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(work, job): job for job in todo}
        for future in as_completed(futures):
            yield {**futures[future], **future.result(), **origin()}


def _short(row: Row) -> str:
    return ", ".join(f"{name} {v:.4g}" if isinstance(v, float) else f"{name} {v}" for name, v in row.items())
