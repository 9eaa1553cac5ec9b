"""Rows of figures that survive a killed run, and the table that people read."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""One network judged on one test set: what was run, and its figures."""

_FIGURES = ("accuracy", "train_accuracy", "nll", "ece", "brier", "cpu_seconds")


class Results(list[Row]):
    """Rows of figures, one for each network, inference, seed and test set; prints as a table of means over seeds.

    Example:
        >>> results = evaluate("digits/vbpc-1", "digits", by=["last-layer"])
        >>> results[0]["accuracy"], results.summary()[0]["accuracy"]["mean"]
        >>> print(results)
    """

    def summary(self) -> list[Row]:
        """Mean and deviation over seeds of each figure."""
        return summary(self)

    def per_network(self, by: str = "recipe") -> dict[str, dict[str, Row]]:
        """Accuracy on clean test images by network and training set, `{"convnet": {"the coreset": {"mean": ...}, ...}}`.

        Args:
            by: the inference whose figures to take.
        """
        found: dict[str, dict[str, Row]] = {}
        for group in self.summary():
            if group["by"] == by and group["corruption"] is None:
                source = found.setdefault(_network(group), {})
                source[group.get("images", "the coreset")] = group["accuracy"] | {"n": group["n"]}
        return found

    def __str__(self) -> str:
        return table(self)

    __repr__ = __str__


class Log:
    """Rows done so far, kept line by line beside the results file, so that a killed run loses one at most."""

    def __init__(self, output: Path | None) -> None:
        self.output = output
        self.path = None if output is None else output.with_suffix(".jsonl")
        self.rows: list[Row] = []
        if self.path is not None and self.path.exists():
            whole = self.path.read_text().split("\n")[:-1]  # without a torn last line
            self.rows = [_row(line, number, self.path) for number, line in enumerate(whole, 1)]
            self.path.write_text("".join(line + "\n" for line in whole))

    def find(self, row: Row) -> Row | None:
        """The row that was run the same way, with its figures; it says what this one says, and nothing else of the run."""
        return next((done for done in self.rows if {k: v for k, v in done.items() if k not in _FIGURES} == row), None)

    def add(self, row: Row) -> None:
        """Keeps a row, on disk too."""
        self.rows.append(row)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def finish(self, rows: Sequence[Row]) -> None:
        """Writes these rows and their summary to the results file, whole or not at all."""
        if self.output is not None:
            partly = self.output.with_suffix(".partly")
            partly.write_text(json.dumps({"summary": summary(rows), "rows": list(rows)}, indent=1) + "\n")
            os.replace(partly, self.output)


def _row(line: str, number: int, path: Path) -> Row:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise ValueError(
            f"{path} is damaged: line {number} is no row of results. Remove it to measure anew, or name another"
        )
    return row


def summary(rows: Sequence[Row]) -> list[Row]:
    """Mean and deviation over seeds of each figure, for all that was run the same way otherwise."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        kind = {name: value for name, value in row.items() if name not in (*_FIGURES, "seed")}
        groups.setdefault(json.dumps(kind), []).append(row)
    return [
        json.loads(kind)
        | {"n": len(group)}
        | {name: _spread([row[name] for row in group]) for name in _FIGURES if all(name in row for row in group)}
        for kind, group in groups.items()
    ]


def table(rows: Sequence[Row]) -> str:
    """The summary for people: a line for each network, inference, training set and corruption."""
    compared = any("images" in row for row in rows)
    titles = ("n", "accuracy", "training", "NLL", "ECE", "Brier", "CPU s")
    lines = [("network", "by", *(("trained on",) if compared else ()), "test images", *titles)]
    lines += [_table_line(group, compared) for group in summary(rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _table_line(group: Row, compared: bool) -> tuple[str, ...]:
    source = f"{group['images']} real images" if "images" in group else "the coreset"
    return (
        _network(group),
        group["by"],
        *((source,) if compared else ()),
        "as they are" if group["corruption"] is None else f"{group['corruption']} {group['severity']}",
        str(group["n"]),
        _text(group["accuracy"], 100, 1) + " %",
        f"{100 * group['train_accuracy']['mean']:.0f} %" if "train_accuracy" in group else "-",
        *(_text(group[name], 1, 3) for name in ("nll", "ece", "brier")),
        f"{group['cpu_seconds']['mean']:.0f}",
    )


def _network(group: Row) -> str:
    return f"{group['network']}, {group['norm']} norm" if "norm" in group else str(group["network"])


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    return {"mean": statistics.fmean(values), "std": statistics.stdev(values) if len(values) > 1 else None}


def _text(spread: dict[str, Any], times: float, digits: int) -> str:
    mean = f"{times * spread['mean']:.{digits}f}"
    return mean if spread["std"] is None else f"{mean} ± {times * spread['std']:.{digits}f}"
