"""The pages that tell how to choose: what they print runs, and every strategy has its card."""

from pathlib import Path

import pytest
import torch
from scenarios import run_snippets

from coreset_sampler import strategies

DOCS = Path(__file__).resolve().parents[1] / "docs"
CARDS = sorted((DOCS / "cards").glob("*.md"))


@pytest.mark.parametrize("page", [*CARDS, DOCS / "adding_a_strategy.md"], ids=lambda page: page.stem)
def test_the_snippets_run_as_printed(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        run_snippets(page)


@pytest.mark.parametrize("page", CARDS, ids=lambda page: page.stem)
def test_every_card_has_the_usual_headings(page):
    headings = [line[3:] for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("## ")]
    assert headings == ["Idea", "Use", "Settings", "Cost", "When not", "Reference"]


def test_every_strategy_has_a_card():
    assert set(strategies.__all__) <= {page.stem for page in CARDS}


def test_links_between_the_pages_lead_somewhere():
    for page in [*CARDS, DOCS / "adding_a_strategy.md"]:
        for link in page.read_text(encoding="utf-8").split("](")[1:]:
            target = link.split(")")[0]
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"
