import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # so that tests find scenarios.py
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # as it is for a script that is started there


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # the networks here are too small for more
