"""`coreset-sampler teach`: the options of `teach`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ..synthetic.distillers.claim import claimed
from ..synthetic.teaching import teach
from .options import ENDING, add_data, add_defaults, assignments, coreset_file, data_of


def add_teach(commands: Any) -> None:
    """Adds the command."""
    command = commands.add_parser(
        "teach",
        help="a few real images with labels for many views, for networks of any kind",
        description="Trains a network on all of the data and lets it label views of a few real images. Takes minutes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n"
        "  coreset-sampler teach fashion-mnist --data DIR --images-per-class 10 -o fmnist.safetensors\n"
        "  coreset-sampler evaluate fmnist.safetensors --data DIR --networks vgg,timm:resnet18 --against random,herding",
    )
    add_data(command)
    command.add_argument("--images-per-class", type=int, metavar="N", help="how many to keep")
    command.add_argument("--views", type=int, metavar="N", help="of each image; 1280 for each class if not said")
    command.add_argument("--temperature", type=float, help="that the teacher's logits are divided by")
    command.add_argument(
        "--held-out", type=float, metavar="SHARE", help="of the training images, to test the teacher on"
    )
    command.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="settings of the teacher: epochs=20 lr=0.002 network=vgg",
    )
    command.add_argument("-o", "--output", required=True, metavar="FILE", help=f"coreset to write ({ENDING})")
    command.add_argument("--force", action="store_true", help="write even if FILE exists")
    add_defaults(command, teach)
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    output = coreset_file(options.output)
    if output.exists() and not options.force:
        raise ValueError(f"{output} exists already: --force writes it anew")
    same = ("name", "images_per_class", "views", "temperature", "held_out", "image_size", "seed", "device")
    settings = assignments(options.set, words=("network",))
    with claimed(output):
        coreset = teach(data_of(options), settings=settings, **{name: getattr(options, name) for name in same})
        coreset.save(output)
    sys.stdout.write(f"wrote {output}: {coreset}\n")
