"""CIFAR-10 with wrong labels: 10 % of the data an epoch, chosen by uniform, CREST or stable sampling, or all of it.

    python recipes/cifar10.py run --data DIR --strategy stable --noise 0.5            # ResNet-20, the paper's schedule
    torchrun --nproc-per-node 4 recipes/cifar10.py run --data DIR --strategy stable   # the same on four GPUs
    python recipes/cifar10.py tune --data DIR --setting cpu     # every contestant, the same trials, on validation data
    python recipes/cifar10.py table --data DIR --setting cpu    # the tuned contestants on the test set, n = 3
    python recipes/cifar10.py time --data DIR --setting cpu     # accuracy against wall time, as ratios and a picture

DIR is a folder or a hub id (uoft-cs/cifar10) that `datasets.load_dataset` opens. A share of the training labels is replaced
by another class at random, once; validation (5,000 images cut from the training set) and test labels stay clean. The
contestants differ in the sampler alone; `doubting` is stable with `doubt=2`, which leaves out labels that the draws find
wrong. Results are kept in --results, line by line, and a run in progress in a checkpoint beside it: what is killed goes on
where it was.

Measured so far: the CPU setting, one seed, validation accuracy (`tune`, rate 0.05, batch 32, 40,000 examples trained on, of
20,000; ± 0.007 for 5,000 images alone). One thread of a machine that others used, CPU seconds:

    noise   uniform   CREST    stable   full     seconds: uniform, CREST, stable   selection (stable)   clean labels (stable)
    0       0.592     0.565    0.567    0.585    15, 21, 22                        26 %                 1.00
    0.3     0.521     0.523    0.527    0.514    18, 21, 22                        22 %                 0.77, of 0.70
    0.5     0.461     0.468    0.470    0.463    17, 21, 22                        25 %                 0.56, of 0.50

So on clean data both coresets are 2.5 points behind uniform sampling, and with half of the labels wrong less than a point
ahead, within what one seed can tell. Full data sees as many examples here as the others. Neither the table (n = 3, on
the test set) nor the paper's setting nor time to accuracy has been measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import DataLoader, Dataset

from coreset_sampler import Coreset, DistributedCoresetSampler, SphericalGaussian, strategies
from coreset_sampler.picture import time_to_accuracy
from coreset_sampler.types import View

FRACTION, N_VALIDATION = 0.1, 5_000
MEAN, STD = 0.473, 0.251  # of all channels: one number each is twice as fast as three
STRATEGIES = ("uniform", "crest", "stable", "doubting", "full")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
Trial = tuple[float, int]  # learning rate, batch size


@dataclass(frozen=True)
class Setting:
    """What `--setting` chooses."""

    network: Callable[[], nn.Module]
    n: int | None  # training examples, or all
    passes: float  # over the training examples; ten epochs of a tenth are one
    full_passes: float
    weight_decay: float
    decay: Callable[[float], float]  # of the learning rate, over the share of the run that is done
    shift: int  # pixels an image is moved by at most
    pools: dict[str, int]
    posterior: SphericalGaussian
    warm_up: int  # epochs of uniform sampling: at its random start a network has nothing to say about the examples
    noises: tuple[float, ...]
    lengths: tuple[float, ...]  # passes that `time` tries
    tune_passes: float
    trials: tuple[
        Trial, ...
    ]  # that `tune` gives to every contestant; the first is for those that `tuned` does not name
    tuned: dict[tuple[float, str], Trial]


class Block(nn.Module):
    """Two convolutions and a way around them, without parameters (He et al. 2016, option A)."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.stride, self.more = width // inputs, width - inputs
        self.conv1 = nn.Conv2d(inputs, width, 3, self.stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """`(b, inputs, h, w)` to `(b, width, h / stride, w / stride)`."""
        around = pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.more // 2, self.more - self.more // 2))
        return torch.relu(around + self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x))))))


def resnet20() -> nn.Module:
    """272,474 parameters."""
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    widths = [16] * 4 + [32] * 3 + [64] * 3
    blocks = [Block(before, width) for before, width in pairwise(widths)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def small() -> nn.Module:
    """Three convolutions with BatchNorm that shrink the image early: about 3,000 training images a second on one core."""
    layers: list[nn.Module] = [nn.Conv2d(3, 24, 4, 2, 1, bias=False), nn.BatchNorm2d(24), nn.ReLU(inplace=True)]
    for inputs, width in ((24, 48), (48, 96)):
        layers += [nn.MaxPool2d(2), nn.Conv2d(inputs, width, 3, padding=1, bias=False)]
        layers += [nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10))


def steps_down(done: float) -> float:
    """A tenth of the run to warm up, a tenth of the rate from the middle on and a hundredth from three quarters on."""
    return min(1.0, done / 0.1) * (1.0 if done < 0.5 else 0.1 if done < 0.75 else 0.01)


def cosine(done: float) -> float:
    """A tenth of the run to warm up, then down to zero along a cosine."""
    return min(1.0, done / 0.1) * (1 + math.cos(math.pi * done)) / 2


SETTINGS = {
    "paper": Setting(
        network=resnet20, n=None, passes=20, full_passes=200, weight_decay=1e-4, decay=steps_down, shift=4,
        pools=dict(pool_size=500, keep=128), posterior=SphericalGaussian(0.1, "norm"), warm_up=0,
        noises=(0.0, 0.1, 0.3, 0.5, 0.8), lengths=(5, 10, 20), tune_passes=20, trials=((0.1, 128),), tuned={},
    ),
    "cpu": Setting(
        network=small, n=20_000, passes=2, full_passes=4, weight_decay=5e-4, decay=cosine, shift=2,
        pools=dict(pool_size=100, keep=20, reuse=9), posterior=SphericalGaussian(0.1, "norm", redraw=1), warm_up=4,
        noises=(0.0, 0.3, 0.5), lengths=(1, 2, 4), tune_passes=2, trials=((0.05, 32), (0.05, 16)),
        tuned={},
    ),
}  # fmt: skip


class Images(Dataset):
    """Images `(n, h, w, 3)` in memory as bytes; a batch is fetched, moved about, mirrored and normalised in one go."""

    def __init__(self, pixels: Tensor, labels: Tensor, *, shift: int | None = None) -> None:
        self.pixels, self.labels, self.shift = pixels, labels, shift
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
        x = x.float().sub_(255 * MEAN).div_(255 * STD)
        return x.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last), self.labels[at]


def load(data: str, split: str) -> tuple[Tensor, Tensor]:
    """Images `(n, h, w, 3)` as bytes, and labels."""
    from datasets import load_dataset

    rows = load_dataset(data, split=split)
    column = next((name for name in ("img", "image") if name in rows.column_names), None)
    if column is None or "label" not in rows.column_names:
        raise SystemExit(f"--data must have columns img (or image) and label, {data} has {rows.column_names}")
    pixels = np.stack([np.asarray(image.convert("RGB")) for image in rows[column]])
    return torch.from_numpy(pixels), torch.tensor(rows["label"][:])


def with_wrong_labels(labels: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    """Symmetric noise: `floor(noise * n)` labels replaced, uniformly among the other classes."""
    labels, classes = labels.clone(), int(labels.max()) + 1
    chosen = torch.randperm(len(labels), generator=generator)[: int(noise * len(labels))]
    labels[chosen] = (labels[chosen] + torch.randint(1, classes, (len(chosen),), generator=generator)) % classes
    return labels


def sampler_of(name: str, setting: Setting, train_set: Images, plain: Images, model: nn.Module, seed: int):
    """In one process or many; candidates are looked at in `plain`, where they are not mirrored or moved."""
    chosen = {
        "uniform": strategies.uniform(),
        "full": strategies.uniform(),
        "crest": strategies.crest(**setting.pools),
        "stable": strategies.stable(posterior=setting.posterior, draws=4, **setting.pools),
        "doubting": strategies.stable(posterior=setting.posterior, draws=4, doubt=2, **setting.pools),
    }[name]

    def strategy(view: View, size: int, generator: torch.Generator) -> Coreset:
        epoch = int(view.memory.get("epoch", torch.zeros(())))
        view.memory["epoch"] = torch.tensor(epoch + 1)
        return (chosen if epoch >= setting.warm_up else strategies.uniform())(view, size, generator)

    return DistributedCoresetSampler(
        train_set, model, fraction=1.0 if name == "full" else FRACTION, strategy=strategy, seed=seed,
        selection_set=plain, labels=train_set.labels, collate_fn=as_it_is, batch_size=500,
    )  # fmt: skip


def as_it_is(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch


def train(data: dict, job: dict, device: torch.device, checkpoint: Path, save_every: float) -> dict[str, float]:
    """One run: accuracy, wall seconds without the final test, selection's share of them, share of clean labels seen."""
    setting, seed, (lr, batch_size, passes) = SETTINGS[job["setting"]], job["seed"], job["trial"]
    rank, world = (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)
    pixels, labels = data["train"]
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1000 + seed))
    set_aside = order[-min(N_VALIDATION, len(order) // 5) :] if job["on"] == "validation" else order[:0]
    chosen = order[: min(setting.n or len(order), len(order) - len(set_aside))]
    held_out = (pixels[set_aside], labels[set_aside]) if job["on"] == "validation" else data["test"]
    pixels, labels = pixels[chosen], labels[chosen]
    noisy = with_wrong_labels(labels, job["noise"], torch.Generator().manual_seed(seed))
    train_set = Images(pixels, noisy, shift=setting.shift)
    torch.manual_seed(seed)
    model = setting.network().to(device, memory_format=torch.channels_last)
    parallel = nn.parallel.DistributedDataParallel(model) if world > 1 else model
    sampler = sampler_of(job["strategy"], setting, train_set, Images(pixels, noisy), model, seed)
    loader = DataLoader(train_set, batch_size // world, sampler=sampler, drop_last=True, collate_fn=as_it_is)
    epochs = max(1, round(passes * len(noisy) / sampler.size))
    steps = epochs * len(loader)
    if not steps:
        raise SystemExit(f"--batch-size {batch_size} is larger than an epoch of {sampler.size} examples")
    optimizer = torch.optim.SGD(
        model.parameters(), lr=lr, momentum=0.9, nesterov=True, weight_decay=setting.weight_decay
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: setting.decay((step + 1) / steps))
    scaler = torch.amp.GradScaler(enabled=device.type == "cuda")
    parts = dict(model=model, optimizer=optimizer, schedule=schedule, scaler=scaler, sampler=sampler)
    first, clean, spent = 0, 0.0, {"wall": 0.0, "cpu": 0.0}
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True, map_location="cpu")
        first, clean, spent = saved["epoch"], saved["clean"], saved["spent"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    began = {kind: clock() - spent[kind] for kind, clock in CLOCKS.items()}
    last_saved = time.perf_counter()
    for epoch in range(first, epochs):
        torch.manual_seed(1_000_003 * seed + 1_009 * epoch + rank)  # so that a resumed run augments as it would have
        sampler.set_epoch(epoch)
        parallel.train()
        with torch.autocast(device.type, enabled=device.type == "cuda"):
            coreset = sampler.select_if_due()  # in the precision of the training
        clean += float((coreset.weights * (noisy == labels)[coreset.indices]).sum() / coreset.weights.sum()) / epochs
        for x, y in loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            with torch.autocast(device.type, enabled=device.type == "cuda"):
                loss = cross_entropy(parallel(x), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
        spent = {kind: clock() - began[kind] for kind, clock in CLOCKS.items()}
        if rank == 0 and time.perf_counter() - last_saved >= save_every and epoch + 1 < epochs:
            state = {name: part.state_dict() for name, part in parts.items()}
            state |= dict(epoch=epoch + 1, spent=spent, clean=clean)
            torch.save(state, checkpoint.with_suffix(".new"))
            os.replace(checkpoint.with_suffix(".new"), checkpoint)
            last_saved = time.perf_counter()
        if rank == 0:
            print(
                f"\repoch {epoch + 1}/{epochs}, loss {float(loss.detach()):.2f}   ", end="", file=sys.stderr, flush=True
            )
    return {
        "accuracy": accuracy(model, Images(*held_out), device),
        **spent,
        "share": sampler.stats["seconds"] / spent["wall"],
        "clean": clean,
    }


@torch.no_grad()
def accuracy(model: nn.Module, images: Images, device: torch.device) -> float:
    model.eval()
    right = 0
    for at in torch.arange(len(images)).split(500):
        x, y = images.__getitems__(at)
        right += int((model(x.to(device)).argmax(1).cpu() == y).sum())
    return right / len(images)


KEYS = ("setting", "on", "noise", "strategy", "trial", "seed")


def run_all(jobs: list[dict], args: argparse.Namespace) -> list[dict]:
    """All jobs, those in the log already taken from there; each new result is written down at once."""
    key = lambda row: json.dumps({k: row[k] for k in KEYS})  # noqa: E731
    rows = [json.loads(line) for line in args.log.read_text().splitlines()] if args.log.exists() else []
    done = {key(row): row for row in rows}
    todo = list({key(job): job for job in jobs if key(job) not in done}.values())
    data = {split: load(args.data, split) for split in ("train", "test")} if todo else {}
    first = not distributed.is_initialized() or distributed.get_rank() == 0
    began = time.perf_counter()
    for count, job in enumerate(todo, 1):
        name = "-".join(str(job[k]) for k in KEYS if k != "trial") + "-" + "-".join(f"{v:g}" for v in job["trial"])
        checkpoint = args.log.parent / f"cifar10-{name}.pt"
        row = {**job, **train(data, job, args.device, checkpoint, args.save_every)}
        done[key(row)] = row
        if first:
            with args.log.open("a") as out:
                print(json.dumps(row), file=out)
            checkpoint.unlink(missing_ok=True)
            left = (time.perf_counter() - began) / count * (len(todo) - count) / 60
            print(f"\r{count}/{len(todo)} runs, {left:.0f} min left; {name}: {row['accuracy']:.4f}", file=sys.stderr)
    return [done[key(job)] for job in jobs]


def jobs_of(args: argparse.Namespace) -> list[dict]:
    setting = SETTINGS[args.setting]
    noises = setting.noises if args.noise is None else args.noise
    names = args.strategy or STRATEGIES

    def trial(noise: float, name: str, passes: float | None = None) -> tuple[float, int, float]:
        lr, batch = setting.tuned.get((noise, name), setting.trials[0])
        passes = passes or args.passes or (setting.full_passes if name == "full" else setting.passes)
        return args.lr or lr, args.batch_size or batch, float(passes)

    if args.command == "tune":
        cells = [(o, n, (*trial, setting.tune_passes), 100) for trial in setting.trials for o in noises for n in names]
    elif args.command == "table":
        cells = [(o, n, trial(o, n), seed) for seed in range(args.seeds) for o in noises for n in names]
    elif args.command == "time":
        noises, names = args.noise or [0.0], args.strategy or ("full", "uniform", "stable")
        trials = [(o, n, trial(o, n, passes)) for o in noises for n in names for passes in setting.lengths]
        cells = [(*cell, seed) for seed in range(args.seeds) for cell in trials]
    else:
        noises, names = args.noise or [0.0], args.strategy or ["stable"]
        cells = [(o, n, trial(o, n), args.seed) for o in noises for n in names]
    on = "validation" if args.command == "tune" or args.validation else "test"
    return [
        dict(setting=args.setting, on=on, noise=noise, strategy=name, trial=list(trial), seed=seed)
        for noise, name, trial, seed in cells
    ]


def spread(values: list[float]) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3f} ± {deviation:.3f}"


def report(rows: list[dict], args: argparse.Namespace) -> None:
    cells: dict[tuple, list[dict]] = {}
    for row in rows:
        cells.setdefault((row["noise"], row["strategy"]), []).append(row)
    if args.command == "run":
        for row in rows:
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
    elif args.command == "tune":
        for cell, found in cells.items():
            best = max(found, key=lambda row: row["accuracy"])
            print(f"    {cell}: {tuple(best['trial'][:2])},  # validation {best['accuracy']:.4f}")
    elif args.command == "table":
        print(
            "| noise | strategy | lr, batch, passes | accuracy | seconds | selection | clean labels |\n"
            + "|---" * 7
            + "|"
        )
        for (noise, name), found in cells.items():
            trial = ", ".join(f"{value:g}" for value in found[0]["trial"])
            mean = {key: statistics.mean(row[key] for row in found) for key in (args.clock, "share", "clean")}
            score = spread([row["accuracy"] for row in found])
            costs = f"{mean[args.clock]:.0f} | {mean['share']:.0%} | {mean['clean']:.2f}"
            print(f"| {noise} | {name} | {trial} | {score} | {costs} |")
        print(f"\nn = {len(found)} seeds, mean ± standard deviation")
    else:
        for noise in dict.fromkeys(row["noise"] for row in rows):
            report_time({name: found for (n, name), found in cells.items() if n == noise}, noise, args)


def report_time(found: dict[str, list[dict]], noise: float, args: argparse.Namespace) -> None:
    """Each point is a whole run with its learning rate gone down to zero: what can be had in that time."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for name, rows in found.items():
        curves[name] = []
        for passes in sorted({row["trial"][2] for row in rows}):
            some = [row for row in rows if row["trial"][2] == passes]
            seconds, scores = statistics.mean(row[args.clock] for row in some), [row["accuracy"] for row in some]
            curves[name].append((seconds, statistics.mean(scores)))
            print(f"noise {noise}, {name}, {passes:g} passes: {seconds:.0f} s, {spread(scores)}")
    if "full" in curves:
        picture = args.picture.with_stem(f"{args.picture.stem}-{noise:g}")
        print(*time_to_accuracy(curves, picture, title=f"CIFAR-10, {noise:.0%} of the labels wrong"), sep="\n")
        print(f"n = {args.seeds} seeds, {args.clock} seconds; picture: {picture}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "tune", "table", "time"])
    parser.add_argument("--data", required=True, help="folder or hub id of CIFAR-10 for datasets.load_dataset")
    parser.add_argument("--setting", choices=SETTINGS, default="paper", help="default: %(default)s")
    parser.add_argument("--strategy", choices=STRATEGIES, nargs="+", help="default: stable for run, all for the others")
    parser.add_argument(
        "--noise", type=float, nargs="+", help="shares of wrong labels (default: the setting's; 0 for run)"
    )
    parser.add_argument("--lr", type=float, help="default: as tuned, or as the setting says")
    parser.add_argument("--batch-size", type=int, help="of all processes together; default: as tuned")
    parser.add_argument(
        "--passes", type=float, help="over the training examples; 10 epochs of a tenth are one. As tuned"
    )
    parser.add_argument("--seed", type=int, default=0, help="for run")
    parser.add_argument("--seeds", type=int, default=3, help="for table and time (default: %(default)s)")
    parser.add_argument(
        "--validation", action="store_true", help="score on 5,000 training images set aside, not on test"
    )
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="of table and time; cpu where others use the machine"
    )
    parser.add_argument("--threads", type=int, default=1, help="of the CPU (default: %(default)s)")
    parser.add_argument(
        "--save-every", type=float, default=60, help="seconds between checkpoints (default: %(default)s)"
    )
    parser.add_argument(
        "--results", dest="log", type=Path, default=Path("runs/cifar10.jsonl"), help="results (default: %(default)s)"
    )
    parser.add_argument(
        "--picture", type=Path, default=Path("runs/cifar10_time.png"), help="of time (default: %(default)s)"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.device = torch.device("cpu")
    if torch.cuda.is_available():
        args.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(args.device)
    if "RANK" in os.environ:  # started by torchrun
        distributed.init_process_group("nccl" if args.device.type == "cuda" else "gloo")
    args.log.parent.mkdir(parents=True, exist_ok=True)
    try:
        rows = run_all(jobs_of(args), args)
        if int(os.environ.get("RANK", 0)) == 0:
            report(rows, args)
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


if __name__ == "__main__":
    main()
