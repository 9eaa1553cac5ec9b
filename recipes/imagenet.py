"""ImageNet, or any folder of images, and any timm model: a tenth of the data an epoch, chosen by stable sampling.

    torchrun --nproc-per-node 8 recipes/imagenet.py --data ILSVRC/imagenet-1k --model resnet50 --epochs 300 --batch-size 1024
    python recipes/imagenet.py --data DIR --model resnet18 --img-size 64 --strategy stable --noise 0.3

--data is a folder with train/ and val/ (one folder a class in each), or a folder or hub id that `datasets.load_dataset`
opens. Images are augmented as timm does it and looked at for selection without augmentation, as at test time. An
epoch is a tenth of the data (--fraction). The accuracy is that of the exponential moving average of the weights.
Everything is in --output/last.pt after each epoch: a run that is killed goes on with exactly the batches that were to come
when it is started again with the same line, and one that is done only says its result.

Measured: nothing but that it runs, resumes to the same bits, and reads a folder, a Hugging Face data set and a file of
weights. Tiny-ImageNet, uniform against stable, has still to be measured, by the line in recipes/README.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from pathlib import Path

import numpy as np
import timm
import torch
from timm.data import create_transform, resolve_model_data_config
from timm.utils import ModelEmaV3
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader, Dataset

from coreset_sampler import DistributedCoresetSampler, SphericalGaussian, strategies

MOMENTUM, WEIGHT_DECAY, LABEL_SMOOTHING, WARM_UP = 0.9, 5e-5, 0.1, 0.1  # warm-up: share of the steps
DRAWS, SCALE = 2, 0.1  # the paper's two draws for ImageNet; noise in the norm layers, the last of them drawn afresh


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


def with_wrong_labels(labels: Tensor, noise: float, classes: int, seed: int) -> Tensor:
    """Symmetric noise: `floor(noise * n)` labels replaced, uniformly among the other classes."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(labels), generator=generator)[: int(noise * len(labels))]
    offsets = torch.randint(1, classes, (len(chosen),), generator=generator)
    return labels.scatter(0, chosen, (labels[chosen] + offsets) % classes)


def model_of(args: argparse.Namespace, classes: int) -> nn.Module:
    """From scratch, from timm's hub, or from a file of weights, whose head is left out where the classes differ."""
    file = {"pretrained_cfg_overlay": dict(file=str(args.weights))} if args.weights else {}
    return timm.create_model(args.model, pretrained=args.pretrained or bool(args.weights), num_classes=classes, **file)


def strategy_of(args: argparse.Namespace):
    pools = dict(pool_size=args.pool_size, keep=args.keep, balance="proportional", reuse=args.reuse)
    return {
        "uniform": strategies.uniform,
        "full": strategies.uniform,
        "crest": lambda: strategies.crest(**pools),
        "stable": lambda: strategies.stable(posterior=SphericalGaussian(SCALE, "norm", redraw=1), draws=DRAWS, **pools),
    }[args.strategy]()


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


def train(args: argparse.Namespace) -> dict:
    """The whole run: accuracy, seconds without tests, selection's share of them."""
    train_rows, clean = rows_and_labels(args.data, ("train",))
    test_rows, test_labels = rows_and_labels(args.data, ("val", "validation", "valid", "test"))
    classes = int(clean.max()) + 1
    labels = with_wrong_labels(clean, args.noise, classes, args.seed)
    seed_everything(args.seed)
    model = model_of(args, classes).to(args.device, memory_format=torch.channels_last)
    config = resolve_model_data_config(model)
    size = (3, args.img_size, args.img_size) if args.img_size else config["input_size"]
    shared = dict(input_size=size, mean=config["mean"], std=config["std"], interpolation=config["interpolation"])
    augmented = create_transform(
        **shared, is_training=True, auto_augment=args.auto_augment, scale=(args.min_scale, 1.0)
    )
    plain = create_transform(**shared, crop_pct=1.0 if args.img_size else config["crop_pct"])
    train_set, test_set = Images(train_rows, labels, augmented), Images(test_rows, test_labels, plain)
    parallel = nn.parallel.DistributedDataParallel(model) if args.world > 1 else model
    sampler = DistributedCoresetSampler(
        train_set, model, fraction=1.0 if args.strategy == "full" else args.fraction, strategy=strategy_of(args),
        selection_set=Images(train_rows, labels, plain), labels=labels, batch_size=args.eval_batch_size,
        num_workers=args.workers, seed=args.seed, progress=not args.quiet,
    )  # fmt: skip
    loader = DataLoader(
        train_set, args.batch_size // args.world, sampler=sampler, num_workers=args.workers, drop_last=True,
        pin_memory=args.device.type == "cuda",
    )  # fmt: skip
    steps = args.epochs * len(loader)
    if not steps:
        raise SystemExit(f"--batch-size {args.batch_size} is larger than an epoch of {len(sampler)} examples")
    optimizer = torch.optim.SGD(model.parameters(), args.lr, MOMENTUM, weight_decay=WEIGHT_DECAY, nesterov=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: min(1, (k + 1) / (WARM_UP * steps)) * (1 + math.cos(math.pi * k / steps)) / 2
    )
    scaler = torch.amp.GradScaler(enabled=args.amp)
    average = ModelEmaV3(model, decay=args.ema, use_warmup=True)
    parts = dict(model=model, average=average, optimizer=optimizer, schedule=schedule, scaler=scaler, sampler=sampler)
    first, step, spent, last = 0, 0, 0.0, args.output / "last.pt"
    if last.exists():
        saved = torch.load(last, map_location="cpu", weights_only=True)
        if saved["settings"] != settings_of(args):
            raise SystemExit(f"{last} is of another run: {saved['settings']}. Pass another --output, or remove it.")
        first, step, spent = saved["epoch"], saved["step"], saved["seconds"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    for epoch in range(first, args.epochs):
        began = time.perf_counter()
        seed_everything(args.seed, epoch, args.rank)
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
        spent += time.perf_counter() - began
        if args.rank == 0:
            if not args.quiet:
                print(
                    f"epoch {epoch + 1}/{args.epochs}: loss {float(loss):.3f}, {spent:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
            state = {name: part.state_dict() for name, part in parts.items()}
            state |= dict(epoch=epoch + 1, step=step, seconds=spent, settings=settings_of(args))
            torch.save(state, last.with_suffix(".new"))
            os.replace(last.with_suffix(".new"), last)
    stats, coreset = sampler.stats, sampler.coreset
    return {
        "accuracy": accuracy(average.module, test_set, args),
        "seconds": spent,
        "selection": stats["seconds"] / spent if spent else 0.0,
        "clean": float((coreset.weights * (labels == clean)[coreset.indices]).sum() / coreset.weights.sum()),
    }


def settings_of(args: argparse.Namespace) -> dict:
    """What makes a run the same run."""
    names = ("data", "model", "strategy", "noise", "fraction", "epochs", "batch_size", "lr", "img_size", "seed")
    return {name: getattr(args, name) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", required=True, help="folder with train/ and val/, or folder or hub id for datasets.load_dataset")
    add("--model", default="resnet50", help="of timm.list_models() (default: %(default)s)")
    add("--pretrained", action="store_true", help="start from timm's weights")
    add("--weights", type=Path, help="start from this file of timm's weights (.safetensors)")
    add("--strategy", choices=["uniform", "crest", "stable", "full"], default="stable", help="default: %(default)s")
    add("--fraction", type=float, default=0.1, help="of the data an epoch (default: %(default)s)")
    add(
        "--noise",
        type=float,
        default=0.0,
        help="share of training labels replaced by wrong ones (default: %(default)s)",
    )
    add("--epochs", type=int, default=300, help="of that fraction (default: %(default)s)")
    add("--batch-size", type=int, default=256, help="of all processes together (default: %(default)s)")
    add("--lr", type=float, default=0.1, help="for that batch size (default: %(default)s)")
    add("--img-size", type=int, help="side of an image; default: the model's")
    add("--auto-augment", help="timm's policy, such as rand-m9-mstd0.5-inc1; default: crops, mirroring and colour")
    add("--min-scale", type=float, default=0.35, help="smallest crop, as a share of the area (default: %(default)s)")
    add("--ema", type=float, default=0.999, help="decay of the average of the weights (default: %(default)s)")
    add("--pool-size", type=int, default=500, help="candidates of a pool (default: %(default)s)")
    add("--keep", type=int, default=128, help="of which so many stay (default: %(default)s)")
    add("--reuse", type=int, default=5, help="selections that one look at the candidates serves (default: %(default)s)")
    add("--eval-batch-size", type=int, default=256, help="for test and selection (default: %(default)s)")
    add("--workers", type=int, default=4, help="that load images (default: %(default)s)")
    add("--threads", type=int, help="of the CPU")
    add("--seed", type=int, default=0, help="default: %(default)s")
    add("--output", type=Path, default=Path("runs/imagenet"), help="checkpoint and result (default: %(default)s)")
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
        result = {**settings_of(args), **train(args)}
        if args.rank == 0:
            (args.output / "result.json").write_text(json.dumps(result) + "\n")
            print(json.dumps(result))
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


if __name__ == "__main__":
    main()
