"""What watching costs: throughput against a loop without us, and selection's share, the automatic and the explicit way.

    python benchmarks/watching_cost.py --data DIR [--batch-size 32 128] [--rounds 10]

The setting `cpu` of `cifar10.py`: a small network, 10,000 images, half of the labels wrong, ten passes in epochs of a tenth.
In each round every contestant trains from fresh weights, one after the other and in another order than in the last round,
so that a busy machine hurts them alike; CPU seconds of one thread. Figures are medians over rounds of the ratio to the loop
without us in the same round. One line of JSON for each round and contestant goes to --results.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
from cifar10 import SETTINGS
from harness import CLOCKS, Row
from image_training import Images, as_it_is, load
from origin import origin
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, RandomSampler

from coreset_sampler import CoresetSampler, PointMass, strategies
from coreset_sampler.selection.testing import inject_label_noise

FRACTION = 0.1
CONTESTANTS = ("without us", "uniform", "automatic", "explicit", "scoring passes")


class Indexed(Dataset):
    """Batches that end in the indices of their examples."""

    def __init__(self, images: Images) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, at: list[int]) -> tuple:
        return *self.images.__getitems__(at), torch.tensor(at)


def train(name: str, images: Images, labels: torch.Tensor, batch_size: int, passes: float, seed: int) -> tuple:
    """CPU seconds, and selection's share of them."""
    torch.manual_seed(seed)
    model, size = SETTINGS["cpu"].network(), round(FRACTION * len(images))
    scored = strategies.LabelConfidence(posterior=PointMass(), warm_up=10)
    strategy = {"uniform": strategies.Uniform(), "scoring passes": scored}.get(name, strategies.LabelConfidence())
    data: Dataset = Indexed(images) if name == "explicit" else images
    sampler = CoresetSampler(
        data, model, size=size, strategy=strategy, labels=labels, seed=seed, collate_fn=as_it_is, progress=False,
        selection_dataset=images, scoring_batch_size=500,
    )  # fmt: skip
    chosen = RandomSampler(images, num_samples=size) if name == "without us" else sampler
    loader = DataLoader(data, batch_size, sampler=chosen, drop_last=True, collate_fn=as_it_is)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9, nesterov=True, weight_decay=5e-4)
    began = CLOCKS["cpu"]()
    for _ in range(round(passes / FRACTION)):
        for x, y, *index in loader:
            logits = model(x)
            if index:
                sampler.observe(index[0], logits)
            optimizer.zero_grad()
            cross_entropy(logits, y).backward()
            optimizer.step()
    seconds = CLOCKS["cpu"]() - began
    return seconds, 0.0 if name == "without us" else sampler.stats["share"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder or hub id of CIFAR-10 for datasets.load_dataset")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[32, 128], help="default: %(default)s")
    parser.add_argument("--passes", type=float, default=10, help="over the images (default: %(default)s)")
    parser.add_argument("--strategy", nargs="+", default=CONTESTANTS, choices=CONTESTANTS, help="default: all")
    parser.add_argument("--rounds", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--images", type=int, default=10_000, help="default: %(default)s")
    parser.add_argument("--results", type=Path, default=Path("runs/watching_cost.jsonl"), help="default: %(default)s")
    args = parser.parse_args()
    names = list(dict.fromkeys([CONTESTANTS[0], *args.strategy]))  # the first is what all are compared with
    torch.set_num_threads(1)
    pixels, clean = load(args.data, "train", "RGB")
    labels = inject_label_noise(clean[: args.images], 0.5, seed=0)
    images = Images(pixels[: args.images], labels, SETTINGS["cpu"], shift=2)
    args.results.parent.mkdir(parents=True, exist_ok=True)
    for batch_size in args.batch_size:
        rows: list[Row] = []
        for seed in range(args.rounds):
            first = seed % len(names)  # each is the first in some round
            order = [*names[first:], *names[:first]]
            found = {name: train(name, images, labels, batch_size, args.passes, seed) for name in order}
            for name, (seconds, share) in found.items():
                throughput = found["without us"][0] / seconds
                row = dict(
                    strategy=name,
                    batch_size=batch_size,
                    passes=args.passes,
                    seed=seed,
                    throughput=throughput,
                    share=share,
                )
                rows.append(row | origin())
                with args.results.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
        for name in names:
            mine = [row for row in rows if row["strategy"] == name]
            ratio, share = (statistics.median(row[key] for row in mine) for key in ("throughput", "share"))
            print(f"batch {batch_size}, {name}: throughput {ratio:.3f}, selection {share:.1%} of the time", flush=True)


if __name__ == "__main__":
    main()
