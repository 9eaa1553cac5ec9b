"""The distillation recipe at toy size, on scikit-learn's digits."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from scenarios import run_snippets

pytest.importorskip("sklearn")
RECIPE = Path(__file__).parents[2] / "recipes" / "distill.py"


@pytest.mark.recipe
def test_the_recipe_makes_judges_and_tabulates_and_does_nothing_twice(tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("recipe_distill", RECIPE)
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    small = {"experts": 1, "epochs": 8, "examples": 100, "settings": {"inner_steps": 2, "lr": 10.0}}
    monkeypatch.setattr(recipe, "cpu", lambda *named: replace(recipe_cpu(*named), **small))
    recipe_cpu = sys.modules["coreset_sampler.distill.presets"].cpu
    monkeypatch.setattr(recipe, "BY", {"sgd": (recipe.by_sgd, {"steps": 5})})
    monkeypatch.setattr(recipe, "TUNE_STEPS", 1)
    arguments = ["--widths", "4", "4", "--ipc", "1", "--methods", "random", "herding", "fkl", "--seeds", "2"]
    arguments += ["--steps", "2", "--tune", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [str(RECIPE), "digits", *arguments])
    recipe.main()
    table = (tmp_path / "table.md").read_text()
    for method in ("random", "herding", "fkl"):
        assert f"| {method} | 1 | sgd | 2 | 0." in table
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("digits-*.safetensors")}
    assert len(written) == 3
    recipe.main()
    assert (tmp_path / "table.md").read_text() == table
    assert {path: path.stat().st_mtime_ns for path in written} == written


def test_the_page_on_choosing_runs_as_printed_and_its_links_lead_somewhere(tmp_path, monkeypatch):
    page = RECIPE.parent.parent / "docs" / "choosing_a_distiller.md"
    monkeypatch.chdir(tmp_path)
    run_snippets(page)
    assert (tmp_path / "mine.safetensors").exists()
    for link in page.read_text(encoding="utf-8").split("](")[1:]:
        assert (page.parent / link.split(")")[0]).exists(), link
