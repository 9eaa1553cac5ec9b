"""A run that watches its model goes on after SIGKILL with the same indices, scores and weights, with and without workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = str(Path(__file__).parents[1])
SCRIPT = str(Path(__file__).with_name("watched_run.py"))


def lines(file: Path, workers: int, *more: str) -> list[str]:
    """What a run prints: epoch, step and indices of each batch, at its end the noise rate and the bits of the scores."""
    command = [sys.executable, SCRIPT, str(file), str(workers), *more]
    paths = [TESTS, *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=env)
    assert done.returncode == (-9 if "kill" in more else 0), done.stderr
    return done.stdout.splitlines()


@pytest.mark.integration
def test_after_sigkill_a_watched_run_goes_on_as_an_undisturbed_one(tmp_path):
    whole = lines(tmp_path / "never.pt", 0)
    assert 0.2 < float(whole[-2].split()[1]) < 0.6  # labels were doubted, so indices depend on what was watched
    assert lines(tmp_path / "never.pt", 0, "explicit") == whole
    for workers in (0, 2):
        file = tmp_path / f"{workers}.pt"
        killed = lines(file, workers, "kill")
        assert killed[-1].startswith("14 4 ")
        assert killed == whole[: len(killed)]
        assert lines(file, workers) == whole[len(killed) - 2 :]  # on from step 2, after which it had saved
