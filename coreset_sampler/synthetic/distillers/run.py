"""Runs a distiller for a long time: says how it goes, looks at held-out accuracy, saves, stops when asked."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from ..dataset import SyntheticCoreset
from ..inference.predict import by_last_layer, by_sgd
from ..networks import Network
from ..preprocessing import Preprocessing
from . import checkpoint
from .checkpoint import Progress
from .pixels import check_number
from .real_data import RealData
from .state import Distiller, DivergedError, Source, State

Report = Callable[[str], None]
Judge = Callable[[State], float]


class StoppedError(Exception):
    """A run was asked to stop and has saved itself; the message says where and at which step."""


def run(
    distiller: Distiller,
    progress: Progress,
    source: Source,
    *,
    steps: int,
    minutes: float | None = None,
    save: Callable[[Progress], None] | None = None,
    save_every: float = 120.0,
    judge: Judge | None = None,
    judge_every: int | None = None,
    report: Report | None = None,
) -> Progress:
    """Goes on from `progress` to `steps` in all, or until `minutes` of stepping in all are over.

    The result depends on where it began and on `steps`, not on what is saved, judged or reported, nor on how often it
    was interrupted (`minutes` is a limit by the clock and depends on the machine). `save` is called every `save_every`
    seconds, at the end, before a `StoppedError` on Ctrl-C or SIGTERM, and with the last good state before a `DivergedError`.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    if minutes is not None and minutes <= 0:
        raise ValueError(f"minutes must be positive, got {minutes}; leave them out for no limit")
    if judge_every is not None:
        check_number("evaluate_every", judge_every, count=True)
    judge_every = judge_every or max(1, steps // 10)
    saved, meter = time.monotonic(), _Meter(progress, steps, minutes, report)
    with _stop_signals() as stop:
        while progress.state.step < steps and not (minutes and progress.seconds >= 60 * minutes):
            began = time.monotonic()
            try:
                state, info = distiller.step(_filmed(progress).state, source)
            except DivergedError:
                _save(save, progress)
                raise
            spent = progress.seconds + time.monotonic() - began
            since = progress.since[0] + info["loss"], progress.since[1] + 1
            progress = replace(_filmed(progress), state=state, seconds=spent, since=since)
            if state.step % judge_every == 0 or state.step == steps:
                progress = _judged(progress, judge)
            meter.show(progress, info)
            if time.monotonic() - saved > save_every:
                _save(save, progress)
                saved = time.monotonic()
            if stop:
                _save(save, progress)
                raise StoppedError(f"stopped after step {state.step} of {steps}")
    progress = _filmed(progress, always=True)
    _save(save, progress)
    return progress


def start(
    distiller: Distiller,
    data: RealData,
    images_per_class: int,
    *,
    seed: int = 0,
    label: Callable[[Tensor], Tensor] | None = None,
) -> Progress:
    """A run before its first step, from random real images of each class, as many as the stored images have room for.

    `label` gives them probabilities in place of their own targets.
    """
    examples = images_per_class * getattr(distiller, "tiles", 1) ** 2
    inputs, targets = data.per_class(examples, Generator().manual_seed(seed))
    return Progress(distiller.init(inputs, targets if label is None else label(inputs), seed=seed))


def as_coreset(
    distiller: Distiller, state: State, *, preprocessing: Preprocessing, method: str | None = None, **about: Any
) -> SyntheticCoreset:
    """The coreset of a state, with what the distiller says of it; `about` holds more arguments of `SyntheticCoreset`."""
    described = distiller.describe(state)
    own = method or getattr(distiller, "name", type(distiller).__name__)
    return SyntheticCoreset(state.inputs, state.targets, preprocessing=preprocessing, method=own, **described, **about)


def held_out_accuracy(
    network: Network, coreset: SyntheticCoreset, data: RealData, *, steps: int = 200, seed: int = 0
) -> float:
    """Accuracy on `data` of one fresh network that knows only the coreset: by its closed form if it has one, else SGD."""
    infer = by_sgd(steps=steps) if coreset.last_layer is None else by_last_layer()
    predict = infer(coreset, network, seed)
    right = 0
    for rows in torch.arange(data.n).split(500):
        inputs, labels = data.rows(rows)
        right += int((predict(inputs).argmax(-1) == labels).sum())
    return right / data.n


def settings_of(distiller: Distiller) -> dict[str, Any]:
    """A distiller's settings as plain values; functions and objects by name."""
    if not is_dataclass(distiller):
        return {}
    return {f.name: _plain(getattr(distiller, f.name)) for f in fields(distiller) if f.name != "network"}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return getattr(value, "__name__", None) or repr(value)


def _judged(progress: Progress, judge: Judge | None) -> Progress:
    total, count = progress.since
    entry = {"step": float(progress.state.step), "loss": total / count}
    if judge is not None:
        entry["accuracy"] = judge(progress.state)
    return replace(progress, history=[*progress.history, entry], since=(0.0, 0))


def _filmed(progress: Progress, *, always: bool = False) -> Progress:
    """With an image of each class kept at steps 0, 1, 2, 4, 8, ..."""
    step, inputs = progress.state.step, progress.state.inputs
    due = always or step & (step - 1) == 0
    if not due or step in progress.frames or inputs.ndim != 4:
        return progress
    frame = inputs[_first_of_each(progress)].detach().clone()
    return replace(progress, frames=progress.frames | {step: frame})


def _first_of_each(progress: Progress) -> Tensor:
    """Rows of the first image of each of up to ten classes; learned targets may no longer say, so rows are spread."""
    per_image = len(progress.state.targets) // len(progress.state.inputs)
    targets = progress.state.targets[::per_image]
    if targets.ndim == 1:
        return torch.stack([(targets == label).nonzero()[0, 0] for label in targets.unique()[:10]])
    shown = min(10, targets.shape[1], len(targets))
    return torch.arange(shown) * (len(targets) // shown)


def _save(save: Callable[[Progress], None] | None, progress: Progress) -> None:
    if save is not None:
        save(progress)


class _Meter:
    """A line every few seconds: step, loss, rate, time left, accuracy."""

    def __init__(self, progress: Progress, steps: int, minutes: float | None, report: Report | None) -> None:
        self.steps, self.minutes, self.report = steps, minutes, report
        self.first, self.began, self.shown = progress.state.step, progress.seconds, -torch.inf
        self.loss: float | None = None

    def show(self, progress: Progress, info: dict[str, float]) -> None:
        self.loss = info["loss"] if self.loss is None else 0.9 * self.loss + 0.1 * info["loss"]
        now = time.monotonic()
        if self.report is None or (now - self.shown < 5 and progress.state.step < self.steps):
            return
        self.shown = now
        seconds = progress.seconds - self.began
        rate = (progress.state.step - self.first) / max(seconds, 1e-9)
        left = (self.steps - progress.state.step) / rate
        if self.minutes:
            left = max(0.0, min(left, 60 * self.minutes - progress.seconds))
        line = f"step {progress.state.step}/{self.steps}  loss {self.loss:.4g}  {rate:.3g} steps/s  {_clock(left)} left"
        judged = [entry for entry in progress.history if "accuracy" in entry]
        self.report(line + (f"  held-out accuracy {judged[-1]['accuracy']:.3f}" if judged else ""))


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}h {minutes % 60:02d}m" if minutes >= 60 else f"{minutes}m {seconds:02d}s"


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Notes the first Ctrl-C or SIGTERM in a list; a second one acts as it always does."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, _: Any) -> None:
        asked.append(number)
        signal.signal(number, before[number] or signal.SIG_DFL)

    for number in before:
        signal.signal(number, note)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def checkpoint_beside(path: Path) -> Path:
    """Where the run that will write `path` saves itself on the way."""
    return path.with_name(f"{path.name.removesuffix('.safetensors')}.checkpoint.safetensors")


def saver(path: Path, settings: dict[str, Any]) -> Callable[[Progress], None]:
    """Saves to this file, for `run`."""
    return lambda progress: checkpoint.save(path, progress, settings)
