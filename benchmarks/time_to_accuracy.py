"""Accuracy against time: how soon each contestant is as good as full data, and a picture of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

Curve = Sequence[tuple[float, float]]  # (seconds, accuracy)
COLOURS = {
    "full": "#1a1a1a",
    "uniform": "#888888",
    "crest": "#d98a2b",
    "stable": "#2b6cb0",
    "label_confidence": "#2f855a",
    "infobatch": "#c0392b",
    "loss_pruning": "#b794f4",
    "loss_pruning, half": "#9f7aea",
    "loss_pruning, no weights": "#2c7a7b",
    "loss_pruning, confidence": "#6b46c1",
}


def time_to_accuracy(
    curves: Mapping[str, Curve], path: Path, *, title: str = "", deviation: float | None = None
) -> list[str]:
    """Draws accuracy against seconds, a line a name, and says how soon each reaches 99 % of the best of `"full"`.

    Ratios are against the run on full data that was the best, and against the time in which it gets as far itself. With
    the standard `deviation` of the best, over seeds, also how soon each reaches the best less that.
    """
    ended, best = max(curves["full"], key=lambda point: point[1])
    _draw(curves, path, 0.99 * best, title)
    lines = _reached(curves, ended, 0.99 * best, f"99 % of what full data reaches in {ended:.0f} s")
    if deviation is not None:
        words = f"what full data reaches in {ended:.0f} s, {best:.4f}, less its standard deviation"
        lines += _reached(curves, ended, best - deviation, words, digits=4)
    return lines


def as_many_epochs(runs: Mapping[tuple[str, int], tuple[float, float]]) -> list[str]:
    """Seconds of each run `(name, epochs): (seconds, accuracy)` against those of as many epochs of `"full"`.

    This is how InfoBatch counts (Qin et al. 2024). It does not ask whether full data had been as good with fewer epochs.
    """
    lines = []
    for (name, epochs), (seconds, accuracy) in runs.items():
        if name != "full" and ("full", epochs) in runs:
            other, there = runs["full", epochs]
            lines.append(
                f"  {name}, {epochs} epochs: {accuracy:.4f} in {seconds:.0f} s, full data {there:.4f} in {other:.0f} s, "
                f"{other / seconds:.2f} times sooner"
            )
    return ["against full data of as many epochs, however long it is flat:", *lines] if lines else []


def _reached(curves: Mapping[str, Curve], ended: float, target: float, words: str, digits: int = 3) -> list[str]:
    lines = [f"{words} is {target:.{digits}f}:"]
    own = seconds_to(curves["full"], target) or ended
    for name, curve in curves.items():
        seconds = seconds_to(curve, target)
        if seconds is None:
            lines.append(f"  {name}: not reached, {max(accuracy for _, accuracy in curve):.{digits}f} at best")
        else:
            ratios = f"{ended / seconds:.2f} times sooner than that run, {own / seconds:.2f} than full data gets there"
            lines.append(f"  {name}: {seconds:.0f} s, {ratios}")
    return lines


def seconds_to(curve: Curve, target: float) -> float | None:
    """When a curve of `(seconds, accuracy)` first reaches the target, between points on a straight line; else None."""
    before: tuple[float, float] | None = None
    for seconds, accuracy in sorted(curve):
        if accuracy >= target:
            if before is None:
                return seconds
            return before[0] + (seconds - before[0]) * (target - before[1]) / (accuracy - before[1])
        before = seconds, accuracy
    return None


def _draw(curves: Mapping[str, Curve], path: Path, target: float, title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), dpi=150, layout="constrained", facecolor="white")
    axes = figure.subplots()
    for name, curve in curves.items():
        axes.plot(*zip(*curve, strict=True), "o-", color=COLOURS.get(name), label=name, linewidth=2, markersize=5)
    axes.axhline(target, color="#6e6e6e", linestyle="--", linewidth=1, label=f"99 % of full data: {target:.3f}")
    axes.set(xlabel="seconds, selection included", ylabel="accuracy", xlim=(0, None))
    axes.set_title(title, fontsize=10)
    axes.legend(loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)
    path.parent.mkdir(parents=True, exist_ok=True)  # the runs before it took hours
    figure.savefig(path)
