"""Figures in the docs can be traced: tables are made from recorded runs, and what is quoted elsewhere stands in them."""

import json
import re
from pathlib import Path

import make_results
import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = [file for folder in ("recipes", "benchmarks") for file in sorted((ROOT / folder).glob("*.py"))]
PAGES = ("results.md", "earlier_results.md")
QUOTED = ["README.md", "recipes/README.md", *(str(file.relative_to(ROOT)) for file in SCRIPTS)]
FIGURE = re.compile(r"\d\.\d{3} ± \d\.\d{3}")


@pytest.mark.parametrize("page", make_results.PAGES)
def test_tables_are_those_of_the_records(page):
    text = (ROOT / page).read_text()
    assert make_results.written(text) == text, f"{page} is stale: run tools/make_results.py"


@pytest.mark.parametrize("page", QUOTED)
def test_figures_quoted_elsewhere_stand_on_the_page_of_results(page):
    known = {figure for name in PAGES for figure in FIGURE.findall((ROOT / "docs" / name).read_text())}
    missing = [figure for figure in FIGURE.findall((ROOT / page).read_text()) if figure not in known]
    assert not missing, f"{page} quotes {missing}, which {PAGES} do not have"


def test_a_table_gives_mean_and_spread_of_the_runs_that_were_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(make_results, "RECORDS", tmp_path)
    rows = [
        dict(
            setting="a",
            strategy=name,
            passes=passes,
            seed=seed,
            on="test",
            accuracy=base + seed / 10,
            share=0.03,
            date="d",
        )
        for name, base in (("x", 0.1), ("y", 0.5))
        for passes in (3.0, 12.0)
        for seed in (0, 1, 2)
    ]
    rows.append(rows[0] | dict(setting="b", accuracy=9.0))
    (tmp_path / "toy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mark = "<!-- results toy setting=a strategy=y|x : rows=strategy columns=passes -->"
    page = f"before\n{mark}\nold\n<!-- /results -->\nafter\n"
    new = make_results.written(page)
    assert "| strategy | 3 passes | 12 passes | n |\n|---|---|---|---|\n" in new
    assert "| y | 0.600 ± 0.100 | 0.600 ± 0.100 | 3 |\n| x | 0.200 ± 0.100 | 0.200 ± 0.100 | 3 |" in new
    assert "old" not in new
    assert "9.0" not in new
    assert "12 runs; d;" in new
    assert make_results.written(new) == new
    with pytest.raises(SystemExit, match="no run in toy"):
        make_results.written(page.replace("setting=a", "setting=c"))
    with pytest.raises(SystemExit, match="toy2"):
        make_results.written(page.replace("results toy", "results toy2"))
