"""`coreset-sampler evaluate`: the options of `coreset_sampler.evaluate`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..synthetic.evaluation import evaluate
from ..synthetic.inference.by_name import BY, settings_of_inference
from ..synthetic.networks import NETWORKS, NORMS
from ..synthetic.real_images import PICKS
from .options import add_defaults, add_widths, assignments, names

_NETWORKS = """
networks of other libraries have random weights and are made for the images' size and channels:
  timm:MODEL               any of timm.list_models(); a transformer's patches are made small enough for 4 x 4 of them
  timm:MODEL+NAME=VALUE    with arguments of the model; +small_stem leaves out stride and pooling at the start of a ResNet
  hf:DIR                   AutoModelForImageClassification from the config.json in DIR"""
_EXAMPLES = """examples:
  coreset-sampler evaluate digits/vbpc-1 --data digits --by last-layer,sgd --seeds 3
  coreset-sampler evaluate fashion-mnist/vbpc-10 --data DIR --networks convnet,vgg --norm batch --against random,herding
  coreset-sampler evaluate fashion-mnist/vbpc-10 --data DIR --networks timm:resnet18,timm:vit_tiny_patch16_224+depth=4,hf:DIR
  coreset-sampler evaluate digits/vbpc-10 --data digits --corruptions all --severity 1,2,3,4,5 -o digits.json"""


def add_evaluate(commands: Any) -> None:
    """Adds the command."""
    command = commands.add_parser(
        "evaluate",
        help="accuracy, NLL, ECE and Brier score on the whole test set",
        description="Trains networks that know only the coreset, and measures them on real test images.\n"
        "--against trains the same networks on as many real images: the comparison that counts.\n"
        "The column 'training' is the accuracy on the images trained on. If it is low the network underfits;\n"
        f"if it is high and 'accuracy' is low, the set does not carry over to this network.\n{_NETWORKS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_EXAMPLES,
    )
    command.add_argument("coreset", metavar="FILE", help="a coreset of ours, or a name from the zoo")
    command.add_argument("--data", required=True, help="digits, or a folder that datasets.load_dataset opens")
    text = (
        f"any of {','.join(BY)}; by default sgd,last-layer for the network that FILE was made with, recipe for others"
    )
    command.add_argument("--by", type=names, help=text)
    text = f"any of {','.join(NETWORKS)}, timm:MODEL, hf:DIR; by default the one that FILE names, or convnet"
    command.add_argument("--networks", type=names, metavar="NAMES", help=text)
    text = f"{', '.join(NORMS)}: norm layers of {', '.join(NETWORKS)}, in place of their own"
    command.add_argument("--norm", choices=list(NORMS), help=text)
    command.add_argument(
        "--against", type=names, metavar="NAMES", help=f"as many real images: any of {','.join(PICKS)}"
    )
    add_widths(command, "channels of the layers of every network; by default those that FILE names, or its own")
    text = "scale and crop images to so many pixels; by default as FILE says"
    command.add_argument("--image-size", type=int, metavar="PIXELS", help=text)
    command.add_argument("--seeds", type=int, help="networks to measure with; each has random real images of its own")
    command.add_argument("--corruptions", type=_corruptions, metavar="NAMES", help="gaussian_noise,fog, or all")
    command.add_argument("--severity", type=_severities, metavar="N", help="of corruptions, 1 to 5; several as 1,3,5")
    command.add_argument("--set", nargs="+", default=[], metavar="BY.NAME=VALUE", help="settings, as in hmc.steps=200")
    command.add_argument(
        "--validation", action="store_true", help="a tenth of the training images in place of the test"
    )
    text = "results; an evaluation that was killed continues from there"
    command.add_argument("-o", "--output", metavar="JSON", type=Path, help=text)
    add_defaults(command, evaluate)
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    same = (
        "by",
        "networks",
        "widths",
        "norm",
        "against",
        "seeds",
        "corruptions",
        "severity",
        "image_size",
        "validation",
    )
    try:
        results = evaluate(
            options.coreset,
            options.data,
            settings=_settings(options.set),
            output=options.output,
            **{name: getattr(options, name) for name in same},
        )
    except KeyboardInterrupt:
        kept = "nothing is kept without -o" if options.output is None else "to continue, repeat the command"
        raise KeyboardInterrupt(kept) from None
    sys.stdout.write(f"{results}\n")
    if options.output is not None:
        sys.stdout.write(f"wrote {options.output}\n")


def _corruptions(text: str) -> str | tuple[str, ...]:
    return text if text == "all" else names(text)


def _severities(text: str) -> int | tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"takes numbers from 1 to 5, as in 3 or 1,2,3, got {text!r}") from None
    return numbers if len(numbers) > 1 else numbers[0]


def _settings(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`["hmc.steps=200"]` as `{"hmc": {"steps": 200}}`, names checked against the function's."""
    settings: dict[str, dict[str, Any]] = {}
    for text in texts:
        path, equals, _ = text.partition("=")
        by, _, name = path.partition(".")
        known = settings_of_inference(by)
        if not equals or name not in known:
            raise ValueError(f"--set takes {by}.NAME=VALUE with NAME one of {', '.join(known)}, got {text!r}")
        settings.setdefault(by, {})[name] = assignments(
            [text], words=("recipe.labels", "recipe.augmentation", "recipe.optimizer")
        )[path]
    return settings
