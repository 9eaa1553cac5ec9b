"""Experiments: labels made wrong on purpose and an oracle that knows them, many runs that survive a kill, their spread."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from . import ranks
from .coreset import Coreset
from .types import Strategy, View

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
"""What seconds can be counted by; those of the CPU where others use the machine."""

Row = dict[str, Any]


def with_wrong_labels(labels: Tensor, share: float, *, seed: int, classes: int | None = None) -> Tensor:
    """A copy in which `floor(share * n)` labels are replaced, each by one of the other classes at random.

    `classes` is the number of them, if not the largest label plus one.
    """
    classes = int(labels.max()) + 1 if classes is None else classes
    if not 0 <= share <= 1:
        raise ValueError(f"share must be in [0, 1], got {share}. For 30 % of wrong labels pass 0.3.")
    if share and classes < 2:
        raise ValueError(f"classes must be at least 2, so that there is another label to put, got {classes}")
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(labels), generator=generator)[: int(share * len(labels))]
    offsets = torch.randint(1, max(classes, 2), (len(chosen),), generator=generator)
    return labels.scatter(0, chosen, (labels[chosen] + offsets) % classes)


def oracle(wrong: Tensor) -> Strategy:
    """Keeps a random subset without the examples `wrong`: what could be had by knowing wrong labels and nothing else."""

    def select(view: View, size: int, generator: torch.Generator) -> Coreset:
        n = len(view.labels)
        order = torch.randperm(n, generator=generator)
        picks = order[torch.isin(order, wrong, invert=True)][:size]
        if len(picks) < size:
            raise ValueError(f"size must be at most {len(picks)}, the examples with right labels, got {size}")
        return Coreset(picks, torch.full((size,), n / size, dtype=torch.float64))

    return select


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
        return json.dumps([row.get(name) for name in jobs[0]])

    done = {key(row): row for row in rows_of(file)}
    todo = list({key(job): job for job in jobs if key(job) not in done}.values())
    for row in tqdm(_rows(todo, work, min(workers, len(todo))), "runs", len(todo), disable=not todo):
        done[key(row)] = row
        if ranks.world()[0] == 0:
            with file.open("a") as out:
                out.write(json.dumps(row) + "\n")
            tqdm.write(_short(row), file=sys.stderr)
    return [done[key(job)] for job in jobs]


def rows_of(file: Path) -> list[Row]:
    """What `run_all` has written so far. A last line that was cut off by a kill is taken out of the file."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        return []
    text = file.read_text()
    *lines, cut_off = text.split("\n")
    if cut_off and ranks.world()[0] == 0:
        file.write_text(text[: -len(cut_off)])
    return [json.loads(line) for line in lines]


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


def curves(rows: Sequence[Row], clock: str) -> dict[str, list[tuple[float, float]]]:
    """For each strategy the mean seconds and accuracy of its runs, a point for each number of `passes`.

    A point is a run of its own whose learning rate has come down to zero: what can be had in that time.
    """
    lines: dict[str, list[tuple[float, float]]] = {}
    for (name, _), found in sorted(grouped(rows, "strategy", "passes").items()):
        lines.setdefault(name, []).append((mean_of(found, clock), mean_of(found, "accuracy")))
    return lines


def _rows(todo: Sequence[Row], work: Callable[[Row], Row], workers: int) -> Iterator[Row]:
    if workers <= 1:
        for job in todo:
            yield {**job, **work(job)}
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(work, job): job for job in todo}
        for future in as_completed(futures):
            yield {**futures[future], **future.result()}


def _short(row: Row) -> str:
    return ", ".join(f"{name} {v:.4g}" if isinstance(v, float) else f"{name} {v}" for name, v in row.items())
