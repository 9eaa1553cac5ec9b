"""ImageNet, or any folder of images, and any timm model: a tenth of the data an epoch, chosen by stable sampling.

    torchrun --nproc-per-node 8 recipes/imagenet.py --data ILSVRC/imagenet-1k --model resnet50 --epochs 300 --batch-size 1024
    python recipes/imagenet.py --data DIR --model resnet18 --img-size 64 --strategy uniform stable --noise 0 0.3 --seeds 3

--data is a folder with train/ and val/ (one folder a class in each), or a folder or hub id that `datasets.load_dataset`
opens. Images are augmented as timm does it and looked at for selection without augmentation, as at test time. An
epoch is a tenth of the data (--fraction). The accuracy is that of the exponential moving average of the weights.
Several strategies, shares of wrong labels or seeds are run one after the other and make a table; each result is a line of
--output/results.jsonl. Weights and all else are in a file there after each epoch: a run that is killed goes on with exactly
the batches that were to come when it is started again with the same line, and what is done is not done again.

Measured on Tiny-ImageNet, EfficientNet-Lite0 fine-tuned at 64 pixels for 8 epochs of a tenth, by the line in
recipes/README.md (10,000 test images, n = 3, mean ± standard deviation; one thread beside another, CPU seconds):

    noise   uniform         stable          seconds     selection (stable)
    0       0.243 ± 0.006   0.239 ± 0.007   123, 206    40 %
    0.3     0.166 ± 0.007   0.173 ± 0.006   124, 203    40 %

So in a run this short there is no gain beyond the spread. In 20 epochs (images set aside, noise 0.3, n = 2) uniform has
0.272 ± 0.006, believed 0.302 ± 0.002. ImageNet itself was not run: it takes GPUs.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
from functools import partial
from pathlib import Path

import numpy as np
import timm
import torch
from timm.data import create_transform, resolve_model_data_config
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader, Dataset, Subset

from coreset_sampler import DistributedCoresetSampler, PointMass, SphericalGaussian, strategies
from coreset_sampler.experiments import CLOCKS, grouped, mean_of, oracle, run_all, spread, with_wrong_labels
from coreset_sampler.types import Strategy

LABEL_SMOOTHING, WARM_UP = 0.1, 0.1  # warm-up of the learning rate: share of the steps
STRATEGIES = ("uniform", "crest", "stable", "believed", "oracle", "full")
DRAWS = 2  # the paper's for ImageNet


class Images(Dataset):
    """Images of a folder or a Hugging Face data set, with labels of one's own."""

    def __init__(self, rows, labels: Tensor, transform) -> None:
        self.rows, self.labels, self.transform = rows, labels, transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        row = self.rows[index]
        image = row["image"] if isinstance(row, dict) else row[0]
        return self.transform(image.convert("RGB")), int(self.labels[index])


def rows_and_labels(data: str, names: tuple[str, ...]):
    """The first split there is of `names`, from a folder of folders or by `datasets.load_dataset`."""
    folder = next((Path(data, name) for name in names if Path(data, name).is_dir()), None)
    if folder is not None:
        from torchvision.datasets import ImageFolder

        rows = ImageFolder(str(folder))
        return rows, torch.tensor(rows.targets)
    from datasets import get_dataset_split_names, load_dataset

    found = get_dataset_split_names(data)
    split = next((name for name in names if name in found), None)
    if split is None:
        raise SystemExit(f"--data {data} has neither a folder nor a split called {' or '.join(names)}; it has {found}")
    rows = load_dataset(data, split=split)
    column = next((name for name in ("image", "img") if name in rows.column_names), None)
    if column is None or "label" not in rows.column_names:
        raise SystemExit(f"--data must have columns image and label, {data} has {rows.column_names}")
    return rows.rename_column(column, "image") if column != "image" else rows, torch.tensor(rows["label"][:])


def model_of(args: argparse.Namespace, classes: int) -> nn.Module:
    """From scratch, from timm's hub, or from a file of weights, whose head is left out where the classes differ."""
    file = {"pretrained_cfg_overlay": dict(file=str(args.weights))} if args.weights else {}
    return timm.create_model(args.model, pretrained=args.pretrained or bool(args.weights), num_classes=classes, **file)


def strategy_of(name: str, args: argparse.Namespace, wrong: Tensor) -> Strategy:
    pools = dict(pool_size=args.pool_size, keep=args.keep, balance="proportional", reuse=args.reuse)
    posterior = SphericalGaussian(args.scale, "norm", redraw=1) if args.scale else PointMass()
    stable = partial(strategies.stable, posterior=posterior, draws=DRAWS if args.scale else 1, **pools)
    chosen = {
        "uniform": strategies.uniform,
        "full": strategies.uniform,
        "crest": partial(strategies.crest, **pools),
        "stable": stable,
        "believed": partial(strategies.believed, reuse=args.reuse, balance="proportional"),
        "oracle": partial(oracle, wrong),
    }[name]()
    return strategies.warm_up(chosen, selections=args.warm_up)


def seed_everything(*numbers: int) -> None:
    """So that an epoch augments in the same way whether the run was resumed before it or not."""
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  # timm's augmentations draw from it
    torch.manual_seed(seed)


@torch.no_grad()
def accuracy(model: nn.Module, data: Images, args: argparse.Namespace) -> float:
    """Each process counts its share."""
    share = list(range(args.rank, len(data), args.world))
    loader = DataLoader(data, args.eval_batch_size, sampler=share, num_workers=args.workers)
    model.eval()
    right = torch.zeros((), device=args.device)
    for x, y in loader:
        with torch.autocast(args.device.type, enabled=args.amp):
            right += (model(x.to(args.device)).argmax(1) == y.to(args.device)).sum()
    if args.world > 1:
        distributed.all_reduce(right)
    return float(right) / len(data)


def train(job: dict, args: argparse.Namespace) -> dict[str, float]:
    """The whole run: accuracy, seconds without tests, selection's share of them, share of clean labels at the end."""
    rows, clean = rows_and_labels(args.data, ("train",))
    classes = int(clean.max()) + 1
    order = torch.randperm(len(clean), generator=torch.Generator().manual_seed(job["seed"]))
    chosen, held_out = order[len(order) // 10 :].sort().values, order[: len(order) // 10].sort().values
    if args.validation:
        test_rows, test_labels = Subset(rows, held_out.tolist()), clean[held_out]
        rows, clean = Subset(rows, chosen.tolist()), clean[chosen]
    else:
        test_rows, test_labels = rows_and_labels(args.data, ("val", "validation", "valid", "test"))
    labels = with_wrong_labels(clean, job["noise"], seed=job["seed"], classes=classes)
    seed_everything(job["seed"])
    model = model_of(args, classes).to(args.device, memory_format=torch.channels_last)
    config = resolve_model_data_config(model)
    size = (3, args.img_size, args.img_size) if args.img_size else config["input_size"]
    shared = dict(input_size=size, mean=config["mean"], std=config["std"], interpolation=config["interpolation"])
    augmented = create_transform(
        **shared, is_training=True, auto_augment=args.auto_augment, scale=(args.min_scale, 1.0)
    )
    plain = create_transform(**shared, crop_pct=1.0 if args.img_size else config["crop_pct"])
    train_set, test_set = Images(rows, labels, augmented), Images(test_rows, test_labels, plain)
    parallel = nn.parallel.DistributedDataParallel(model) if args.world > 1 else model
    sampler = DistributedCoresetSampler(
        train_set, model, fraction=1.0 if job["strategy"] == "full" else args.fraction, seed=job["seed"],
        strategy=strategy_of(job["strategy"], args, wrong=(labels != clean).nonzero().flatten()),
        selection_set=Images(rows, labels, plain), labels=labels, batch_size=args.eval_batch_size, num_workers=args.workers,
        progress=not args.quiet,
    )  # fmt: skip
    loader = DataLoader(
        train_set, args.batch_size // args.world, sampler=sampler, num_workers=args.workers, drop_last=True,
        pin_memory=args.device.type == "cuda",
    )  # fmt: skip
    epochs = max(1, round(args.epochs * args.fraction)) if job["strategy"] == "full" else args.epochs
    steps = epochs * len(loader)
    if not steps:
        raise SystemExit(f"--batch-size {args.batch_size} is larger than an epoch of {len(sampler)} examples")
    optimizer = create_optimizer_v2(model, args.opt, args.lr, weight_decay=args.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: min(1, (k + 1) / (WARM_UP * steps)) * (1 + math.cos(math.pi * k / steps)) / 2
    )
    scaler = torch.amp.GradScaler(enabled=args.amp)
    average = ModelEmaV3(model, decay=args.ema, use_warmup=True)
    parts = dict(model=model, average=average, optimizer=optimizer, schedule=schedule, scaler=scaler, sampler=sampler)
    first, step, spent = 0, 0, dict.fromkeys(CLOCKS, 0.0)
    file = args.output / f"{job['strategy']}-noise{job['noise']:g}-seed{job['seed']}.pt"
    if file.exists():
        saved = torch.load(file, map_location="cpu", weights_only=True)
        if saved["job"] != job:
            raise SystemExit(f"{file} is of another run: {saved['job']}. Pass another --output, or remove it.")
        first, step, spent = saved["epoch"], saved["step"], saved["spent"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    began = {kind: clock() - spent[kind] for kind, clock in CLOCKS.items()}
    for epoch in range(first, epochs):
        seed_everything(job["seed"], epoch, args.rank)
        sampler.set_epoch(epoch)
        parallel.train()
        with torch.autocast(args.device.type, enabled=args.amp):
            sampler.select_if_due()
        for x, y in loader:
            x = x.to(args.device, memory_format=torch.channels_last, non_blocking=True)
            with torch.autocast(args.device.type, enabled=args.amp):
                logits = parallel(x)
                loss = nn.functional.cross_entropy(logits, y.to(args.device), label_smoothing=LABEL_SMOOTHING)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            step += 1
            average.update(model, step=step)
        spent = {kind: clock() - began[kind] for kind, clock in CLOCKS.items()}
        if args.rank == 0:
            if not args.quiet:
                said = f"epoch {epoch + 1}/{epochs}: loss {float(loss.detach()):.3f}, {spent['wall']:.0f} s"
                print(said, file=sys.stderr, flush=True)
            state = {name: part.state_dict() for name, part in parts.items()}
            state |= dict(epoch=epoch + 1, step=step, spent=spent, job=job)
            torch.save(state, file.with_suffix(".new"))
            os.replace(file.with_suffix(".new"), file)
    coreset = sampler.coreset
    return {
        "accuracy": accuracy(average.module, test_set, args),
        **spent,
        "share": sampler.stats["seconds"] / spent["wall"],
        "clean": float((coreset.weights * (labels == clean)[coreset.indices]).sum() / coreset.weights.sum()),
    }


def jobs_of(args: argparse.Namespace) -> list[dict]:
    """Strategy, noise, seed, and what else makes a run the same run."""
    names = ("data", "model", "fraction", "epochs", "batch_size", "opt", "lr", "img_size", "validation")
    names += ("pool_size", "keep", "reuse", "warm_up", "scale")
    shared = {name: getattr(args, name) for name in names}
    return [
        dict(strategy=strategy, noise=noise, seed=args.seed + k, **shared)
        for k in range(args.seeds) for noise in args.noise for strategy in args.strategy
    ]  # fmt: skip


def report(rows: list[dict], args: argparse.Namespace) -> None:
    print("| noise | strategy | accuracy | seconds | selection | clean labels |\n" + "|---" * 6 + "|")
    for (noise, name), found in grouped(rows, "noise", "strategy").items():
        costs = f"{mean_of(found, args.clock):.0f} | {mean_of(found, 'share'):.0%} | {mean_of(found, 'clean'):.2f}"
        print(f"| {noise:g} | {name} | {spread([row['accuracy'] for row in found])} | {costs} |")
    print(f"\nn = {len(found)} seeds, mean ± standard deviation; {args.clock} seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", required=True, help="folder with train/ and val/, or folder or hub id for datasets.load_dataset")
    add("--model", default="resnet50", help="of timm.list_models() (default: %(default)s)")
    add("--pretrained", action="store_true", help="start from timm's weights")
    add("--weights", type=Path, help="start from this file of timm's weights (.safetensors)")
    add("--strategy", choices=STRATEGIES, nargs="+", default=["stable"], help="one or more (default: stable)")
    add("--fraction", type=float, default=0.1, help="of the data an epoch (default: %(default)s)")
    add("--noise", type=float, nargs="+", default=[0.0], help="shares of labels replaced by wrong ones (default: 0)")
    add("--epochs", type=int, default=300, help="of that fraction; full sees as many examples (default: %(default)s)")
    add("--batch-size", type=int, default=256, help="of all processes together (default: %(default)s)")
    add(
        "--opt",
        default="sgd",
        help="of timm.optim.list_optimizers(), such as adamw to fine-tune (default: %(default)s)",
    )
    add("--lr", type=float, default=0.1, help="for that batch size (default: %(default)s)")
    add("--weight-decay", type=float, default=5e-5, help="default: %(default)s")
    add("--img-size", type=int, help="side of an image; default: the model's")
    add("--auto-augment", help="timm's policy, such as rand-m9-mstd0.5-inc1; default: crops, mirroring and colour")
    add("--min-scale", type=float, default=0.35, help="smallest crop, as a share of the area (default: %(default)s)")
    add("--ema", type=float, default=0.999, help="decay of the average of the weights (default: %(default)s)")
    add("--scale", type=float, default=0.1, help="of the noise in norm layers, 0 for none (default: %(default)s)")
    add("--pool-size", type=int, default=500, help="candidates of a pool (default: %(default)s)")
    add("--keep", type=int, default=128, help="of which so many stay (default: %(default)s)")
    add("--reuse", type=int, default=5, help="selections that one look at the candidates serves (default: %(default)s)")
    add("--warm-up", type=int, default=5, help="epochs of uniform sampling to begin with (default: %(default)s)")
    add("--validation", action="store_true", help="score on a tenth of the training images, set aside, not on test")
    add("--eval-batch-size", type=int, default=256, help="for test and selection (default: %(default)s)")
    add("--workers", type=int, default=4, help="that load images (default: %(default)s)")
    add("--threads", type=int, help="of the CPU")
    add("--seed", type=int, default=0, help="the first one (default: %(default)s)")
    add("--seeds", type=int, default=1, help="how many (default: %(default)s)")
    add("--clock", choices=CLOCKS, default="wall", help="to report; cpu where others use the machine")
    add("--output", type=Path, default=Path("runs/imagenet"), help="checkpoints and results (default: %(default)s)")
    add("--quiet", action="store_true", help="no progress")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    args.output.mkdir(parents=True, exist_ok=True)
    args.device, args.amp, args.rank, args.world = torch.device("cpu"), torch.cuda.is_available(), 0, 1
    if torch.cuda.is_available():
        args.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(args.device)
    if "RANK" in os.environ:  # started by torchrun
        distributed.init_process_group("nccl" if args.device.type == "cuda" else "gloo")
        args.rank, args.world = distributed.get_rank(), distributed.get_world_size()
    try:
        rows = run_all(jobs_of(args), partial(train, args=args), args.output / "results.jsonl")
        if args.rank == 0:
            report(rows, args)
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


if __name__ == "__main__":
    main()
