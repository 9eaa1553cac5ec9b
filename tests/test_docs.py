"""The pages that tell how to choose: what they print runs, and every strategy has its card."""

import re
from pathlib import Path

import pytest
import torch
from frameworks import launch, start_ray
from scenarios import run_snippets

from coreset_sampler import strategies

DOCS = Path(__file__).resolve().parents[1] / "docs"
CARDS = sorted((DOCS / "cards").glob("*.md"))
INTEGRATIONS = sorted((DOCS / "integrations").glob("*.md"))
FRAMEWORKS = dict(
    timm="timm", huggingface="transformers", lightning="lightning", torchdata="torchdata", ray="ray.train"
)


@pytest.mark.parametrize("page", [*CARDS, DOCS / "adding_a_strategy.md"], ids=lambda page: page.stem)
def test_the_snippets_run_as_printed(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        run_snippets(page)


SCRIPTS = ["plain", *(name for name in FRAMEWORKS if name != "ray"), pytest.param("ray", marks=pytest.mark.slow)]


@pytest.mark.parametrize("name", SCRIPTS)  # Ray takes three quarters of a minute to start and stop
@pytest.mark.filterwarnings("ignore")
def test_the_script_of_an_integration_runs_as_printed(name, tmp_path, monkeypatch):
    if name != "plain":
        pytest.importorskip(FRAMEWORKS[name])
    monkeypatch.chdir(tmp_path)
    if name == "ray":
        start_ray()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        run_snippets(DOCS / "integrations" / f"{name}.md")


@pytest.mark.parametrize("name", ["torchrun", "accelerate"])
def test_the_script_of_several_processes_runs_as_printed(name, tmp_path, monkeypatch):
    page = (DOCS / "integrations" / f"{name}.md").read_text(encoding="utf-8")
    script = tmp_path / "train.py"
    script.write_text("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)))
    monkeypatch.chdir(tmp_path)
    assert "\n    torchrun --nproc-per-node 2 train.py\n" in page  # which is what launch does
    said = launch(script)
    assert said.count("'selections': 3") == 1
    assert name != "accelerate" or said.count("2 processes") == 3


def test_every_integration_has_one_script_that_can_be_taken_in_at_a_glance():
    for page in INTEGRATIONS:
        scripts = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        assert len(scripts) == (page.stem != "scale"), page.name
        assert all(script.count("\n") <= 42 for script in scripts), page.name


@pytest.mark.parametrize("page", CARDS, ids=lambda page: page.stem)
def test_every_card_has_the_usual_headings(page):
    headings = [line[3:] for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("## ")]
    assert headings == ["Idea", "Use", "Settings", "Cost", "When not", "Reference"]


def test_every_strategy_has_a_card():
    assert set(strategies.__all__) <= {page.stem for page in CARDS}


def test_links_between_the_pages_lead_somewhere():
    for page in [*CARDS, *INTEGRATIONS, DOCS / "adding_a_strategy.md"]:
        for link in page.read_text(encoding="utf-8").split("](")[1:]:
            target = link.split(")")[0]
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"
