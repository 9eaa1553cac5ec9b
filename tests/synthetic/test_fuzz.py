"""Every reader on changed files: no crash, no hang, nothing executed or started, every error of the library's own kind.

A failing mutant is named by its kind and number. To read it once more: `python tests/synthetic/fuzz.py FOLDER N N+1 KIND`.
"""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("resource")
pytest.importorskip("datasets")
pytest.importorskip("msgpack")
pytest.importorskip("PIL")

from fuzz import SEEDS, canary, finding

from coreset_sampler.synthetic.untrusted import CoresetFileError

pytestmark = pytest.mark.integration


def run(folder: Path, kinds: list[str], mutants: int) -> dict[str, list[str]]:
    """Findings of each kind."""
    command = [sys.executable, str(Path(__file__).parent / "fuzz.py"), str(folder), "0", str(mutants), *kinds]
    ran = subprocess.run(command, capture_output=True, text=True)
    found: dict[str, list[str]] = {kind: [] for kind in kinds}
    lines = ran.stdout.splitlines()
    for line in lines:
        if line.startswith("["):
            kind, number, wrong = json.loads(line)
            found.setdefault(kind, []).append(f"mutant {number}: {wrong}")
    for kind in kinds:
        if f"done {kind}" not in lines:
            now = (folder / "now").read_text() if (folder / "now").exists() else "the start"
            found[kind].append(f"not finished, exit code {ran.returncode} at {now}\n{ran.stderr[-3000:]}")
    return found


def test_the_harness_sees_what_it_looks_for(tmp_path):
    def refuse(_):
        raise CoresetFileError("this names no file")

    assert "ZeroDivisionError" in finding(lambda _: 1 / 0, tmp_path, tmp_path)
    assert "without the file's name" in finding(refuse, tmp_path, tmp_path)
    assert finding(lambda _: None, tmp_path, tmp_path) is None
    assert "executed" in finding(lambda _: pickle.loads(canary(tmp_path)).close(), tmp_path, tmp_path)


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    return run(tmp_path_factory.mktemp("fuzz"), list(SEEDS), 200)


@pytest.mark.parametrize("kind", SEEDS)
def test_changed_files_are_read_or_refused(findings, kind):
    assert not findings[kind], "\n\n".join(findings[kind][:5])


def test_nothing_was_started_and_nothing_opened_elsewhere(findings):
    assert "elsewhere" not in findings, findings["elsewhere"][:5]


@pytest.mark.slow
@pytest.mark.parametrize("kind", SEEDS)
def test_many_changed_files_are_read_or_refused(tmp_path, kind):
    found = run(tmp_path, [kind], 2500)
    assert not any(found.values()), found
