"""What networks of many kinds learn from a distilled set, beside real images: random, herding, and packed alike.

    python benchmarks/distilled.py fashion-mnist/vbpc-10 --data DIR
    python benchmarks/distilled.py mine.safetensors --data DIR --networks convnet timm:resnet18 hf --seeds 3 --validation

A network, a training set and a seed are one run: trained as `recipe_for` says for its kind, measured on all test images.
Finished runs are lines of --results and are not run again. `hf` is a small ResNet of Hugging Face, built from a
config.json that this script writes; `hf:DIR` one of your own. `random` and `herding` are as many real images as the set
stores; a set with several examples in an image is also compared with `random-packed`.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import lru_cache, partial
from pathlib import Path

import torch
from harness import Row, grouped, run_all, spread

from coreset_sampler import SyntheticCoreset, evaluate, load_coreset
from coreset_sampler.synthetic.image_data import ImageData, open_images
from coreset_sampler.synthetic.real_images import PACKED, RealImages

NETWORKS = ("convnet", "timm:resnet18", "vgg-batch", "timm:vit_tiny_patch16_224+depth=4", "hf")
FIGURES = ("accuracy", "train_accuracy", "nll", "ece", "test_images")


@lru_cache(maxsize=1)
def opened(data: str, validation: bool, coreset: str) -> ImageData:
    """The images to measure on, which are not in the set, and to pick real ones from."""
    images = open_images(data)
    return images.validation_split(without=load_coreset(coreset).pixels(stored=True)) if validation else images


def small_huggingface(folder: Path) -> str:
    """A ResNet of Hugging Face with BatchNorm, as `evaluate` names networks."""
    import transformers

    config = transformers.ResNetConfig(
        embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[1, 1, 1, 1], layer_type="basic"
    )
    config.architectures = ["ResNetForImageClassification"]
    config.save_pretrained(folder)
    return f"hf:{folder}"


def trained_on(job: Row, args: argparse.Namespace) -> SyntheticCoreset:
    """The set itself, or real images of this seed."""
    learned = load_coreset(args.coreset)
    if job["images"] == "set":
        return learned
    return RealImages(opened(args.data, args.validation, args.coreset), learned, job["images"]).coreset(job["seed"])


def work(job: Row, args: argparse.Namespace) -> Row:
    """One network trained on one set."""
    with tempfile.TemporaryDirectory() as folder:
        name = small_huggingface(Path(folder)) if job["network"] == "hf" else job["network"]
        (row,) = evaluate(
            trained_on(job, args), opened(args.data, args.validation, args.coreset), by=["recipe"], networks=[name],
            widths=args.widths, seeds=[job["seed"]], progress=False,
            settings={"recipe": {"steps": args.steps, "bf16": args.bf16}},
        )  # fmt: skip
    return {name: row[name] for name in FIGURES} | {"cpu": row["cpu_seconds"]}


def jobs_of(args: argparse.Namespace) -> list[Row]:
    """Each network, training set and seed."""
    learned = load_coreset(args.coreset)
    applies = ["random", "herding", *([PACKED] if learned.tiles > 1 else [])]
    against = applies if args.against is None else args.against
    about = {"data": Path(args.data).name, "on": "validation" if args.validation else "test", "coreset": args.name}
    about |= {"size": learned.size, "steps": args.steps, "bf16": args.bf16, "widths": args.widths}
    return [
        about | {"network": network, "images": images, "seed": seed}
        for seed in range(args.seed, args.seed + args.seeds)
        for network in args.networks
        for images in ("set", *against)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("coreset", help="file, or name from the zoo")
    parser.add_argument("--data", required=True, help="digits, or a folder that datasets.load_dataset opens")
    parser.add_argument("--name", help="what records call the set (default: its name or file)")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), help="default: %(default)s")
    parser.add_argument(
        "--widths", type=int, nargs="+", help="of networks of ours (default: as the set says, or their own)"
    )
    parser.add_argument("--against", nargs="*", help="real images, none if none is named (default: all that apply)")
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of training (default: the recipe's)")
    parser.add_argument("--bf16", action="store_true", help="train under autocast")
    parser.add_argument("--validation", action="store_true", help="a tenth of the training images, not the test images")
    parser.add_argument("--results", type=Path, default=Path("runs/distilled.jsonl"))
    args = parser.parse_args()
    args.name = args.name or (Path(args.coreset).stem if Path(args.coreset).exists() else args.coreset)
    torch.set_num_threads(1)
    rows = run_all(jobs_of(args), partial(work, args=args), args.results)
    for (network, images), found in grouped(rows, "network", "images").items():
        fitted = spread([row["train_accuracy"] for row in found])
        print(
            f"{network:40} {images:14} {spread([row['accuracy'] for row in found])}  training {fitted}, n = {len(found)}"
        )


if __name__ == "__main__":
    main()
