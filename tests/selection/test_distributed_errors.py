"""Two real processes that were given different things, or one of which fails: both end, with an error that says why."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.integration

SCRIPT = """
import os, sys, time, warnings, torch, torch.distributed as dist
sys.path.insert(0, {tests!r})
torch.set_num_threads(1)
from leaving import leave
from scenarios import conv_net, digits
from coreset_sampler import Coreset, CoresetSampler, DistributedCoresetSampler, strategies
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()

def sampler_of(dataset=None, model=None, cls=DistributedCoresetSampler, **changes):
    settings = dict(size=40, strategy=strategies.Crest(pool_size=40, keep=10), progress=False)
    return cls(dataset or digits(), model or conv_net(), **(settings | changes))

def caught(call):
    try:
        call()
    except BaseException as error:
        return f"{{type(error).__name__}}: {{error}}"
    return "no error"

out = {{}}
{body}
torch.save(out, {out!r} + f"/{{rank}}.pt")
leave()
"""

BODY = """
def fails(where):
    def strategy(view, size, generator):
        if where == "before" and rank == 1:
            raise ValueError("a disk is full")
        if where == "interrupted" and rank == 1:
            raise KeyboardInterrupt
        view.gather(view.shard(range(5)))
        if where == "after" and rank == 1:
            raise ValueError("a disk is full")
        if where == "more" and rank == 1:
            view.gather([1])
        if where == "first" and rank == 0:
            raise ValueError("no memory on 0")
        return strategies.Uniform().select(view, size, None, generator)[0]
    return strategy

def loads_late():
    return digits() if rank == 0 else TensorDataset(*(t[:900] for t in digits().tensors))

for name, build in {
    "seed": lambda: sampler_of(seed=rank),
    "size": lambda: sampler_of(size=40 + rank),
    "strategy": lambda: sampler_of(strategy=[strategies.Crest(), strategies.Uniform()][rank]),
    "settings of a strategy": lambda: sampler_of(strategy=strategies.Crest(pool_size=50 + rank, keep=10)),
    "data": lambda: sampler_of(loads_late()),
    "labels": lambda: sampler_of(labels=(digits().tensors[1] + rank) % 10),
    "model": lambda: sampler_of(model=torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10 + rank))),
    "weighting": lambda: sampler_of(weighting=["resample", "none"][rank]),
}.items():
    sampler = build()
    out[name] = caught(lambda: list(sampler))

for where in ("before", "interrupted", "after", "more", "first"):
    sampler = sampler_of(strategy=fails(where))
    out[where] = caught(sampler.select)
    assert sampler.stats["selections"] == 0

# Labels that one process cannot read
out["labels that fail"] = caught(sampler_of(TensorDataset(digits().tensors[0]) if rank else digits()).select)

# One process has taken up a state, the other has not.
first = sampler_of(reselect_every=5)
first.select()
resumed = sampler_of(reselect_every=5)
if rank == 0:
    resumed.load_state_dict(first.state_dict())
out["resumed"] = caught(lambda: list(resumed))

# After all that the group still works, and a run pays for the comparison once.
calls = []
send = dist.all_gather
dist.all_gather = lambda *args, **options: (calls.append(1), send(*args, **options))
sampler = sampler_of()
counts = []
for _ in range(3):
    before = len(calls)
    list(sampler)
    counts.append(len(calls) - before)
dist.all_gather = send
out["counts"] = counts
out["indices"] = sampler.coreset.indices

def warned(call):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        call()
        call()
    return [str(w.message) for w in said if "CoresetSampler" in str(w.message)]

plain = sampler_of(cls=CoresetSampler)
loader = DataLoader(digits(), batch_size=8, sampler=plain)
out["plain"] = warned(lambda: list(loader))
own = DataLoader(digits(), batch_size=8, sampler=sampler_of())
out["distributed"] = warned(lambda: list(own))
from accelerate import Accelerator
prepared = Accelerator(cpu=True).prepare(DataLoader(digits(), batch_size=8, sampler=sampler_of(cls=CoresetSampler)))
out["accelerate"] = warned(lambda: list(prepared))
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
shared = DistributedSamplerWrapper(sampler_of(cls=CoresetSampler), num_replicas=2, rank=rank)
out["lightning"] = warned(lambda: list(shared))
"""


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    script = folder / "script.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parents[1]), body=textwrap.dedent(BODY), out=str(folder)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("seed", "process 1 has seed=1 where process 0 has seed=0"),
        ("size", "process 1 has size=41 where process 0 has size=40"),
        ("strategy", "process 1 has strategy=Uniform() where process 0 has strategy=Crest("),
        ("settings of a strategy", "pool_size=51, keep=10"),
        ("data", "process 1 has n=900 where process 0 has n=1797"),
        ("labels", "process 1 has labels="),
        ("model", "process 1 has model="),
        ("weighting", "process 1 has weighting=none where process 0 has weighting=resample"),
        ("resumed", "process 1 has coreset=None where process 0 has coreset="),
    ],
)
def test_processes_with_different_settings_are_told_which_differs_in_what(both, case, what):
    for rank in both:
        assert rank[case].startswith("OtherProcessError: samplers must be made alike in all processes")
        assert what in rank[case]


@pytest.mark.parametrize(
    ("case", "failing", "error"),
    [
        ("before", 1, "ValueError: a disk is full"),
        ("after", 1, "ValueError: a disk is full"),
        ("first", 0, "ValueError: no memory on 0"),
        ("interrupted", 1, "KeyboardInterrupt: "),
        ("labels that fail", 1, "ValueError: no label found"),
    ],
)
def test_an_error_in_one_process_ends_the_selection_in_both(both, case, failing, error):
    assert both[failing][case].startswith(error)
    assert f"OtherProcessError: the selection failed in process {failing}: {error}" in both[1 - failing][case]


def test_a_strategy_that_gathers_more_often_in_one_process_is_told_so(both):
    for rank in both:
        assert "must call view.gather as often in every process" in rank["more"]
        assert "process 1 is gathering" in rank["more"]


def test_after_errors_that_were_caught_selection_works_and_settings_are_compared_once(both):
    assert torch.equal(both[0]["indices"], both[1]["indices"])
    first, second, third = both[0]["counts"]
    assert (first - 2, second) == (second, third)  # one small message more in the first epoch


def test_a_plain_sampler_that_nothing_shares_out_says_so_once(both):
    assert len(both[0]["plain"]) == 1
    assert "Use DistributedCoresetSampler" in both[0]["plain"][0]
    assert both[1]["plain"] == []
    for rank in both:
        assert rank["distributed"] == rank["accelerate"] == rank["lightning"] == []
