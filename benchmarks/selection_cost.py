"""What a selection costs against the naive way to make it, and what the sampler costs between selections.

    pip install "coreset-sampler[benchmarks,timm]"
    python benchmarks/selection_cost.py            # a quarter of an hour; --quick takes two minutes

First table: stable coresets with 4 draws, 128 kept of each pool of 500. The naive contestant does what the papers'
released code does: for every pool and every draw it copies the model, adds noise to the copy's norm layers, loads the
pool and runs it; then distances and plain greedy class by class. "Loaded once" is the same with each pool kept in memory
after its first draw. Everything is on one thread without workers, and times are CPU seconds of the process, which other
work on the machine disturbs less than wall time. Contestants take turns and each counts by its fastest turn.

Second table: examples a second of a DataLoader over a coreset that has been selected already, against RandomSampler.

The first table's data are scikit-learn's digits, repeated with small shifts and noise up to the number wanted; the second's
are random numbers. Prints markdown.
"""

from __future__ import annotations

import argparse
import copy
import io
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from coreset_sampler import Coreset, CoresetSampler, SphericalGaussian, Weighted, strategies
from coreset_sampler.layers import is_norm
from coreset_sampler.selection.types import View

DRAWS, POOL_SIZE, KEEP, SCALE, BATCH_SIZE, CLASSES = 4, 500, 128, 0.1, 128, 10
REUSE = 5


def digits(n: int) -> tuple[np.ndarray, Tensor]:
    """`(n, 8, 8)` images in [0, 1] and their labels."""
    from sklearn.datasets import load_digits

    rng, data = np.random.default_rng(0), load_digits()
    rows = np.resize(rng.permutation(len(data.target)), n)
    shifts = rng.integers(-1, 2, size=(n, 2))
    moved = np.stack([np.roll(data.images[row], tuple(by), (0, 1)) for row, by in zip(rows, shifts, strict=True)])
    images = np.clip(moved / 16 + 0.05 * rng.normal(size=moved.shape), 0, 1)
    return images.astype(np.float32), torch.tensor(data.target[rows])


def in_memory(n: int) -> Dataset:
    """Ready tensors `(1, 28, 28)`: loading costs next to nothing."""
    images, labels = digits(n)
    large = nn.functional.interpolate(torch.tensor(images)[:, None], size=28, mode="bilinear")
    return TensorDataset((large - 0.3) / 0.37, labels)


class Jpegs(Dataset):
    """JPEG files of 64 x 64 pixels in memory, decoded, resized to 32 x 32 and normalised each time they are asked for."""

    def __init__(self, n: int) -> None:
        from PIL import Image

        images, self.targets = digits(n)
        self.files = []
        for image in images:
            file = io.BytesIO()
            pixels = Image.fromarray((255 * image).astype(np.uint8)).resize((64, 64), Image.Resampling.BICUBIC)
            pixels.convert("RGB").save(file, "JPEG")
            self.files.append(file.getvalue())

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        from PIL import Image

        image = Image.open(io.BytesIO(self.files[index])).convert("RGB").resize((32, 32), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float().div_(255)
        return (pixels - 0.3) / 0.37, self.targets[index]


def conv_net() -> nn.Module:
    """Four convolutions with BatchNorm: the network of the Fashion-MNIST recipe."""
    layers: list[nn.Module] = []
    for before, after in ((1, 16), (16, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
        layers += [nn.MaxPool2d(2)] if len(layers) < 10 else []
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))


def resnet() -> nn.Module:
    import timm

    return timm.create_model("resnet18", num_classes=CLASSES)


def trained(model: nn.Module, data: Dataset, steps: int) -> nn.Module:
    """The model after a few steps, so that gradients differ as they do in a run."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    indices = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[: steps * 64]  # type: ignore[arg-type]
    for x, y in DataLoader(Subset(data, indices.tolist()), batch_size=64):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def naive(model: nn.Module, data: Dataset, labels: Tensor, size: int, *, load_once: bool = False) -> Tensor:
    """A selection of `size` examples, pool by pool and draw by draw; returns the indices picked."""
    picked = []
    for _ in range(size // KEEP):
        by_class = [(labels == c).nonzero().flatten() for c in range(CLASSES)]
        each = POOL_SIZE // CLASSES
        pool = torch.cat([members[torch.randperm(len(members))[:each]] for members in by_class])
        loader: Any = DataLoader(Subset(data, pool.tolist()), batch_size=BATCH_SIZE)
        if load_once:
            loader = list(loader)
        proxies = torch.cat([perturbed_proxies(model, loader) for _ in range(DRAWS)], 1)
        for c in range(CLASSES):
            members = (labels[pool] == c).nonzero().flatten()
            vectors = proxies[members]
            keep = KEEP // CLASSES + (c < KEEP % CLASSES)
            picked.append(pool[members[plain_greedy(torch.cdist(vectors, vectors), keep)]])
    return torch.cat(picked)


def perturbed_proxies(model: nn.Module, loader: Any) -> Tensor:
    """`(pool, classes)` softmax minus one-hot of a copy of the model with noise in its norm layers."""
    noisy = copy.deepcopy(model).eval()
    rows = []
    with torch.no_grad():
        for module in noisy.modules():
            if is_norm(module):
                for parameter in module.parameters(recurse=False):
                    parameter += SCALE * torch.randn_like(parameter)
        for x, y in loader:
            rows.append(noisy(x).softmax(1) - nn.functional.one_hot(y, CLASSES))
    return torch.cat(rows)


def plain_greedy(distances: Tensor, size: int) -> Tensor:
    """Facility location that looks at every candidate at every step."""
    nearest = torch.full((len(distances),), torch.inf)
    taken = torch.zeros(len(distances), dtype=torch.bool)
    picks = []
    for _ in range(size):
        totals = torch.minimum(nearest, distances).sum(1).masked_fill(taken, torch.inf)
        pick = int(totals.argmin())
        picks.append(pick)
        taken[pick] = True
        nearest = torch.minimum(nearest, distances[pick])
    return torch.tensor(picks)


class Counted(Dataset):
    """A data set that counts how often it is asked for an example."""

    def __init__(self, dataset: Any, labels: Tensor) -> None:
        self.dataset, self.targets, self.loads = dataset, labels, 0

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        self.loads += 1
        return self.dataset[index]


def ours(rescore_every: int = 1, **gaussian: Any) -> Callable[..., Callable[[], float]]:
    """Builds a contestant: `(model, data, labels, size) -> run`, which selects and returns the forwards it counts."""

    def build(model: nn.Module, data: Dataset, labels: Tensor, size: int) -> Callable[[], float]:
        posterior = SphericalGaussian(SCALE, **gaussian)
        strategy = strategies.Stable(
            posterior=posterior, draws=DRAWS, pool_size=POOL_SIZE, keep=KEEP, rescore_every=rescore_every
        )

        def run() -> float:
            sampler = CoresetSampler(
                data, model, size=size, strategy=strategy, labels=labels, batch_size=BATCH_SIZE, progress=False
            )
            for epoch in range(rescore_every):
                sampler.set_epoch(epoch)
                sampler.select()
            return sampler.stats["forward_examples"]

        return run

    return build


def theirs(load_once: bool) -> Callable[..., Callable[[], float]]:
    def build(model: nn.Module, data: Dataset, labels: Tensor, size: int) -> Callable[[], float]:
        def run() -> float:
            naive(model, data, labels, size, load_once=load_once)
            return size // KEEP * POOL_SIZE * DRAWS

        return run

    return build


# Name -> how to build it, and the selections that one run makes.
CONTESTANTS: dict[str, tuple[Callable[..., Callable[[], float]], int]] = {
    "naive": (theirs(load_once=False), 1),
    "naive, loaded once": (theirs(load_once=True), 1),
    "ours, independent draws in all norm layers": (ours(), 1),
    "ours, `redraw=1` [1]": (ours(redraw=1), 1),
    f"ours, `rescore_every={REUSE}` [2]": (ours(rescore_every=REUSE), REUSE),
    f"ours, `redraw=1, rescore_every={REUSE}` [1, 2]": (ours(rescore_every=REUSE, redraw=1), REUSE),
    'ours, `layers="head"` [3]': (ours(layers="head"), 1),
}
NOTES = f"""\
Ratio: the naive time over this one. Arithmetic: multiplications in convolutions and matrix products. Loaded, forwarded
(examples times draws, as `stats` counts them) and arithmetic are for one selected example.
[1] Draws share everything before the last norm layer and that layer differs between them. Each draw has the same
distribution as an independent one, so the expected distance is estimated without bias, from draws less unlike each other.
[2] One scoring pass serves {REUSE} selections, each with new pools; cost divided by all {REUSE}. It takes the
candidates of {REUSE} selections, but never more than there are examples: that is what it saves, here a factor of two.
[3] Another posterior than the naive one's: noise in the last linear layer only."""


def cost_table(name: str, model: nn.Module, data: Dataset, labels: Tensor, size: int, repeats: int) -> None:
    """Prints the rows of one network and data set."""
    counted = Counted(data, labels)
    runs = {key: build(model, counted, labels, size) for key, (build, _) in CONTESTANTS.items()}
    figures = {}
    for key, run in runs.items():  # a first, uncounted turn, which also counts the work
        counted.loads = 0
        with FlopCounterMode(display=False) as flops:
            forwards = run()
        figures[key] = counted.loads, forwards, flops.get_total_flops()
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(repeats):
        for key, run in runs.items():
            began = time.process_time()
            run()
            best[key] = min(best[key], time.process_time() - began)
    each = {key: size * selections for key, (_, selections) in CONTESTANTS.items()}
    naive_seconds, naive_flops = best["naive"] / each["naive"], figures["naive"][2] / each["naive"]
    item = load_seconds(data)
    print(
        f"\n{name}: {size:,} kept of {size // KEEP * POOL_SIZE:,} candidates among {len(labels):,} examples; ", end=""
    )
    print(f"loading takes {1e6 * item:.0f} µs an example\n")
    print("| | ms per selected example | ratio | loaded | forwarded | arithmetic |\n|---|---|---|---|---|---|")
    for key, seconds in best.items():
        loads, forwards, flops = (figure / each[key] for figure in figures[key])
        seconds /= each[key]
        print(
            f"| {key} | {1e3 * seconds:.3f} | {naive_seconds / seconds:.1f} | {loads:.1f} | {forwards:.1f} "
            f"| {flops / naive_flops:.0%} |",
            flush=True,
        )


def load_seconds(data: Dataset) -> float:
    """CPU seconds to load one example and put it into a batch, at best."""
    loader = DataLoader(Subset(data, range(512)), batch_size=BATCH_SIZE)
    best = float("inf")
    for _ in range(3):
        began = time.process_time()
        for _ in loader:
            pass
        best = min(best, time.process_time() - began)
    return best / 512


def first_half(view: View, size: int, generator: torch.Generator) -> Coreset:
    """A strategy for the second table: indices 0 to `size`, all of weight 2."""
    return Coreset(torch.arange(size), torch.full((size,), len(view.labels) / size))


def throughput_row(n: int, workers: int, weights: str, repeats: int) -> str:
    """Examples a second over `n / 2` of `n` examples in memory, the samplers taking turns.

    Both give the same indices once each in random order, so neither gains by the processor's caches.
    """
    data: Dataset = TensorDataset(torch.rand(n, 1, 28, 28), torch.arange(n) % CLASSES)
    data = Weighted(data) if weights == "loss" else data
    size = n // 2
    sampler = CoresetSampler(data, conv_net(), size=size, strategy=first_half, weights=weights, reselect_every=10**9)
    sampler.select()
    samplers = {"ours": sampler, "random": RandomSampler(range(size))}
    options = {"batch_size": BATCH_SIZE, "num_workers": workers, "persistent_workers": workers > 0}
    loaders: dict[str, Any] = {key: DataLoader(data, sampler=s, **options) for key, s in samplers.items()}
    clock = time.perf_counter if workers else time.process_time
    seconds: dict[str, list[float]] = {"ours": [], "random": []}
    for turn in range(repeats + 1):
        for key in ("ours", "random") if turn % 2 else ("random", "ours"):
            began = clock()
            seen = sum(len(batch[0]) for batch in loaders[key])
            if turn:  # the first starts the workers
                seconds[key].append(clock() - began)
            assert seen == size
    best = {key: size / min(times) for key, times in seconds.items()}
    pairs = [b / a for a, b in zip(seconds["ours"], seconds["random"], strict=True)]
    return (
        f"| {weights} | {workers} | {best['ours']:,.0f} | {best['random']:,.0f} "
        f"| {best['ours'] / best['random']:.3f} | {statistics.median(pairs):.3f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller sets, one repeat: to see that it runs")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each contestant (default: %(default)s)")
    parser.add_argument("--only", choices=["selection", "throughput"], help="one of the two tables")
    args = parser.parse_args()
    repeats = 1 if args.quick else args.repeats
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, one thread")
    if args.only != "throughput":
        pools = 2 if args.quick else 10
        small = in_memory(10 * pools * KEEP)
        labels = small.tensors[1]  # type: ignore[attr-defined]
        model = trained(conv_net(), small, 40)
        cost_table("Conv net, 1 x 28 x 28, tensors in memory", model, small, labels, pools * KEEP, repeats)
        pools = 1 if args.quick else 2
        files = Jpegs(10 * pools * KEEP)
        model = trained(resnet(), files, 20)
        cost_table("timm resnet18, 3 x 32 x 32, JPEG files", model, files, files.targets, pools * KEEP, repeats)
        print(f"\n{NOTES}")
    if args.only != "selection":
        n, turns = (50_000, 3) if args.quick else (100_000, 4 * args.repeats + 1)
        print(f"\n{n // 2:,} of {n:,} examples `(1, 28, 28)` in memory, batches of {BATCH_SIZE}, examples a second:\n")
        print("| weights | workers | ours, best | RandomSampler, best | ratio of the best | median ratio of pairs |")
        print("|---|---|---|---|---|---|")
        for workers in (0, 2):
            for weights in ("draw", "loss"):
                print(throughput_row(n, workers, weights, turns), flush=True)
        print(
            '\nFor `weights="loss"` both samplers draw from `Weighted(data)`. Times are CPU seconds without workers and ',
            end="",
        )
        print("wall seconds with them.")


if __name__ == "__main__":
    main()
