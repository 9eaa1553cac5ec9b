"""What one selection costs at the size of ImageNet, in one process and in several: time, memory, traffic.

    python benchmarks/imagenet_scale.py                      # 1,281,167 examples, 1,000 classes, one process
    torchrun --nproc-per-node 2 benchmarks/imagenet_scale.py
    python benchmarks/imagenet_scale.py --n 320292 --size 32029   # a quarter, to see what grows

The features that a backbone would give are made up; everything else is the real thing: a model with a norm layer and a
head of 1,000 classes under four draws, the loader, pools, greedy covering, weights, the order, the state. Times are CPU
seconds of this process, which a busy machine does not change. Measured figures: docs/integrations/scale.md.
"""

from __future__ import annotations

import argparse
import io
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, Dataset

from coreset_sampler import CoresetSampler, DistributedCoresetSampler, strategies

N, CLASSES, FEATURES = 1_281_167, 1_000, 64


class MadeUp(Dataset[Any]):
    """Examples that are their own index; a table of 65,536 feature vectors stands for what a backbone would say of them."""

    def __init__(self, n: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.targets = torch.randint(CLASSES, (n,), generator=generator)
        self.table = torch.randn(65_536, FEATURES, generator=generator)
        self.centres = torch.randn(CLASSES, FEATURES, generator=generator)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.tensor(indices)
        labels = self.targets[at]
        return self.table[at * 40_503 % 65_536] + self.centres[labels], labels


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(FEATURES), nn.Linear(FEATURES, CLASSES))


def memory() -> float:
    """Most megabytes that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    began = time.process_time()
    result = call()
    return result, time.process_time() - began


class Counted:
    """Counts the objects sent between processes, and their bytes."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        for name in ("all_gather_object", "broadcast_object_list"):
            setattr(distributed, name, self._counting(name, getattr(distributed, name)))

    def _counting(self, name: str, send: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **settings: Any) -> Any:
            self.calls[name] = self.calls.get(name, 0) + 1
            return send(*args, **settings)

        return counted


def measure(n: int, size: int, strategy: Any) -> dict[str, float]:
    data, model, counted = MadeUp(n), network(), Counted()
    world = distributed.get_world_size() if distributed.is_initialized() else 1
    cls = DistributedCoresetSampler if world > 1 else CoresetSampler
    options = dict(strategy=strategy, collate_fn=tuple, progress=False, reselect_every=99)
    empty = memory()
    cls(data, model, size=2 * CLASSES * world, **options).select()  # compiles, and fills the buffers of one chunk
    made, seconds = timed(lambda: cls(data, model, size=size, **options))
    before = memory()
    counted.calls.clear()
    began = time.perf_counter()
    coreset, selecting = timed(made.select)
    wall = time.perf_counter() - began
    calls = dict(counted.calls)
    assert world == 1 or calls == {"all_gather_object": 1, "broadcast_object_list": 1}, calls
    grown = memory() - before
    order, drawing = timed(lambda: list(made))
    batches, loading = timed(lambda: sum(1 for _ in DataLoader(data, 256, sampler=made, collate_fn=len)))
    saved = io.BytesIO()
    _, saving = timed(lambda: torch.save(made.state_dict(), saved))
    assert abs(float(coreset.weights.sum()) - n) < 1e-3 * n
    return {
        "processes": world,
        "n": n,
        "size": size,
        "construct s": seconds,
        "select cpu s": selecting,
        "select wall s": wall,
        "forward examples": made.stats["forward_examples"],
        "MB of a small selection": before - empty,
        "MB more of this one": grown,
        "epoch's indices": len(order),
        "drawing s": drawing,
        "loader batches": batches,
        "second epoch s": loading,
        "state MB": len(saved.getvalue()) / 2**20,
        "saving s": saving,
        "collectives": sum(calls.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=N)
    parser.add_argument("--size", type=int, default=None, help="examples to keep (default: a tenth)")
    parser.add_argument("--draws", type=int, default=4)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if distributed.is_torchelastic_launched():
        distributed.init_process_group("gloo")
    strategy = strategies.Stable(draws=arguments.draws)
    figures = measure(arguments.n, arguments.size or arguments.n // 10, strategy)
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    print(f"rank {rank}  " + "  ".join(f"{name}: {value:,.6g}" for name, value in figures.items()), flush=True)
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
