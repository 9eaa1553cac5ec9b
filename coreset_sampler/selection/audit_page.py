"""Suspects as one HTML page: no scripts, nothing from elsewhere, light and dark."""

from __future__ import annotations

from html import escape

from .audit_data import Shown
from .audit_rows import Audit, ClassRow, SuspectRow

_CLASSES_AT_ONCE = 20  # rows of the table before the rest is folded
_FEW_PIXELS = 100  # of a side, below which a picture is shown pixel by pixel

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1d21; --faint: #646a73; --ground: #f6f6f4; --card: #fff; --line: #dedfdc;
  --wrong: #b3261e; --model: #1a5fb4; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e7e8ea; --faint: #9aa1ab; --ground: #16181b; --card: #202327; --line: #34383e;
    --wrong: #ff8a80; --model: #8ab8ff; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 78rem; background: var(--ground); color: var(--ink);
  font: 15px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; }
h2 { font-size: 1.1rem; margin: 2.25rem 0 .75rem; }
p { margin: .25rem 0; max-width: 100ch; }
.faint, .unit { color: var(--faint); }
.note { border-left: 3px solid var(--wrong); padding: .2rem .8rem; margin: .8rem 0 0; }
.totals { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1.25rem 0 0; padding: 0; }
.totals div, article, table { background: var(--card); border: 1px solid var(--line); }
.totals div, article { border-radius: 8px; padding: .75rem; }
.totals div { min-width: 11rem; }
.totals dt { color: var(--faint); font-size: .85rem; }
.totals dd { margin: 0; font-size: 1.5rem; font-weight: 600; }
.unit { font-size: .9rem; font-weight: 400; white-space: nowrap; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .35rem .9rem; border-top: 1px solid var(--line); }
th { color: var(--faint); font-weight: 500; font-size: .85rem; border-top: 0; }
.number { text-align: right; }
summary { cursor: pointer; color: var(--faint); padding: .5rem 0; }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(14rem, 1fr)); gap: .9rem; }
.texts { display: grid; gap: .9rem; }
.texts article { display: grid; grid-template-columns: 15rem minmax(0, 1fr); gap: 0 1.5rem; }
@media (max-width: 42rem) { .texts article { grid-template-columns: minmax(0, 1fr); } }
article { overflow-wrap: anywhere; }
article img { display: block; width: 100%; aspect-ratio: 1; object-fit: contain; margin: 0 0 .6rem; border-radius: 4px; }
img.sharp { image-rendering: pixelated; }
.facts { display: grid; grid-template-columns: auto minmax(0, 1fr) auto; gap: .1rem .5rem; margin: 0; align-content: start; }
.facts > * { margin: 0; }
.facts dt { color: var(--faint); }
.facts dd:nth-of-type(even) { text-align: right; font-variant-numeric: tabular-nums; }
.told { color: var(--wrong); font-weight: 600; }
.model { color: var(--model); font-weight: 600; }
.foot { grid-column: 1 / -1; color: var(--faint); font-size: .85rem; padding-top: .4rem; }
.text b { display: block; color: var(--faint); font-weight: 500; font-size: .85rem; }
.text p { white-space: pre-wrap; margin: 0 0 .5rem; max-height: 16rem; overflow-y: auto; }
@media print { body { background: none; } article { break-inside: avoid; } }
"""


def audit_page(audit: Audit, source: str = "") -> str:
    """A page that opens anywhere: totals, classes, and the suspects with what the model says of them.

    Args:
        audit: what was found.
        source: name of the file of scores, for the heading.
    """
    shown = [Shown() if audit.examples is None else audit.examples.show(row.index) for row in audit.suspects]
    of = f" in {audit.examples.name}" if audit.examples is not None else ""
    title = f"Labels that may be wrong{of}"
    rule = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{rule}">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p class="faint">{escape(source)}. Probabilities are means over all times that an example was seen in training.</p>
{_totals(audit)}
{"".join(f'<p class="note">{escape(note)}</p>' for note in audit.notes)}
<h2>Classes</h2>
{_classes(audit.per_class)}
<h2>Suspects, most suspicious first</h2>
{_suspects(audit.suspects, shown)}
</body>
</html>
"""


def _totals(audit: Audit) -> str:
    seen, rate = audit.scores.seen, audit.noise_rate
    doubted = int((audit.scores.probability_wrong[seen] > 0.5).sum())
    totals = [
        ("estimated share of wrong labels", "none found" if rate is None else f"{100 * rate:.1f} %", ""),
        ("more likely wrong than right", f"{doubted:,}", ""),
        ("examples seen", f"{int(seen.sum()):,}", f"of {len(seen):,}"),
        ("suspects on this page", f"{len(audit.suspects):,}", ""),
    ]
    cells = (
        f'<div><dt>{name}</dt><dd>{value} <span class="unit">{unit}</span></dd></div>' for name, value, unit in totals
    )
    return f'<dl class="totals">{"".join(cells)}</dl>'


def _classes(rows: tuple[ClassRow, ...]) -> str:
    """The table; of many classes the first, and all in a fold."""
    if len(rows) <= _CLASSES_AT_ONCE:
        return _class_table(rows)
    fold = f"<details><summary>All {len(rows):,} classes</summary>{_class_table(rows)}</details>"
    return _class_table(rows[:_CLASSES_AT_ONCE]) + fold


def _class_table(rows: tuple[ClassRow, ...]) -> str:
    names = "<th>label</th>" + "".join(
        f'<th class="number">{name}</th>' for name in ("examples", "seen", "probably wrong")
    )
    body = "".join(
        f'<tr><td>{escape(row.name)}</td><td class="number">{row.examples:,}</td><td class="number">{row.seen:,}</td>'
        f'<td class="number">{row.probably_wrong:,} <span class="unit">{_share(row)}</span></td>'
        f"<td>{_confused(row)}</td></tr>"
        for row in rows
    )
    return f'<div class="wide"><table><tr>{names}<th>most confused with</th></tr>{body}</table></div>'


def _share(row: ClassRow) -> str:
    return f"({_percent(row.probably_wrong / row.seen)})" if row.seen else ""


def _confused(row: ClassRow) -> str:
    return f'{escape(row.confused_with)} <span class="unit">({row.confused:,})</span>' if row.confused_with else "-"


def _suspects(rows: tuple[SuspectRow, ...], shown: list[Shown]) -> str:
    if not any(example.picture or example.texts or example.problem for example in shown):
        return _table(rows)
    kind = "texts" if any(example.texts for example in shown) else "pictures"
    cards = (_card(row, example) for row, example in zip(rows, shown, strict=True))
    return f'<div class="{kind}">{"".join(cards)}</div>'


def _card(row: SuspectRow, shown: Shown) -> str:
    sharp = ' class="sharp"' if shown.side < _FEW_PIXELS else ""
    picture = f'<img{sharp} src="{shown.picture}" alt="example {row.index}">' if shown.picture else ""
    several = len(shown.texts) > 1
    texts = "".join(f"{f'<b>{escape(name)}</b>' if several else ''}<p>{escape(text)}</p>" for name, text in shown.texts)
    texts = f'<div class="text">{texts}</div>' if texts else ""
    problem = f'<p class="note">{escape(shown.problem)}</p>' if shown.problem else ""
    return f"<article>{picture}{problem}{_facts(row)}{texts}</article>\n"


def _facts(row: SuspectRow) -> str:
    own = f"<dt>data</dt><dd>{escape(row.name_in_data)}</dd><dd></dd>" if row.name_in_data else ""
    times = "once" if row.times_seen == 1 else f"{row.times_seen:,} times"
    return (
        f'<dl class="facts"><dt>label</dt><dd class="told">{escape(row.label_name)}</dd>'
        f"<dd>{_percent(row.label_probability)}</dd>"
        f'<dt>model</dt><dd class="model">{escape(row.predicted_name)}</dd><dd>{_percent(row.predicted_probability)}</dd>'
        f"{own}<dt>wrong</dt><dd></dd><dd>{_percent(row.probability_wrong)}</dd>"
        f'<dd class="foot">row {row.index}, seen {times}</dd></dl>'
    )


def _table(rows: tuple[SuspectRow, ...]) -> str:
    body = "".join(
        f'<tr><td class="number">{row.index}</td><td class="told">{escape(row.label_name)}</td>'
        f'<td class="number">{_percent(row.label_probability)}</td><td class="model">{escape(row.predicted_name)}</td>'
        f'<td class="number">{_percent(row.predicted_probability)}</td>'
        f'<td class="number">{_percent(row.probability_wrong)}</td><td class="number">{row.times_seen:,}</td></tr>'
        for row in rows
    )
    head = '<th class="number">row</th><th>label</th><th></th><th>model</th><th></th>'
    head += '<th class="number">wrong</th><th class="number">times seen</th>'
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _percent(share: float) -> str:
    """`43 %`; tenths near 0 and 1, where they tell one example from the next."""
    percent = 100 * share
    return f"{percent:.1f} %" if 0.05 <= percent < 0.95 or 99.05 <= percent < 99.95 else f"{percent:.0f} %"
