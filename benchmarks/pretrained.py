"""CIFAR-10 through a pretrained network, with wrong labels: what most users have. A tenth of the examples an epoch.

    python benchmarks/pretrained.py table --data DIR --weights FILE --clock cpu --passes 3       # then 6 and 12
    python benchmarks/pretrained.py table --data DIR --weights FILE --clock cpu --passes 3 --setting by_class
    python benchmarks/pretrained.py table --data DIR --weights FILE --clock cpu --passes 3 --setting tuned_symmetric
    python benchmarks/pretrained.py table --data TINY --weights FILE --clock cpu --setting tiny_symmetric    # tiny_by_class
    python benchmarks/pretrained.py table --data SNLI --weights MINILM --clock cpu --setting pairs_symmetric # pairs_by_class
    python benchmarks/pretrained.py ablation --data DIR --weights FILE --passes 12 --setting by_class  # other exponents

FILE holds timm's weights of EfficientNet-Lite0 (.safetensors); DIR is a folder or hub id that `datasets.load_dataset`
opens. What the part in training receives is computed once for 12,000 training and 5,000 test images (96 pixels) and kept
beside --results. Training is on the first 10,000; validation is on the 2,000 others.

    symmetric, by_class                 all but a head 1280-256-10 with BatchNorm and dropout 0.5 is frozen
    light_symmetric, light_by_class     the same with dropout 0.2, which learns wrong labels by heart sooner
    tuned_symmetric, tuned_by_class     the last stage is fine-tuned, with a new head
    tiny_symmetric, tiny_by_class       all 20,000 images of Tiny-ImageNet, 200 classes, a head as above
    pairs_symmetric, pairs_by_class     20,000 pairs of SNLI: u, v, |u - v|, u * v of their sentences' frozen embeddings by
                                        MINILM, a folder or hub id of a sentence encoder; a head as above

`symmetric` noise puts any other class, `by_class` a similar one (cat for dog; in Tiny-ImageNet that whose mean features are
nearest; neutral for entailment and contradiction, entailment for neutral). Contestants differ in the strategy alone; the
oracle never shows a wrong label. Figures: docs/results.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from found import found, label_probability_now
from harness import CLOCKS, Row, Setting, Study, main
from image_training import as_it_is, cosine, load
from oracle import oracle
from pair_features import pair_features
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate, normalize
from torch.utils.data import DataLoader, TensorDataset

from coreset_sampler import CoresetSampler, PointMass, Trajectory, strategies
from coreset_sampler.selection.testing import inject_label_noise

FRACTION = 0.1
CIFAR10 = (8, 9, 0, 5, 7, 3, 4, 4, 0, 1)  # a ship for an aeroplane, a dog for a cat, ...

Splits = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class PretrainedSetting(Setting):
    """What a run needs."""

    by_class: bool  # wrong labels are those of a similar class
    similar: tuple[int, ...] | None = CIFAR10  # of each class; None takes the one whose mean features are nearest
    num_classes: int = 10
    test_split: str = "test"
    pairs: bool = False  # of sentences, not images
    tuned_stage: bool = False  # whether the last stage is trained too
    n: int = 10_000
    n_validation: int = 2_000
    n_test: int = 5_000
    img_size: int = 96
    hidden: int = 256
    dropout: float = 0.5
    batch_size: int = 64


TINY = dict(
    similar=None, num_classes=200, n=20_000, n_test=10_000, test_split="validation", passes=6, trials=(dict(lr=0.05),)
)
PAIRS = dict(
    similar=(1, 0, 1), num_classes=3, n=20_000, n_test=9_824, pairs=True, passes=6, trials=(dict(lr=0.05),)
)  # entailment, neutral, contradiction
HEAD, STAGE = dict(passes=12, trials=(dict(lr=0.05),)), dict(passes=6, tuned_stage=True, trials=(dict(lr=0.01),))
RATES = (0.1, 0.05, 0.02, 0.2)  # none of the others was half a point better for anybody on validation images
LIGHT = dict(dropout=0.2, passes=12, trials=tuple(dict(lr=lr) for lr in RATES))
SETTINGS = {
    "symmetric": PretrainedSetting(by_class=False, noises=(0.5, 0.0), **HEAD),
    "by_class": PretrainedSetting(by_class=True, noises=(0.4, 0.17), **HEAD),
    "light_symmetric": PretrainedSetting(by_class=False, noises=(0.5, 0.0), **LIGHT),
    "light_by_class": PretrainedSetting(by_class=True, noises=(0.4,), **LIGHT),
    "tuned_symmetric": PretrainedSetting(by_class=False, noises=(0.5, 0.0), **STAGE),
    "tuned_by_class": PretrainedSetting(by_class=True, noises=(0.4,), **STAGE),
    "tiny_symmetric": PretrainedSetting(by_class=False, noises=(0.5, 0.3, 0.0), **TINY),
    "tiny_by_class": PretrainedSetting(by_class=True, noises=(0.4,), **TINY),
    "pairs_symmetric": PretrainedSetting(by_class=False, noises=(0.5, 0.3, 0.0), **PAIRS),
    "pairs_by_class": PretrainedSetting(by_class=True, noises=(0.3,), **PAIRS),
}


class Rows(TensorDataset):
    """Tensors whose batches are taken in one go."""

    def __getitems__(self, at: list[int]) -> tuple[Tensor, ...]:
        return tuple(tensor[at] for tensor in self.tensors)


def network(weights: str | None) -> nn.Module:
    """EfficientNet-Lite0 without its classifier; random where there are no weights."""
    import timm

    overlay = dict(file=weights) if weights else None
    return timm.create_model("tf_efficientnet_lite0", bool(weights), pretrained_cfg_overlay=overlay, num_classes=0)


def cut(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """All but the last stage, and the last stage with what follows."""
    before = nn.Sequential(model.conv_stem, model.bn1, *model.blocks[:-1])
    return before, nn.Sequential(model.blocks[-1], model.conv_head, model.bn2, model.global_pool)


@cache
def features(
    data: str,
    weights: str | None,
    folder: Path,
    sizes: tuple[int, int],
    img_size: int,
    stage: bool,
    test_split: str = "test",
    pairs: bool = False,
) -> Splits:
    """What the part in training receives, and labels, of so many training and test images; from a file if it is there."""
    names = Path(data).name, Path(weights).stem if weights else "random", *map(str, (*sizes, img_size))
    file = folder / f"features_{'-'.join(names)}{'-stage' * stage}.pt"
    if file.exists():
        return torch.load(file, weights_only=True)
    if pairs:
        assert weights is not None
        found = {name: pair_features(data, weights, name, n) for name, n in zip(("train", "test"), sizes, strict=True)}
        torch.save(found, file)
        return found
    model = network(weights)
    model = (cut(model)[0] if stage else model).eval()
    found = {}
    for split, n in zip(("train", "test"), sizes, strict=True):
        pixels, labels = load(data, "train" if split == "train" else test_split, "RGB")
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        order = order[:n] if split == "train" else order[-n:]  # the first test images were seen when rules were made
        parts = [embed(model, part, img_size) for part in pixels[order].split(100)]
        found[split] = torch.cat(parts), labels[order]
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(found, file)
    return found


@torch.no_grad()
def embed(model: nn.Module, pixels: Tensor, size: int) -> Tensor:
    """What the network makes of bytes `(n, h, w, 3)`."""
    images = pixels.permute(0, 3, 1, 2).float().div(127.5).sub(1).contiguous(memory_format=torch.channels_last)
    return model(interpolate(images, (size, size), mode="bicubic", align_corners=False))


def similar_classes(x: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """`(num_classes,)` for each class the other one whose mean features point the most alike."""
    sums = torch.zeros(num_classes, x.shape[1]).index_add_(0, labels, x)
    means = sums / labels.bincount(minlength=num_classes).clamp(min=1)[:, None]
    directions = normalize(means - means.mean(0))
    return (directions @ directions.T).fill_diagonal_(-2).argmax(1)


def noisy(labels: Tensor, share: float, seed: int, *, similar: Tensor | None, num_classes: int) -> Tensor:
    """The labels, some of them wrong: those of a `similar` class `(num_classes,)`, or of any other."""
    if similar is None:
        return inject_label_noise(labels, share, seed=seed, num_classes=num_classes)
    flip = torch.rand(len(labels), generator=torch.Generator().manual_seed(seed)) < share
    return torch.where(flip, similar[labels], labels)


def part_in_training(setting: PretrainedSetting, weights: str | None, width: int) -> nn.Module:
    """A head, or the last stage with its pretrained weights and a linear head."""
    if setting.tuned_stage:
        return nn.Sequential(cut(network(weights))[1], nn.Dropout(0.2), nn.Linear(1280, setting.num_classes))
    return nn.Sequential(
        nn.Linear(width, setting.hidden), nn.BatchNorm1d(setting.hidden), nn.ReLU(), nn.Dropout(setting.dropout),
        nn.Linear(setting.hidden, setting.num_classes),
    )  # fmt: skip


def similar_of(setting: PretrainedSetting, x: Tensor, clean: Tensor) -> Tensor | None:
    """The class that each is taken for; None where it is any."""
    if not setting.by_class:
        return None
    return torch.tensor(setting.similar) if setting.similar else similar_classes(x, clean, setting.num_classes)


def fraction_of(job: Row) -> float:
    return 1.0 if job["strategy"].startswith("full") else FRACTION


def train(job: Row, args: argparse.Namespace) -> Row:
    """One run: accuracy, seconds without the test, selection's share, clean labels of the second half, noise rate."""
    torch.set_num_threads(args.threads)
    setting = SETTINGS[job["setting"]]
    sizes = setting.n + setting.n_validation, setting.n_test
    splits = features(
        args.data, args.weights, args.results.parent, sizes, setting.img_size, setting.tuned_stage,
        setting.test_split, setting.pairs,
    )  # fmt: skip
    there = len(splits["train"][1])  # where these are fewer, validation images are taken from those of the training
    n = setting.n if job["on"] == "test" else min(setting.n, there - setting.n_validation)
    x, clean = (part[:n] for part in splits["train"])
    held_out = splits["test"] if job["on"] == "test" else tuple(part[n:] for part in splits["train"])
    labels = noisy(
        clean, job["noise"], job["seed"], similar=similar_of(setting, x, clean), num_classes=setting.num_classes
    )
    torch.manual_seed(job["seed"])
    model = part_in_training(setting, args.weights, x.shape[1])
    strategy = STRATEGIES[job["strategy"]]
    sampler = CoresetSampler(
        Rows(x, labels), model, fraction=fraction_of(job), seed=job["seed"], labels=labels, progress=False,
        collate_fn=as_it_is,
        strategy=oracle((labels != clean).nonzero().flatten()) if strategy is None else strategy(),
    )  # fmt: skip
    began = {kind: clock() for kind, clock in CLOCKS.items()}
    figures = fit(model, sampler, job, setting, labels == clean)
    spent = {kind: clock() - began[kind] for kind, clock in CLOCKS.items()}
    figures |= found(sampler, labels != clean, label_probability_now(model, x, labels))
    with torch.no_grad():
        parts = [model.eval()(part) for part in held_out[0].split(500)]
    right = torch.cat(parts).argmax(1) == held_out[1]
    return {"accuracy": float(right.double().mean()), **spent, **figures}


def fit(model: nn.Module, sampler: CoresetSampler, job: Row, setting: PretrainedSetting, right: Tensor) -> Row:
    """Trains. Selection's share, clean labels in the second half, the estimated noise rate, how wrong labels rank."""
    optimizer = torch.optim.SGD(model.parameters(), job["lr"], momentum=0.9, nesterov=True, weight_decay=5e-4)
    loader = DataLoader(sampler.dataset, setting.batch_size, sampler=sampler, drop_last=True, collate_fn=as_it_is)
    epochs, clean = max(1, round(job["passes"] / fraction_of(job))), []
    for epoch in range(epochs):
        for batch, (x, y) in enumerate(loader):
            done = (epoch + (batch + 1) / len(loader)) / epochs
            optimizer.param_groups[0]["lr"] = job["lr"] * cosine(done)
            loss = cross_entropy(model.train()(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        clean.append(float(right[sampler.coreset.indices].double().mean()))
    half = clean[len(clean) // 2 :]
    rate = sampler.stats.get("estimated_noise_rate", 0.0)
    return {"share": sampler.stats["share"], "clean": sum(half) / len(half), "rate": rate}


def more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", help="file of timm's weights; default: a random network, whose features are poor")


confidence = strategies.LabelConfidence
COVER = partial(strategies.Stable, pool_size=5, keep=1)
STRATEGIES: dict[str, Callable | None] = {
    "uniform": strategies.Uniform,
    "label_confidence": confidence,
    "oracle": None,
    "full, watched": strategies.Uniform,
    "stable, trajectory": partial(COVER, posterior=Trajectory(), draws=1),
    "label_confidence, scoring passes": partial(confidence, posterior=PointMass()),
    **{f"label_confidence, exponent {e:g}": partial(confidence, exponent=e) for e in (1, 1.5, 2, 4)},
}
NAMES = list(STRATEGIES)
STUDY = Study("pretrained", "images", SETTINGS, NAMES[:3], NAMES, train)

if __name__ == "__main__":
    main(STUDY, __doc__, more_options)
