import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tools")]  # so that tests find scenarios.py, and make_zoo.py
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # as it is for a script that is started there


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # the networks here are too small for more
