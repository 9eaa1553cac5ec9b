"""Project habits: workflows, hooks, Makefile and citation say the same as pyproject.toml."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import coreset_sampler

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))

yaml = pytest.importorskip("yaml")
tomllib = pytest.importorskip("tomllib", reason="Python 3.11 brings it")


def loaded(path):
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def pyproject():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def commands(path):
    return [step["run"] for job in loaded(path)["jobs"].values() for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_triggers_least_rights_and_runnable_jobs(path):
    workflow = loaded(path)
    assert workflow[True]  # yaml reads the key `on` as true
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["runs-on"]
        assert all(("run" in step) != ("uses" in step) for step in job["steps"])
        needed = job.get("needs", [])
        assert set([needed] if isinstance(needed, str) else needed) <= workflow["jobs"].keys()


def test_there_are_workflows_for_tests_docs_and_release():
    assert [path.stem for path in WORKFLOWS] == ["docs", "release", "tests"]


def test_the_oldest_torch_that_is_tested_is_the_oldest_that_is_promised():
    project = pyproject()["project"]
    oldest = next(
        re.search(r"torch>=([\d.]+)", need)[1] for need in project["dependencies"] if need.startswith("torch")
    )
    matrix = loaded(".github/workflows/tests.yml")["jobs"]["tests"]["strategy"]["matrix"]["include"]
    torches = {row["name"]: row["torch"].split() for row in matrix}
    assert torches["oldest torch"][0] == f"torch=={oldest}.*"
    assert torches["newest torch"] == ["torch", "torchvision"]
    assert next(row["python"] for row in matrix if row["name"] == "oldest torch") == project["requires-python"][2:]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_what_the_workflows_make_is_in_the_makefile(path):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = {name for command in commands(path) for name in re.findall(r"\bmake ([\w-]+)", command)}
    assert asked <= targets


def test_files_that_the_job_without_extras_names_exist():
    (command,) = (line for line in commands(".github/workflows/tests.yml") if "not integration" in line)
    named = re.findall(r"tests/[\w./*]+", command)
    assert named
    assert all(list(ROOT.glob(name)) for name in named)


def test_the_demo_installs_no_framework_and_no_test_tool():
    extras = pyproject()["project"]["optional-dependencies"]
    assert extras["demo"] == ["coreset-sampler[plots]", "scikit-learn>=1.4"]
    said = subprocess.run(["make", "-n", "demo", "VENV=nowhere"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ".[demo]" in said.stdout
    assert ".[dev]" not in said.stdout


def test_every_extra_of_the_makefile_and_of_dev_is_declared():
    extras = pyproject()["project"]["optional-dependencies"]
    named = re.findall(r"coreset-sampler\[(.*?)\]", " ".join(need for needs in extras.values() for need in needs))
    assert {name for group in named for name in group.split(",")} <= extras.keys()
    assert {"demo", "docs", "dev"} <= extras.keys()


def test_check_leaves_out_what_the_marks_say():
    marks = [line.split(":")[0] for line in pyproject()["tool"]["pytest"]["ini_options"]["markers"]]
    assert marks == ["integration", "recipe", "slow"]
    makefile = (ROOT / "Makefile").read_text()
    assert f"-m '{' and '.join(f'not {mark}' for mark in marks)}'" in makefile


def test_every_test_of_a_framework_has_its_mark():
    for path in (ROOT / "tests" / "integrations").glob("test_*.py"):
        assert re.search(r"^pytestmark = .*pytest\.mark\.integration", path.read_text(), re.MULTILINE), path.name


def test_hooks_are_local_and_run_what_lint_runs():
    (repository,) = loaded(".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    entries = {hook["id"]: hook["entry"] for hook in repository["hooks"]}
    assert entries.keys() == {"ruff", "ruff-format", "mypy"}
    lint = (ROOT / "Makefile").read_text().split("\nlint:")[1]
    assert all(tool in lint for tool in ("ruff check", "ruff format", "mypy"))


def test_the_citation_has_the_version_and_licence_of_the_package():
    citation, project = loaded("CITATION.cff"), pyproject()["project"]
    assert citation["version"] == coreset_sampler.__version__
    assert citation["license"] == project["license"]
    assert citation["authors"] == project["authors"]


def test_strict_types_are_the_rule_and_exceptions_name_modules_that_exist():
    mypy = pyproject()["tool"]["mypy"]
    assert mypy["strict"]
    for module in (name for section in mypy["overrides"] for name in section["module"]):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__init__.py").exists(), module


def test_contributing_names_files_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for name in re.findall(r"`((?:coreset_sampler|docs|tests)/[\w/.]*)`", text):
        assert (ROOT / name).exists(), name
    shortest = ("selection/strategies/k_center.py", "synthetic/distillers/forward_kl.py", "synthetic/formats/datm.py")
    for path in (ROOT / "coreset_sampler" / name for name in shortest):
        assert f"`{path.name}`" in text
        assert path.exists()


def test_no_committed_project_file_names_this_machine():
    for path in [ROOT / "mkdocs.yml", ROOT / "Makefile", ROOT / "CONTRIBUTING.md", *WORKFLOWS]:
        assert str(ROOT) not in path.read_text(encoding="utf-8"), path
        assert sys.prefix not in path.read_text(encoding="utf-8"), path
