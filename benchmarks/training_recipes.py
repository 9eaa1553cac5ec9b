"""How to train on a hundred images: rates, lengths, augmentation, mixing and label sharpness, on held-out training images.

    python benchmarks/training_recipes.py --data DIR --coreset mine.safetensors --results runs/training_recipes.jsonl

What `recipe_for` says was chosen here. Every trial is run for a learned set and for as many random real images, on one small
network of each kind, and measured on 2,000 training images that neither was made of. A trial changes one thing of the first.
Finished runs are lines of --results and are not run again. docs/results.md has the table.
"""

from __future__ import annotations

import argparse
import time
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from harness import Row, grouped, run_all, spread

from coreset_sampler import SyntheticCoreset, evaluate, load_coreset
from coreset_sampler.synthetic.image_data import ImageData, open_images
from coreset_sampler.synthetic.real_images import RealImages

TEST_IMAGES = 2000
NETWORKS = {
    "batch norm": "vgg-batch:16-32-64-64-64",
    "residual, batch norm": "timm:resnet10t",
    "transformer": "timm:vit_tiny_patch16_224+depth=4+embed_dim=96+num_heads=3",
    "instance norm": "convnet:32-64-128",
    "no norm": "alexnet:32-48-64-48-48",
}
FIRST: Row = {"labels": "soft", "optimizer": "adamw", "augmentation": "shift+flip"}
TRIALS: dict[str, Row] = {
    "first": {},
    "lr / 3": {"lr": 1 / 3},
    "lr x 3": {"lr": 3.0},
    "twice the steps": {"steps": 2},
    "scale": {"augmentation": "shift+flip+scale"},
    "cutout": {"augmentation": "shift+flip+cutout"},
    "scale, cutout": {"augmentation": "shift+flip+scale+cutout"},
    "scale, cutout, twice the steps": {"augmentation": "shift+flip+scale+cutout", "steps": 2},
    "mixup": {"mixing": 0.4},
    "cutmix": {"cutmix": 1.0},
    "cutmix, twice the steps": {"cutmix": 1.0, "steps": 2},
    "cutmix, four times the steps": {"cutmix": 1.0, "steps": 4},
    "cutmix, scale, four times": {"cutmix": 1.0, "steps": 4, "augmentation": "shift+flip+scale"},
    "muon": {"optimizer": "muon"},
    "muon, lr / 3": {"optimizer": "muon", "lr": 1 / 3},
    "muon, three times the steps": {"optimizer": "muon", "steps": 3},
    "own": {"labels": "own"},
}
"""What each changes; `lr` and `steps` are factors of what `recipe_for` said before."""
BEFORE = {"transformer": (1e-3, 600), "no norm": (1e-3, 300)}


def settings_of(kind: str, trial: str) -> Row:
    """The settings of the inference `recipe` for a trial."""
    lr, steps = BEFORE.get(kind, (2e-3, 300))
    change = FIRST | TRIALS[trial]
    change |= {"lr": lr * change.pop("lr", 1.0), "steps": steps * change.pop("steps", 1)}
    if change["labels"] == "own":
        change["augmentation"] = ""
    return change


@lru_cache(maxsize=1)
def opened(data: str, coreset: str) -> ImageData:
    """Training images, some of them held out to measure on, none of which is in the set."""
    split = open_images(data).validation_split(without=load_coreset(coreset).pixels(stored=True))
    chosen = torch.randperm(len(split.test[1]), generator=torch.Generator().manual_seed(1))[:TEST_IMAGES]
    return ImageData(split.name, split.class_names, split.train, (split.test[0][chosen], split.test[1][chosen]))


def work(job: Row, args: argparse.Namespace) -> Row:
    """One network trained on one set."""
    data, learned = opened(args.data, args.coreset), load_coreset(args.coreset)
    coreset: SyntheticCoreset = learned
    settings: dict[str, Any] = settings_of(job["kind"], job["trial"])
    if job["images"] != "learned":
        coreset = RealImages(data, learned, job["images"]).coreset(job["seed"])
        settings["labels"] = "hard"
    begin = time.process_time()
    (row,) = evaluate(
        coreset, data, by=["recipe"], networks=[NETWORKS[job["kind"]]], seeds=[job["seed"]], progress=False,
        settings={"recipe": settings},
    )  # fmt: skip
    figures = {name: row[name] for name in ("accuracy", "train_accuracy", "nll")}
    return figures | {"cpu": time.process_time() - begin}


def jobs_of(args: argparse.Namespace) -> list[Row]:
    """Every trial for both sets; a set's own targets only where they are meant to be used."""
    return [
        {"data": Path(args.data).name, "on": "validation", "coreset": Path(args.coreset).stem, "kind": kind,
         "network": NETWORKS[kind], "images": images, "trial": trial, "seed": seed}
        for seed in range(args.seeds)
        for kind in args.kinds
        for trial in args.trials
        for images in ("learned", "random")
        if TRIALS[trial].get("labels") != "own" or (images == "learned" and kind == "instance norm")
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder that datasets.load_dataset opens")
    parser.add_argument("--coreset", required=True, help="a learned set: file, or name from the zoo")
    parser.add_argument("--kinds", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--trials", nargs="+", choices=TRIALS, default=list(TRIALS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--results", type=Path, default=Path("runs/training_recipes.jsonl"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = run_all(jobs_of(args), partial(work, args=args), args.results)
    for (kind, trial), found in grouped(rows, "kind", "trial").items():
        cells = {key[0]: spread([row["accuracy"] for row in some]) for key, some in grouped(found, "images").items()}
        print(f"{kind:22} {trial:30} " + "  ".join(f"{name} {value}" for name, value in cells.items()))


if __name__ == "__main__":
    main()
