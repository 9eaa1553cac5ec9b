"""Two real processes under torchrun with gloo."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from scenarios import conv_net, digits, trained_net

from coreset_sampler import CoresetSampler, PointMass, strategies  # noqa: F401 (for eval)

pytestmark = pytest.mark.integration

SCRIPT = """
import sys, torch, torch.distributed as dist
sys.path.insert(0, {tests!r})
from leaving import leave
from scenarios import conv_net, digits, trained_net
from coreset_sampler import CoresetSampler, DistributedCoresetSampler, PointMass, strategies
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = {net}
model[1].running_mean += {drift} * rank  # BatchNorm statistics are local: ranks that select alone disagree
model = DistributedDataParallel(model)
strategy = {strategy}
sampler = {cls}(digits(), model, size=101, strategy=strategy, max_overhead={overhead})
calls = []
for name in ("all_gather", "broadcast"):
    def counted(*args, send=getattr(dist, name), name=name, **options):
        calls.append(name)
        return send(*args, **options)
    setattr(dist, name, counted)
first = sampler.select()
made = sorted(calls)
epochs = [list(sampler) for _ in range(3)]
torch.save(dict(epochs=epochs, first=first.indices, indices=sampler.coreset.indices, weights=sampler.coreset.weights,
                stats=sampler.stats, length=len(sampler), calls=made), {out!r} + f"/{{rank}}.pt")
leave()
"""


def run_on_two(tmp_path, strategy, cls="DistributedCoresetSampler", overhead="None", drift=0.05, net="trained_net()"):
    script = tmp_path / "script.py"
    tests = str(Path(__file__).parents[1])
    values = dict(tests=tests, strategy=strategy, cls=cls, overhead=overhead, drift=drift, net=net, out=str(tmp_path))
    script.write_text(SCRIPT.format(**values))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("strategies.Stable(pool_size=50, keep=10)", marks=pytest.mark.slow),
        "strategies.Stable(pool_size=50, keep=10, rescore_every=2)",
        "strategies.LabelConfidence(posterior=PointMass(), candidates=5, rescore_every=2, warm_up=0)",
        pytest.param("strategies.Craig()", marks=pytest.mark.slow),
    ],
)
def test_two_processes_have_the_same_coreset_equal_shares_and_half_the_work(tmp_path, strategy):
    first, second = run_on_two(tmp_path, strategy)
    assert torch.equal(first["indices"], second["indices"])
    assert torch.equal(first["weights"], second["weights"])
    assert first["length"] == second["length"] == 51
    passes = (
        2 if "keep=10, rescore_every" in strategy else 1
    )  # a scoring pass is gathered, and then what the pools keep
    # Two messages for a gather and, at the first selection, for the settings. A header and the thing itself for the
    # choice and for the BatchNorm statistics of process 0.
    messages = ["all_gather"] * (2 * passes + 2 + 2) + ["broadcast"] * 2
    assert first["calls"] == second["calls"] == messages
    assert all(len(epoch) == 51 for rank in (first, second) for epoch in rank["epochs"])
    alone = CoresetSampler(digits(), trained_net(), size=101, strategy=eval(strategy))
    for _ in range(3):
        list(alone)
    total = alone.stats["forward_examples"]
    for rank in (first, second):
        assert rank["stats"]["forward_examples"] == pytest.approx(total / 2, rel=0.12)
    assert first["stats"]["forward_examples"] + second["stats"]["forward_examples"] == pytest.approx(total, rel=0.01)


def test_an_unsharded_sampler_agrees_over_processes_also_when_a_clock_decides(tmp_path):
    first, second = run_on_two(tmp_path, "strategies.Crest()", cls="CoresetSampler", overhead="0.5")
    assert first["epochs"] == second["epochs"]
    assert len(first["epochs"][0]) == 101
    assert first["stats"]["selections"] == second["stats"]["selections"]


def test_one_process_and_two_choose_the_same_first_coreset_where_statistics_agree(tmp_path):
    """Up to what other batch boundaries do to the last bit of a logit."""
    first, _ = run_on_two(tmp_path, "strategies.Stable(pool_size=50, keep=10)", drift=0.0, net="conv_net()")
    alone = CoresetSampler(digits(), conv_net(), size=101, strategy=strategies.Stable(pool_size=50, keep=10)).select()
    assert torch.isin(alone.indices, first["first"]).double().mean() > 0.95
