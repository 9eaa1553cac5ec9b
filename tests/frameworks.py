"""What the tests of the integrations share: data that notes what was asked of it, and two real processes."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from scenarios import conv_net, digits
from torch import nn
from torch.utils.data import Dataset

from coreset_sampler import CoresetSampler, strategies
from coreset_sampler.selection.scores import ScoreStore

TESTS = Path(__file__).parent
SCRIPTS = TESTS / "integrations"
SEED, SIZE = 3, 90


def settings(**more: Any) -> dict[str, Any]:
    """Of a selection that looks at the model."""
    return dict(size=SIZE, seed=SEED, strategy=strategies.Crest(pool_size=60, keep=15), progress=False) | more


class Noted(Dataset):
    """Digits `(image, label)` that note the indices they were asked for."""

    targets = digits().tensors[1]

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __len__(self) -> int:
        return 1797

    def __getitem__(self, index):
        self.seen.append(int(index))
        image, label = digits()[int(index)]
        return image, int(label)


def network() -> nn.Sequential:
    """The small BatchNorm network without dropout: frameworks that do not restore random states cannot repeat that."""
    net = conv_net()
    net[8].p = 0.0
    return net


def first_coreset(**more: Any) -> list[int]:
    """What the plain loop selects first."""
    return CoresetSampler(digits(), network(), **settings(**more)).select().indices.tolist()


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def epochs_of(indices: list[int], epochs: int) -> list[list[int]]:
    """A row of indices cut into equal epochs."""
    length = len(indices) // epochs
    return [indices[i * length : (i + 1) * length] for i in range(epochs)]


Visit = tuple[list[int], torch.Tensor, int]
"""What a test saw itself: the indices of a batch, the logits that the model gave for it, and the epoch."""


def scores_of(visits: list[Visit], labels: torch.Tensor = Noted.targets) -> ScoreStore:
    """The scores of these visits, as explicit observing makes them."""
    store = ScoreStore(labels, visits[0][1].shape[1])
    for indices, logits, epoch in visits:
        store.observe(torch.as_tensor(indices), logits.detach().float(), epoch)
    return store


def assert_same_scores(found: ScoreStore, expected: ScoreStore, atol: float = 0.0) -> None:
    """Equal to the bit, or nearly where processes add their shares up in another order."""
    assert int(expected.counts.sum()) > 0
    assert torch.equal(found.counts, expected.counts)
    assert torch.equal(found.last_seen, expected.last_seen)
    everything = torch.arange(found.n)
    for one, other in (
        (found.label_probability, expected.label_probability),
        (found.margin, expected.margin),
        (found.gradients(everything), expected.gradients(everything)),
    ):
        torch.testing.assert_close(one, other, atol=atol, rtol=0, equal_nan=True)


def launch(script: Path, *arguments: str) -> str:
    """Runs a script in two processes and gives what they print; an error shows what they said."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, "-m", *torchrun, str(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=quiet_environment())
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def quiet_environment() -> dict[str, str]:
    """One thread a process, no hub, and the modules of the tests in reach."""
    own = dict(
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
        PYTHONPATH=os.pathsep.join([str(TESTS), str(SCRIPTS)]),
        CUDA_VISIBLE_DEVICES="",
    )
    return {**os.environ, **own, "RAY_USAGE_STATS_ENABLED": "0"}


@functools.cache
def two_processes(script: str = "two_processes.py", *arguments: str) -> list[dict[str, Any]]:
    """What the script of that name notes down in each of two processes; it runs once a session.

    Where several processes run the tests (pytest-xdist), the first of them runs it and the others wait for its notes.
    """
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"{os.getpid()}")
    folder = Path(tempfile.gettempdir()) / "-".join(["coreset-sampler-tests", session, Path(script).stem, *arguments])
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            with tempfile.TemporaryDirectory() as notes:
                launch(SCRIPTS / script, notes, *arguments)
                shutil.copytree(notes, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def start_ray() -> None:
    """A Ray of two processors in this process, once a session."""
    import ray

    if not ray.is_initialized():
        os.environ.update(RAY_worker_niceness="0")  # of 15 by default: they would wait for the tests beside them
        variables = {key: value for key, value in quiet_environment().items() if os.environ.get(key) != value}
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": variables})


def ray_session(train: Any) -> Any:
    """What `train` gives back on the workers, run by Ray Train on two of them."""
    from ray.train import RunConfig, ScalingConfig, get_context
    from ray.train.torch import TorchTrainer

    start_ray()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.pt"

        def on_each() -> None:
            found = train()
            if get_context().get_world_rank() == 0:
                torch.save(found, out)

        TorchTrainer(
            on_each, scaling_config=ScalingConfig(num_workers=2), run_config=RunConfig(storage_path=folder)
        ).fit()
        return torch.load(out, weights_only=False)
