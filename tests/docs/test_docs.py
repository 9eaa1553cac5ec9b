"""The pages and the notebook: what they print runs, every strategy has its card, and the site builds."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from frameworks import launch, start_ray
from scenarios import run_snippets

import coreset_sampler
from coreset_sampler import strategies

DOCS = Path(__file__).resolve().parents[2] / "docs"
CARDS = sorted((DOCS / "cards").glob("*.md"))
INTEGRATIONS = sorted((DOCS / "integrations").glob("*.md"))
FRAMEWORKS = dict(
    timm="timm", huggingface="transformers", lightning="lightning", torchdata="torchdata", ray="ray.train"
)


GUIDES = [DOCS / f"{name}.md" for name in ("index", "choosing", "adding_a_strategy", "watching", "audit")]


@pytest.mark.parametrize("page", [*CARDS, *GUIDES], ids=lambda page: page.stem)
def test_the_snippets_run_as_printed(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        run_snippets(page)


def test_the_first_page_ends_with_a_gain_over_uniform_sampling(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        names = run_snippets(DOCS / "start.md")
    assert names["accuracy"]["uniform"] + 0.02 < names["accuracy"]["label_confidence"]
    table = set(
        re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (.*?) \|", (DOCS / "start.md").read_text(), re.MULTILINE)))
    )
    assert set(names["sampler"].stats) <= table, "an entry of stats is not explained"


@pytest.mark.recipe
def test_the_notebook_tells_wrong_labels_and_trains_on_ten_images(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib").use("Agg")
    notebook = json.loads((DOCS / "start.ipynb").read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    with torch.random.fork_rng(devices=[]):
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                assert cell["outputs"] == [], "the notebook is kept without outputs"
                exec(compile("".join(cell["source"]), "start.ipynb", "exec"), names)
    names["plt"].close("all")
    assert names["accuracy"]["uniform"] + 0.02 < names["accuracy"]["label_confidence"]
    assert names["precision"] > 0.9
    assert names["accuracy"]["ten images"] > 0.85


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocstrings", reason="the site needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=DOCS.parent, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.integration
def test_the_reference_has_every_public_name(site):
    for page, package in (("", coreset_sampler), ("strategies/", strategies)):
        shown = set(re.findall(r'<h2 id="([\w.]+)"', (site / "reference" / page / "index.html").read_text()))
        public = set(package.__all__) - {"__version__", "strategies"}
        assert not public - {name.split(".")[-1] for name in shown}


@pytest.mark.integration
def test_the_site_asks_nothing_of_other_hosts_and_writes_formulas_itself(site):
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    for path, page in pages.items():
        assert not re.search(r"<(script|img|iframe)[^>]+src=.?https?:|<link[^>]+stylesheet[^>]+https?:", page), path
        assert "arithmatex" not in page, path
    assert "<math" in pages[site / "cards" / "label_confidence" / "index.html"]


SCRIPTS = ["plain", *(name for name in FRAMEWORKS if name != "ray"), pytest.param("ray", marks=pytest.mark.slow)]


@pytest.mark.integration
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


@pytest.mark.integration
@pytest.mark.parametrize("name", [pytest.param("torchrun", marks=pytest.mark.slow), "accelerate"])
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
    assert {*strategies.available(), "warm_up"} <= {page.stem for page in CARDS}


def test_links_between_the_pages_lead_somewhere():
    for page in [*DOCS.rglob("*.md"), DOCS.parent / "CONTRIBUTING.md"]:
        for link in page.read_text(encoding="utf-8").split("](")[1:]:
            target = link.split(")")[0].split("#")[0]
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_page_on_architecture_names_every_module_and_no_other():
    rooms = (DOCS / "architecture.md").read_text(encoding="utf-8").split("## Rooms")[1].split("    integrations/")[0]
    named = set(re.findall(r"\b(\w+\.py)\b", rooms)) | {"__main__.py"}
    assert named == {path.name for path in (DOCS.parent / "coreset_sampler").rglob("*.py")}
