"""CIFAR-10 through a frozen pretrained network, with wrong labels: a head trained on a tenth of the examples an epoch.

    python benchmarks/pretrained.py table --data DIR --weights FILE --clock cpu --passes 3       # then 6 and 12
    python benchmarks/pretrained.py table --data DIR --weights FILE --clock cpu --passes 3 --setting by_class
    python benchmarks/pretrained.py ablation --data DIR --weights FILE --passes 12 --setting by_class  # other exponents
    python benchmarks/pretrained.py run --data DIR --weights FILE --strategy quality --noise 0.5

FILE holds timm's weights of EfficientNet-Lite0 (.safetensors); DIR is a folder or hub id that `datasets.load_dataset`
opens. Features of 12,000 training and 5,000 test images (96 pixels) are computed once, beside --results. The head,
1280-256-10 with BatchNorm and dropout, is trained on the first 10,000; validation is on the 2,000 others.

Scores come from the training's own forward passes. After a first pass in which everything is seen once, an example is due
again at the time it was shown plus 1 / chance, chance at least 0.02:

    uniform      chance 1
    thresholds   class thresholds of confident learning (Northcutt et al. 2021) on the mean probability, slope 2
    quality      `label_chance`, by the noise model of the first visits in the second half of the first pass
    oracle       never shows a wrong label

`symmetric` noise puts any other class, `by_class` a similar one (cat for dog). The loop is the benchmark's own: it judges
`coreset_sampler.selection.noise` and does not go through CoresetSampler.

Measured (test images, 3 / 6 / 12 passes; n in docs/results.md; about 10 CPU seconds for 12 passes, one thread):

    wrong labels       uniform              quality              oracle
    50 %, symmetric    .769 / .760 / .688   .779 / .787 / .785   .808 / .805 / .803
    40 %, by_class     .664 / .643 / .605   .738 / .747 / .734   .810 / .810 / .807
    none, 3 passes     .818                 .818
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from harness import CLOCKS, Row, Setting, Study, main
from image_training import cosine, load
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from coreset_sampler.selection.noise import NoiseModel, label_chance, label_quality, noise_model
from coreset_sampler.selection.testing import inject_label_noise

FRACTION, FLOOR = 0.1, 0.02
EPOCHS = round(1 / FRACTION)  # of a pass
SIMILAR = torch.tensor([8, 9, 0, 5, 7, 3, 4, 4, 0, 1])  # a ship for an aeroplane, a dog for a cat, ...
EXPONENT = 2.0

Splits = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class HeadSetting(Setting):
    """What a run needs."""

    by_class: bool  # wrong labels are those of a similar class
    n: int = 10_000
    n_validation: int = 2_000
    n_test: int = 5_000
    img_size: int = 96
    hidden: int = 256
    batch_size: int = 64


SETTINGS = {
    "symmetric": HeadSetting(by_class=False, passes=12, noises=(0.5, 0.0), trials=(dict(lr=0.05),)),
    "by_class": HeadSetting(by_class=True, passes=12, noises=(0.4, 0.17), trials=(dict(lr=0.05),)),
}


@cache
def features(data: str, weights: str | None, folder: Path, sizes: tuple[int, int], img_size: int) -> Splits:
    """Features and labels of so many training and test images, from a file in `folder` if they are there."""
    names = Path(data).name, Path(weights).stem if weights else "random", *map(str, (*sizes, img_size))
    file = folder / f"features_{'-'.join(names)}.pt"
    if file.exists():
        return torch.load(file, weights_only=True)
    import timm

    overlay = dict(file=weights) if weights else None
    model = timm.create_model(
        "tf_efficientnet_lite0", bool(weights), pretrained_cfg_overlay=overlay, num_classes=0
    ).eval()
    found = {}
    for split, n in zip(("train", "test"), sizes, strict=True):
        pixels, labels = load(data, split, "RGB")
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:n]
        parts = [embed(model, part, img_size) for part in pixels[order].split(100)]
        found[split] = torch.cat(parts), labels[order]
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(found, file)
    return found


@torch.no_grad()
def embed(model: nn.Module, pixels: Tensor, size: int) -> Tensor:
    """What the network's head would receive, of bytes `(n, h, w, 3)`."""
    images = pixels.permute(0, 3, 1, 2).float().div(127.5).sub(1).contiguous(memory_format=torch.channels_last)
    return model(interpolate(images, (size, size), mode="bicubic", align_corners=False))


def noisy(labels: Tensor, share: float, seed: int, *, by_class: bool) -> Tensor:
    """The labels, some of them wrong."""
    if not by_class:
        return inject_label_noise(labels, share, seed=seed, num_classes=len(SIMILAR))
    flip = torch.rand(len(labels), generator=torch.Generator().manual_seed(seed)) < share
    return torch.where(flip, SIMILAR[labels], labels)


@dataclass
class Scores:
    """What training saw: the logits of first visits, and the mean probabilities."""

    labels: Tensor
    first: Tensor = field(init=False)
    first_seen: Tensor = field(init=False)  # epoch
    total: Tensor = field(init=False)
    counts: Tensor = field(init=False)
    model: NoiseModel | None = None

    def __post_init__(self) -> None:
        n, classes = len(self.labels), len(SIMILAR)
        self.first = torch.full((n, classes), math.nan)
        self.first_seen = torch.zeros(n, dtype=torch.int64)
        self.total, self.counts = torch.zeros(n, classes), torch.zeros(n)

    def observe(self, indices: Tensor, logits: Tensor, epoch: int) -> None:
        """One batch of training."""
        logits = logits.detach().float()
        new = self.counts[indices] == 0
        self.first[indices[new]], self.first_seen[indices[new]] = logits[new], epoch
        self.total[indices] += logits.softmax(1)
        self.counts[indices] += 1

    @property
    def mean(self) -> Tensor:
        """Probabilities `(n, classes)`, over all visits; NaN where there was none (the rest of an epoch is dropped)."""
        return self.total / self.counts[:, None]

    def noise(self) -> NoiseModel:
        """Fitted once, to first visits in the second half of the first pass."""
        if self.model is None:
            late = self.first_seen >= EPOCHS // 2
            self.model = noise_model(self.first[late], self.labels[late])
        return self.model


def thresholds(scores: Scores) -> Tensor:
    """The chance by class thresholds: a class is likely if it is above its mean over the examples labelled so."""
    mean, rows = scores.mean, torch.arange(len(scores.labels))
    own_mean = torch.stack([mean[scores.labels == c, c].nanmean() for c in range(mean.shape[1])])
    ratio = (mean.clamp(min=1e-6) / own_mean).log()
    own = ratio[rows, scores.labels]
    ratio[rows, scores.labels] = -math.inf
    return torch.sigmoid(2 * (own - ratio.max(1).values)).nan_to_num(1.0)


def quality(exponent: float) -> Callable[[Scores], Tensor]:
    """The chance by the noise model."""

    def chance(scores: Scores) -> Tensor:
        return label_chance(label_quality(scores.mean, scores.labels, scores.noise()), scores.labels, exponent=exponent)

    return chance


RULES: dict[str, Callable[[Scores], Tensor] | None] = {
    "uniform": None,
    "thresholds": thresholds,
    "quality": quality(EXPONENT),
    **{f"quality, exponent {exponent:g}": quality(exponent) for exponent in (1, 1.5, 2, 4)},
    "oracle": None,
}


class Queue:
    """Who is next: everything once, then each at the time it was last shown plus 1 / chance. Nothing is owed."""

    def __init__(self, n: int, size: int, generator: torch.Generator) -> None:
        self.size, self.generator, self.clock = size, generator, 0.0
        self.last = torch.rand(n, generator=generator) - 3  # before all who were shown
        self.chance = torch.ones(n)

    def next(self) -> Tensor:
        """An epoch's examples, shuffled."""
        picks = (self.last + 1 / self.chance).topk(self.size, largest=False).indices
        step = self.size / float(self.chance.sum())
        self.last[picks] = self.clock + step * torch.rand(self.size, generator=self.generator)
        self.clock += step
        return picks[torch.randperm(self.size, generator=self.generator)]


def train(job: Row, args: argparse.Namespace) -> Row:
    """One run: accuracy, seconds without the test, selection's share, clean labels of the second half, noise rate."""
    torch.set_num_threads(args.threads)
    setting = SETTINGS[job["setting"]]
    sizes = setting.n + setting.n_validation, setting.n_test
    splits = features(args.data, args.weights, args.results.parent, sizes, setting.img_size)
    x, clean = (part[: setting.n] for part in splits["train"])
    held_out = splits["test"] if job["on"] == "test" else tuple(part[setting.n :] for part in splits["train"])
    labels = noisy(clean, job["noise"], job["seed"], by_class=setting.by_class)
    torch.manual_seed(job["seed"])
    head = nn.Sequential(
        nn.Linear(x.shape[1], setting.hidden), nn.BatchNorm1d(setting.hidden), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(setting.hidden, len(SIMILAR)),
    )  # fmt: skip
    began = {kind: clock() for kind, clock in CLOCKS.items()}
    shown, selecting, rate = fit(head, x, labels, labels != clean, job, setting)
    spent = {kind: clock() - began[kind] for kind, clock in CLOCKS.items()}
    with torch.no_grad():
        right = head.eval()(held_out[0]).argmax(1) == held_out[1]
    share = selecting / spent["cpu"]
    return {"accuracy": float(right.double().mean()), **spent, "share": share, "clean": shown, "rate": rate}


def fit(
    head: nn.Module, x: Tensor, labels: Tensor, wrong: Tensor, job: Row, setting: HeadSetting
) -> tuple[float, float, float]:
    """Trains the head. Clean labels in the second half, CPU seconds of selection, the estimated noise rate."""
    rule, clock = RULES[job["strategy"]], CLOCKS["cpu"]
    optimizer = torch.optim.SGD(head.parameters(), job["lr"], momentum=0.9, nesterov=True, weight_decay=5e-4)
    generator = torch.Generator().manual_seed(1000 + job["seed"])  # not that of the noise
    candidates = (~wrong).nonzero().flatten() if job["strategy"] == "oracle" else torch.arange(len(labels))
    size, epochs = round(FRACTION * len(labels)), max(1, round(job["passes"] * EPOCHS))
    queue, scores, clean, selecting = Queue(len(candidates), size, generator), Scores(labels), [], 0.0
    batches = size // setting.batch_size
    for epoch in range(epochs):
        began = clock()
        if rule and epoch >= EPOCHS and epoch % (EPOCHS // 2) == 0:
            queue.chance = rule(scores).clamp(FLOOR, 1)
        picks = candidates[queue.next()]
        selecting += clock() - began
        clean.append(float((~wrong)[picks].double().mean()))
        for batch, rows in enumerate(picks.split(setting.batch_size)[:batches]):
            done = (epoch + (batch + 1) / batches) / epochs
            optimizer.param_groups[0]["lr"] = job["lr"] * cosine(done)
            logits = head.train()(x[rows])
            scores.observe(rows, logits, epoch)
            optimizer.zero_grad()
            cross_entropy(logits, labels[rows]).backward()
            optimizer.step()
    half = clean[len(clean) // 2 :]
    return sum(half) / len(half), selecting, 0.0 if scores.model is None else scores.model.rate


def more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", help="file of timm's weights; default: a random network, whose features are poor")


CONTESTANTS = ("uniform", "thresholds", "quality", "oracle")
ABLATION = tuple(name for name in RULES if name != "quality")
STUDY = Study("pretrained", "images", SETTINGS, CONTESTANTS, ABLATION, train)

if __name__ == "__main__":
    main(STUDY, __doc__, more_options)
