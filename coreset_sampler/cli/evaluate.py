"""`coreset-sampler evaluate`: the options of `coreset_sampler.evaluate`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..synthetic.evaluation import BY, evaluate, settings_of_inference
from ..synthetic.networks import NETWORKS
from .options import add_defaults, add_widths, assignments, names


def add_evaluate(commands: Any) -> None:
    """Adds the command."""
    command = commands.add_parser(
        "evaluate",
        help="accuracy, NLL, ECE and Brier score on the whole test set",
        description="Measures networks that know only the coreset, by default of the kind that it was made with.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  coreset-sampler evaluate digits/vbpc-1 --data digits --by last-layer,sgd --seeds 3",
    )
    command.add_argument("coreset", metavar="FILE", help="a coreset of ours, or a name from the zoo")
    command.add_argument("--data", required=True, help="digits, or a folder that datasets.load_dataset opens")
    command.add_argument("--by", type=names, help=f"any of {','.join(BY)}")
    text = f"any of {','.join(NETWORKS)}; by default the one that FILE names, or convnet"
    command.add_argument("--networks", type=names, metavar="NAMES", help=text)
    add_widths(command, "channels of the layers of every network; by default those that FILE names, or its own")
    text = "scale and crop images to so many pixels; by default as FILE says"
    command.add_argument("--image-size", type=int, metavar="PIXELS", help=text)
    command.add_argument("--seeds", type=int, help="networks to measure with")
    command.add_argument("--corruptions", type=_corruptions, metavar="NAMES", help="gaussian_noise,fog, or all")
    command.add_argument("--severity", type=int, help="of corruptions, 1 to 5")
    command.add_argument("--set", nargs="+", default=[], metavar="BY.NAME=VALUE", help="settings, as in hmc.steps=200")
    command.add_argument(
        "--validation", action="store_true", help="a tenth of the training images in place of the test"
    )
    text = "results; an evaluation that was killed continues from there"
    command.add_argument("-o", "--output", metavar="JSON", type=Path, help=text)
    add_defaults(command, evaluate)
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    same = ("by", "networks", "widths", "seeds", "corruptions", "severity", "image_size", "validation", "output")
    results = evaluate(
        options.coreset,
        options.data,
        settings=_settings(options.set),
        **{name: getattr(options, name) for name in same},
    )
    sys.stdout.write(f"{results}\n")
    if options.output is not None:
        sys.stdout.write(f"wrote {options.output}\n")


def _corruptions(text: str) -> str | tuple[str, ...]:
    return text if text == "all" else names(text)


def _settings(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`["hmc.steps=200"]` as `{"hmc": {"steps": 200}}`, names checked against the function's."""
    settings: dict[str, dict[str, Any]] = {}
    for text in texts:
        path, equals, _ = text.partition("=")
        by, _, name = path.partition(".")
        known = settings_of_inference(by)
        if not equals or name not in known:
            raise ValueError(f"--set takes {by}.NAME=VALUE with NAME one of {', '.join(known)}, got {text!r}")
        settings.setdefault(by, {})[name] = assignments([text])[path]
    return settings
