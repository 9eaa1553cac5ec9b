"""The distillation recipe and the benchmark of the methods at toy size, on scikit-learn's digits."""

import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from scenarios import run_snippets

from coreset_sampler import load_coreset
from coreset_sampler.synthetic.distillers import presets

pytest.importorskip("sklearn")
ROOT = Path(__file__).parents[2]


def script(path: str):
    spec = importlib.util.spec_from_file_location(Path(path).stem + "_script", ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.recipe
def test_the_benchmark_makes_measures_and_tabulates_and_does_nothing_twice(tmp_path, monkeypatch, capsys):
    benchmark = script("benchmarks/distillers.py")
    small = presets.ExpertPreset(4, examples=100, training={"experts": 1, "epochs": 8})
    settings = {"experts": small, "settings": {"inner_steps": 2, "lr": 10.0}}
    smaller = {name: lambda *named, cpu=presets.cpu: replace(cpu(*named), **settings) for name in ("cpu",)}
    monkeypatch.setattr(presets, "PRESETS", presets.PRESETS | smaller)
    monkeypatch.setattr(benchmark, "cpu", smaller["cpu"])
    monkeypatch.setattr(benchmark, "BY", {"sgd": {"steps": 5}})
    monkeypatch.setattr(benchmark, "TUNE_STEPS", 1)
    arguments = [
        "--widths",
        "4",
        "4",
        "--images-per-class",
        "1",
        "--methods",
        "random",
        "herding",
        "fkl",
        "--by",
        "sgd",
    ]
    arguments += ["--seeds", "2", "--coresets", "2", "--steps", "2", "--experts", "2", "--tune", "--out", str(tmp_path)]
    arguments += ["--corruptions", "gaussian_noise", "--results", str(tmp_path / "runs.jsonl")]
    monkeypatch.setattr(sys, "argv", ["distillers.py", "digits", *arguments])
    benchmark.main()
    said = capsys.readouterr().out
    for method in ("random", "herding", "fkl"):
        assert re.search(rf"^{method} 1 sgd None accuracy 0\..* n = 4$", said, re.MULTILINE)
        assert re.search(rf"^{method} 1 sgd gaussian_noise accuracy 0\..* n = 4$", said, re.MULTILINE)
    coresets = [path for path in tmp_path.glob("*/digits-*.safetensors") if "checkpoint" not in path.name]
    assert len(coresets) == 3 * 2
    folder = tmp_path / "4-4, 2 experts, 2 steps"  # other settings, other files
    one, other = (load_coreset(folder / f"digits-fkl-1-{seed}.safetensors") for seed in (0, 1))
    assert not one.stored.equal(other.stored)
    files = [*coresets, tmp_path / "runs.jsonl", tmp_path / "runs-tuned.jsonl"]
    written = {path: path.stat().st_mtime_ns for path in files}
    benchmark.main()
    assert {path: path.stat().st_mtime_ns for path in written} == written


@pytest.mark.recipe
def test_the_recipe_distills_and_trains_on_nothing_else(tmp_path, monkeypatch, capsys):
    recipe = script("recipes/distill.py")
    arguments = ["--images-per-class", "1", "--steps", "30", "--seeds", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["distill.py", "digits", *arguments])
    recipe.main()
    said = capsys.readouterr().out
    assert (tmp_path / "digits-vbpc-1" / "coreset.safetensors").exists()
    assert float(re.search(r"trained on 10 images: accuracy (\d\.\d+)", said)[1]) > 0.4
    assert "last-layer" in said


def test_the_page_on_choosing_runs_as_printed_and_its_links_lead_somewhere(tmp_path, monkeypatch):
    page = ROOT / "docs" / "choosing_a_distiller.md"
    monkeypatch.chdir(tmp_path)
    run_snippets(page)
    assert (tmp_path / "mine.safetensors").exists()
    for link in page.read_text(encoding="utf-8").split("](")[1:]:
        assert (page.parent / link.split(")")[0].split("#")[0]).exists(), link
