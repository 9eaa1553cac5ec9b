"""Digits with 40 % of the labels wrong: uniform, label confidence, CREST and stable sampling. This is `make demo`.

    python recipes/digits_noise.py [--seeds 5] [--picture runs/demo.png]

Each contestant trains a small BatchNorm network on 10 % of 1,200 training digits an epoch, 80 epochs, and is scored on
597 clean digits that none of them has seen. The loops differ in the sampler alone; batch size and learning rate are the
same for all. The rate was chosen on held-out training digits: at 0.05 some networks nearly collapse, whatever the sampler.
Measured (n = 5, mean ± standard deviation): uniform 0.952 ± 0.012, label confidence 0.975 ± 0.006, CREST 0.948 ± 0.007,
stable 0.942 ± 0.013, stable with `confidence_exponent=2` 0.950 ± 0.013. Selection takes 10 % of label confidence's time and
46 % of stable's, the network being tiny.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean, stdev

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from coreset_sampler import CoresetSampler, SphericalGaussian, strategies
from coreset_sampler.selection.testing import inject_label_noise

NOISE, FRACTION, EPOCHS, BATCH_SIZE, LEARNING_RATE = 0.4, 0.1, 80, 12, 0.01
POOLS = dict(pool_size=100, keep=20, rescore_every=10)
NOISE_IN_NORMS = SphericalGaussian(0.1, "norm", redraw=1)
STRATEGIES = {
    "uniform": strategies.Uniform(),
    "label_confidence": strategies.LabelConfidence(),
    "crest": strategies.Crest(**POOLS),
    "stable": strategies.Stable(posterior=NOISE_IN_NORMS, draws=4, **POOLS),
    "stable, exponent 2": strategies.Stable(posterior=NOISE_IN_NORMS, draws=4, confidence_exponent=2, **POOLS),
}
COLOURS = dict(zip(STRATEGIES, ("#888888", "#2f855a", "#d98a2b", "#2b6cb0", "#6b46c1"), strict=True))


def digits(seed: int) -> tuple[TensorDataset, TensorDataset, Tensor]:
    """Training digits with wrong labels, clean test digits, and which training labels are wrong."""
    data = load_digits()
    images, labels = torch.tensor(data.images[:, None] / 16, dtype=torch.float32), torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1000 + seed))
    train, test = order[:1200], order[1200:]
    given = inject_label_noise(labels[train], NOISE, seed=seed)
    return TensorDataset(images[train], given), TensorDataset(images[test], labels[test]), given != labels[train]


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


def accuracy(model: nn.Module, test: TensorDataset) -> float:
    model.eval()
    with torch.no_grad():
        return float((model(test.tensors[0]).argmax(1) == test.tensors[1]).double().mean())


def train(name: str, seed: int) -> dict:
    """One run: test accuracy over examples seen, the share of wrong labels trained on, selection's share of the time."""
    train_set, test_set, wrong = digits(seed)
    torch.manual_seed(seed)
    model = network()
    sampler = CoresetSampler(train_set, model, fraction=FRACTION, strategy=STRATEGIES[name], seed=seed, progress=False)
    loader = DataLoader(train_set, batch_size=BATCH_SIZE, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    curve, wrong_weight, kept, stood_for = [], [], torch.zeros(1200), torch.zeros(1200)
    for epoch in range(EPOCHS):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        schedule.step()
        coreset = sampler.coreset
        wrong_weight.append(float((coreset.weights * wrong[coreset.indices]).sum() / coreset.weights.sum()))
        kept[coreset.indices] += 1
        stood_for[coreset.indices] += coreset.weights.float()
        if (epoch + 1) % 4 == 0:
            curve.append(((epoch + 1) * len(sampler), accuracy(model, test_set)))
    return {
        "curve": curve,
        "wrong": fmean(wrong_weight),
        "share": sampler.stats["share"],
        "weight": torch.where(kept >= 3, stood_for / kept, torch.nan),
        "labels_wrong": wrong,
        "images": train_set.tensors,
    }


def draw(results: dict[str, list[dict]], path: Path) -> None:
    """Accuracy over examples seen, and which of the examples that stable picks weigh most and least."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[1.25, 1])
    axes = left.subplots()
    for name, runs in results.items():
        steps = [step for step, _ in runs[0]["curve"]]
        curves = torch.tensor([[value for _, value in run["curve"]] for run in runs])
        axes.plot(steps, curves.mean(0), color=COLOURS[name], label=name, linewidth=2)
        axes.fill_between(steps, *curves.aminmax(dim=0), color=COLOURS[name], alpha=0.15, linewidth=0)
    axes.set(xlabel="examples seen", ylabel="accuracy on clean test digits", ylim=(0.5, 1.0))
    axes.set_title(f"{NOISE:.0%} of the training labels are wrong (mean and range of {len(runs)} seeds)", fontsize=10)
    axes.legend(loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)
    run = results["stable"][0]
    order = run["weight"].argsort()[: (~run["weight"].isnan()).sum()]  # those hardly ever kept come last
    for half, title, chosen in zip(right.subfigures(2, 1), ("most", "fewest"), (order[-24:], order[:24]), strict=True):
        share = run["labels_wrong"][chosen].double().mean()
        half.suptitle(f"stands for the {title} others: {share:.0%} of these labels are wrong (red)", fontsize=10)
        for cell, index in zip(half.subplots(3, 8).flat, chosen.tolist(), strict=True):
            cell.imshow(run["images"][0][index, 0], cmap="gray_r")
            cell.set(xticks=[], yticks=[])
            colour = "#c0392b" if run["labels_wrong"][index] else "#2f855a"
            cell.set_title(int(run["images"][1][index]), fontsize=8, color=colour, pad=1)
            cell.spines[:].set_color(colour)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each contestant (default: %(default)s)")
    parser.add_argument("--picture", type=Path, default=Path("runs/demo.png"), help="default: %(default)s")
    args = parser.parse_args()
    torch.set_num_threads(1)  # such small networks are faster on one
    results: dict[str, list[dict]] = {name: [] for name in STRATEGIES}
    for seed, name in tqdm([(seed, name) for seed in range(args.seeds) for name in STRATEGIES], unit="run"):
        results[name].append(train(name, seed))
    print(f"\nDigits, {NOISE:.0%} of 1,200 labels wrong, {EPOCHS} epochs of {FRACTION:.0%}; n = {args.seeds}\n")
    columns = ["sampler", "accuracy on clean test digits", "wrong labels trained on", "time spent on selection"]
    print(f"| {' | '.join(columns)} |\n|---|---|---|---|")
    for name, runs in results.items():
        scores, wrong, share = zip(*[(run["curve"][-1][1], run["wrong"], run["share"]) for run in runs], strict=True)
        deviation = stdev(scores) if len(scores) > 1 else 0.0
        print(f"| {name} | {fmean(scores):.3f} ± {deviation:.3f} | {fmean(wrong):.0%} | {fmean(share):.0%} |")
    draw(results, args.picture)
    print(f"\npicture: {args.picture}")


if __name__ == "__main__":
    main()
