"""Writes the tables of docs/results.md from the recorded runs in benchmarks/results/, so that no figure is typed.

    python tools/make_results.py            # rewrites what stands between the marks
    python tools/make_results.py --check    # says what would change, and fails if anything would

A mark in a markdown file names a file of records, which of its runs, and how to lay them out:

    <!-- results cifar10 setting=cpu noise=0.5|0.3 : rows=noise,strategy columns=passes show=accuracy -->
    <!-- /results -->

`rows` are one line each, `columns` spread a line over its values, `show` names figures (`accuracy`, `cpu`, `share`, ...).
A record is a line of JSON: what was run, what came out, and when, where and on which commit. `benchmarks/harness.py` writes
them; copy finished runs from runs/ into benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks" / "results"
PAGES = ("docs/results.md", "README.md", "recipes/README.md")
MARK = re.compile(r"(<!-- results (?P<what>[^:>]+?) : (?P<how>[^>]+?) -->\n).*?(<!-- /results -->)", re.DOTALL)
PERCENT = {"share", "clean", "distinct", "coverage", "of_oracle"}
TITLES = {"cpu": "CPU seconds", "share": "selection", "clean": "clean labels", "rate": "estimated noise rate"}

Row = dict[str, Any]


def records(name: str) -> list[Row]:
    """The runs of a file."""
    file = RECORDS / f"{name}.jsonl"
    if not file.exists():
        raise SystemExit(
            f"{file.name} is not in benchmarks/results; known: {sorted(f.stem for f in RECORDS.glob('*.jsonl'))}"
        )
    return [json.loads(line) for line in file.read_text().splitlines()]


def chosen(rows: Sequence[Row], where: Mapping[str, list[str]]) -> list[Row]:
    """The rows whose entries are among those asked for, in the order in which these are named."""
    for key, values in where.items():
        rows = [row for row in rows if str(row.get(key)) in values]
        rows = sorted(rows, key=lambda row: values.index(str(row[key])))
    return list(rows)


def figure(values: Sequence[float], name: str) -> str:
    """Mean ± standard deviation; shares in percent, seconds without digits."""
    mean, deviation = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None
    if name in PERCENT:
        return f"{mean:.0%}"
    if name in ("cpu", "wall"):
        return f"{mean:.0f}"
    return f"{mean:.3f}" if deviation is None else f"{mean:.3f} ± {deviation:.3f}"


def table(rows: Sequence[Row], by: Sequence[str], columns: str | None, show: Sequence[str]) -> str:
    """Markdown: a line for each value of `by`, a column for each of `columns` and figure, and how many runs."""
    spread = list(dict.fromkeys(row[columns] for row in rows)) if columns else [None]
    heads = [_head(columns, value, name, show) for value in spread for name in show]
    lines = [[*by, *heads, "n"], ["---"] * (len(by) + len(heads) + 1)]
    for cell in dict.fromkeys(tuple(row[name] for name in by) for row in rows):
        mine = [row for row in rows if tuple(row[name] for name in by) == cell]
        parts = [[row for row in mine if value is None or row[columns] == value] for value in spread]
        cells = [figure([row[name] for row in part], name) if part else "" for part in parts for name in show]
        counts = [len(part) for part in parts if part]
        n = str(counts[0]) if len(set(counts)) == 1 else " / ".join(map(str, counts))
        lines.append([*(f"{value:g}" if isinstance(value, float) else str(value) for value in cell), *cells, n])
    return (
        "\n".join("| " + " | ".join(line) + " |" for line in lines).replace("| --- ", "|---").replace("|--- |", "|---|")
    )


def _head(columns: str | None, value: Any, name: str, show: Sequence[str]) -> str:
    if value is None:
        return TITLES.get(name, name)
    plain = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{plain} {columns}" if len(show) == 1 else f"{plain} {columns}: {TITLES.get(name, name)}"


def origin(rows: Sequence[Row]) -> str:
    """When, where and on which commits."""

    def entries(name: str) -> str:
        return ", ".join(sorted({str(row[name]) for row in rows if row.get(name)})) or "not recorded"

    on = ", ".join(sorted({str(row["on"]) for row in rows if "on" in row}))
    where = f"{on} data; " if on else ""
    return f"{where}{len(rows)} runs; {entries('date')}; {entries('machine')}; commit {entries('commit')}"


def block(what: str, how: str) -> str:
    """What stands between two marks."""
    name, *pairs = what.split()
    where = {key: values.split("|") for key, values in (pair.split("=", 1) for pair in pairs)}
    layout = dict(pair.split("=", 1) for pair in how.split())
    rows = chosen(records(name), where)
    if not rows:
        raise SystemExit(f"no run in {name}.jsonl has {where}")
    shown = table(rows, layout["rows"].split(","), layout.get("columns"), layout.get("show", "accuracy").split(","))
    return f"\n{shown}\n\n*{origin(rows)}; `benchmarks/results/{name}.jsonl`*\n\n"


def written(text: str) -> str:
    """A page with its tables made anew."""
    return MARK.sub(lambda found: found[1] + block(found["what"], found["how"]) + found[4], text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail if a table is not that of the records"
    )
    args = parser.parse_args()
    stale = []
    for page in PAGES:
        file = ROOT / page
        text = file.read_text()
        new = written(text)
        if new != text:
            stale.append(page)
            if not args.check:
                file.write_text(new)
    print(f"{'stale' if args.check else 'rewritten'}: {', '.join(stale) or 'nothing'}")
    sys.exit(bool(stale) and args.check)


if __name__ == "__main__":
    main()
