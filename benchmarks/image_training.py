"""One run on small images that fit into memory: what CIFAR-10 and Fashion-MNIST share."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from found import found as found_labels
from harness import CLOCKS, Checkpoint, Row, Setting
from infobatch import InfoBatch
from torch import Tensor, distributed, nn
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import DataLoader, Dataset

from coreset_sampler import CoresetSampler, DistributedCoresetSampler, SphericalGaussian, WeightedDataset, strategies
from coreset_sampler.selection.testing import inject_label_noise
from coreset_sampler.selection.types import Strategy

FRACTION = 0.1


def cosine(done: float) -> float:
    """A tenth of the run to warm up, then down to zero along a cosine."""
    return min(1.0, done / 0.1) * (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True, kw_only=True)
class ImageSetting(Setting):
    """What a run on images needs."""

    network: Callable[[], nn.Module]
    mode: str  # of the images: RGB, or L for grey ones
    mean: float  # of all channels: one number each is twice as fast as three
    std: float
    n: int | None  # training examples, or all
    n_validation: int = 5_000  # training examples set aside, at most half of them
    weight_decay: float = 5e-4
    nesterov: bool = True
    decay: Callable[[float], float] = cosine  # of the learning rate, over the share of the run that is done
    shift: int | None = None  # pixels an image is moved by at most, and it may be mirrored; None leaves it as it is
    warm_up: float = 0.0  # share of the epochs, uniform: at its random start a network has nothing to say
    pools: Row
    posterior: SphericalGaussian


@dataclass(frozen=True)
class Contestant:
    """A strategy and how the sampler uses it."""

    strategy: Callable[..., Strategy]  # makes it; an oracle is told the wrong labels
    knows: bool = False
    counts: bool = False  # whether it is told how many selections there will be
    fraction: float = FRACTION  # of the examples, an epoch
    weighting: str = "resample"
    reselect_every: int = 1
    watch: bool | None = None


class Images(Dataset):
    """Images `(n, h, w, channels)` in memory as bytes; a batch is fetched, moved about and normalised in one go."""

    def __init__(self, pixels: Tensor, labels: Tensor, setting: ImageSetting, *, shift: int | None = None) -> None:
        self.pixels, self.labels, self.shift = pixels, labels, shift
        self.mean, self.std = 255 * setting.mean, 255 * setting.std
        if shift:
            self.pixels = pad(pixels, (0, 0, shift, shift, shift, shift))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, at: list[int]) -> tuple[Tensor, Tensor]:
        x = self.pixels[at]
        if self.shift is not None:
            side = x.shape[1] - 2 * self.shift
            top, left = torch.randint(0, 2 * self.shift + 1, (2, len(at)))
            x = x.unfold(1, side, 1).unfold(2, side, 1)[torch.arange(len(at)), top, left].permute(0, 2, 3, 1)
            x = torch.where(torch.rand(len(at), 1, 1, 1) < 0.5, x.flip(2), x)
        x = x.float().sub_(self.mean).div_(self.std)
        return x.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last), self.labels[at]


class WeightedImages(WeightedDataset):
    """Images whose batches end in the weights of their examples."""

    def __getitems__(self, at: list[int]) -> Any:
        return *self.dataset.__getitems__([int(i) for i in at]), torch.tensor([i.weight for i in at])


def as_it_is(batch: Any) -> Any:
    return batch


@cache
def load(data: str, split: str, mode: str) -> tuple[Tensor, Tensor]:
    """Images `(n, h, w, channels)` as bytes, and labels."""
    from datasets import load_dataset

    rows = load_dataset(data, split=split)
    column = next((name for name in ("img", "image") if name in rows.column_names), None)
    if column is None or "label" not in rows.column_names:
        raise SystemExit(f"--data must have columns img (or image) and label, {data} has {rows.column_names}")
    pixels = np.stack([np.atleast_3d(np.asarray(image.convert(mode))) for image in rows[column]])
    return torch.from_numpy(pixels), torch.tensor(rows["label"][:])


def data_of(job: Row, args: argparse.Namespace, setting: ImageSetting) -> tuple[Tensor, Tensor, Images]:
    """Images and labels to train on, and images to score on: of the test split, or training images set aside."""
    pixels, labels = load(args.data, "train", setting.mode)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1000 + job["seed"]))
    set_aside = order[-min(setting.n_validation, len(order) // 2) :] if job["on"] == "validation" else order[:0]
    chosen = order[: min(setting.n or len(order), len(order) - len(set_aside))]
    held_out = (pixels[set_aside], labels[set_aside]) if len(set_aside) else load(args.data, "test", setting.mode)
    return pixels[chosen], labels[chosen], Images(*held_out, setting)


def train(name: str, job: Row, args: argparse.Namespace, setting: ImageSetting, contestant: Contestant) -> Row:
    """One run: accuracy, seconds without the final test, selection's share of them, share of clean labels and of
    different examples that an epoch shows."""
    torch.set_num_threads(args.threads)
    seed, device = job["seed"], args.device
    rank, world = (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)
    pixels, labels, held_out = data_of(job, args, setting)
    noisy = inject_label_noise(labels, job["noise"], seed=seed)
    train_set: Dataset = Images(pixels, noisy, setting, shift=setting.shift)
    if contestant.weighting == "loss":
        train_set = WeightedImages(train_set)
    torch.manual_seed(seed)
    model = setting.network().to(device, memory_format=torch.channels_last)
    parallel = nn.parallel.DistributedDataParallel(model) if world > 1 else model
    epochs = max(1, round(job["passes"] / contestant.fraction))
    sampler = sampler_of(contestant, job, setting, train_set, model, labels, noisy, pixels, epochs, args)
    loader = DataLoader(train_set, job["batch_size"] // world, sampler=sampler, drop_last=True, collate_fn=as_it_is)
    if not len(loader):
        raise SystemExit(f"--batch-size {job['batch_size']} is larger than an epoch of {len(sampler)} examples")
    optimizer = torch.optim.SGD(
        model.parameters(), job["lr"], 0.9, nesterov=setting.nesterov, weight_decay=setting.weight_decay
    )
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if device.type == "cuda" else None
    scaler = torch.amp.GradScaler(enabled=dtype is torch.float16)
    checkpoint = Checkpoint(name, job, args, dict(model=model, optimizer=optimizer, scaler=scaler, sampler=sampler))
    begun = dict(epoch=0, clean=0.0, distinct=0.0, shown=0, spent=dict.fromkeys(CLOCKS, 0.0))
    figures = checkpoint.load(begun)
    began = {kind: clock() - figures["spent"][kind] for kind, clock in CLOCKS.items()}
    for epoch in range(figures["epoch"], epochs):
        torch.manual_seed(1_000_003 * seed + 1_009 * epoch + rank)  # so that a resumed run augments as it would have
        sampler.set_epoch(epoch)
        parallel.train()
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            shown = select(sampler, figures, noisy == labels, epochs)  # in the precision of the training
        figures["shown"] += shown
        for batch, (x, y, *weights) in enumerate(loader):
            done = (epoch + (batch + 1) / len(loader)) / epochs
            optimizer.param_groups[0]["lr"] = job["lr"] * setting.decay(done)
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            at = sampler.order[batch * len(y) : (batch + 1) * len(y)] if isinstance(sampler, InfoBatch) else None
            if at is not None:
                weights = [sampler.weights[at]]
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                losses = cross_entropy(parallel(x), y, reduction="none" if weights else "mean")
            if at is not None:
                sampler.observe(at, losses)
            loss = (losses * weights[0].to(device)).mean() if weights else losses
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        figures |= dict(epoch=epoch + 1, spent={kind: clock() - began[kind] for kind, clock in CLOCKS.items()})
        if epoch + 1 < epochs and checkpoint.save(figures):
            print(f"epoch {epoch + 1}/{epochs}, loss {float(loss.detach()):.2f}", file=sys.stderr, flush=True)
    checkpoint.remove()
    found = {name: figures[name] for name in ("clean", "distinct")}
    found["share"] = sampler.stats["seconds"] / figures["spent"]["wall"] if isinstance(sampler, CoresetSampler) else 0.0
    found |= {"passes_shown": figures["shown"] / len(labels), "epochs": epochs}
    found |= found_labels(sampler, noisy != labels) if isinstance(sampler, CoresetSampler) else {}
    return {"accuracy": accuracy(model, held_out, device), **figures["spent"], **found}


def sampler_of(
    contestant: Contestant,
    job: Row,
    setting: ImageSetting,
    train_set: Dataset,
    model: nn.Module,
    labels: Tensor,
    noisy: Tensor,
    pixels: Tensor,
    epochs: int,
    args: argparse.Namespace,
) -> CoresetSampler | InfoBatch:
    """What chooses: the peer's rule, or our sampler with the contestant's strategy after the warm-up."""
    if job["strategy"] == "infobatch":
        return InfoBatch(len(labels), epochs, seed=job["seed"])
    told = [(noisy != labels).nonzero().flatten()] * contestant.knows
    strategy = contestant.strategy(*told, **({"selections": epochs} if contestant.counts else {}))
    warm_up = 0 if getattr(strategy, "observes", False) else round(setting.warm_up * epochs)
    return DistributedCoresetSampler(
        train_set, model, fraction=contestant.fraction, seed=job["seed"], scoring_batch_size=500,
        strategy=strategies.WarmUp(strategy, selections=warm_up) if warm_up else strategy,
        weighting=contestant.weighting, reselect_every=contestant.reselect_every,
        selection_dataset=Images(pixels, noisy, setting),  # where they are not mirrored or moved
        labels=noisy, collate_fn=as_it_is, progress=args.jobs == 1, watch=contestant.watch,
    )  # fmt: skip


def select(sampler: CoresetSampler | InfoBatch, figures: Row, right: Tensor, epochs: int) -> int:
    """Chooses for the epoch; adds to the figures what share of it is right, and is shown once. How many it shows."""
    if isinstance(sampler, InfoBatch):
        figures["clean"] += float(right[sampler.order].double().mean()) / epochs
        figures["distinct"] += 1 / epochs
        return len(sampler)
    coreset = sampler.select_if_due()
    shown = torch.ones_like(coreset.weights) if sampler.weighting == "none" else coreset.weights
    figures["clean"] += float((shown * right[coreset.indices]).sum() / shown.sum()) / epochs
    figures["distinct"] += sampler.stats["distinct"] / epochs
    return sampler.size


@torch.no_grad()
def accuracy(model: nn.Module, images: Images, device: torch.device) -> float:
    model.eval()
    right = 0
    for at in torch.arange(len(images)).split(500):
        x, y = images.__getitems__(at)
        right += int((model(x.to(device)).argmax(1).cpu() == y).sum())
    return right / len(images)


def more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bf16", action="store_true", help="bfloat16 autocast, for CPUs that have it")
    parser.add_argument(
        "--save-every", type=float, default=60, help="seconds between checkpoints (default: %(default)s)"
    )
