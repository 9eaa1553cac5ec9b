"""`coreset-sampler distill`: the options of `coreset_sampler.distill`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from ..synthetic.dataset import SyntheticCoreset
from ..synthetic.distillers.claim import claimed
from ..synthetic.distillers.presets import METHODS, PRESETS
from ..synthetic.distillers.run import StoppedError, checkpoint_beside
from ..synthetic.distillers.state import DivergedError
from ..synthetic.networks import kinds
from ..synthetic.pipeline import distill
from .options import ENDING, KNOWN, add_data_and_widths, add_defaults, assignments, coreset_file, data_of, names


def add_distill(commands: Any) -> None:
    """Adds the command."""
    command = commands.add_parser(
        "distill",
        help="learn a handful of images to train on in place of all",
        description="Learns a coreset. Ctrl-C saves; with --resume the result is the same as without an interruption.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n"
        "  coreset-sampler distill fashion-mnist --data DIR --networks many --images-per-class 10 -o fmnist.safetensors",
    )
    add_data_and_widths(command)
    command.add_argument("--networks", type=names, metavar="NAMES", help=f"what it should work for: {KNOWN}")
    command.add_argument("--method", choices=list(METHODS), help="how")
    command.add_argument("--images-per-class", type=int, metavar="N", help="how many to learn")
    command.add_argument("-o", "--output", required=True, metavar="FILE", help=f"coreset to write ({ENDING})")
    command.add_argument("--steps", type=int, help="how many in all; the preset's if not said")
    command.add_argument("--minutes", type=float, help="stop stepping after so long in all")
    command.add_argument("--preset", choices=list(PRESETS), help="settings: cpu for minutes of one core")
    command.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of the method, over the preset's: lr=300"
    )
    command.add_argument("--experts", metavar="DIR", help="their folder; what is missing there is trained first")
    command.add_argument("--resume", action="store_true", help="continue the run that writes FILE where it stopped")
    command.add_argument("--force", action="store_true", help="begin anew even if FILE or its checkpoint exists")
    command.add_argument("--save-every", type=float, metavar="SECONDS", help="between two checkpoints")
    command.add_argument(
        "--evaluate-every", type=int, metavar="STEPS", help="held-out accuracy; ten times in all if not said"
    )
    add_defaults(command, distill)
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    output = coreset_file(options.output)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("distill runs in one process; under torchrun only experts are split")
    with claimed(output):
        _check_there(options, output)
        coreset = _distilled(options, output)
        coreset.provenance |= {"command": _command(options, coreset)}
        coreset.save(output)
    sys.stdout.write(f"wrote {output}: {coreset}\n")


def _distilled(options: argparse.Namespace, output: Path) -> SyntheticCoreset:
    """Calls `distill`; an exit or an error says how to resume."""
    checkpoint = checkpoint_beside(output)
    same = ["name", "method", "images_per_class", "minutes", "steps", "preset", "experts", "networks", "widths"]
    same += ["image_size", "evaluate_every", "save_every", "seed", "device"]
    try:
        return distill(
            data_of(options),
            settings=assignments(options.set, words=("pool_loss", "precision")),
            resume=checkpoint,
            overwrite=options.force,
            film=output.with_suffix(".png"),
            **{name: getattr(options, name) for name in same},
        )
    except StoppedError as stopped:
        sys.stderr.write(f"\ncoreset-sampler: {stopped}. To continue, repeat the command with --resume.\n")
        raise SystemExit(130) from None
    except KeyboardInterrupt:
        sys.stderr.write(
            "\ncoreset-sampler: stopped; finished epochs of experts are kept. To continue, repeat the command.\n"
        )
        raise SystemExit(130) from None
    except DivergedError as error:
        way_out = "; to continue from before it, repeat the command with --resume and another --set NAME=VALUE"
        raise DivergedError(f"{error}{way_out}") from error
    except OSError as error:
        if error.filename != str(checkpoint):
            raise
        kept = f"{checkpoint} is the last that was saved; --resume continues from it"
        raise OSError(f"{error}: {kept if checkpoint.exists() else 'nothing was saved'}") from error


def _check_there(options: argparse.Namespace, output: Path) -> None:
    checkpoint = checkpoint_beside(output)
    if options.resume and not checkpoint.exists():
        raise ValueError(f"nothing to resume: there is no {checkpoint}. To start a new run, omit --resume")
    if not (options.resume or options.force) and (output.exists() or checkpoint.exists()):
        there = output if output.exists() else checkpoint
        raise ValueError(f"{there} exists already: --resume continues the run, --force begins anew")


def _command(options: argparse.Namespace, coreset: SyntheticCoreset) -> str:
    """The command that makes the set again, without the paths of this machine."""
    words = ["coreset-sampler distill", options.name, *([] if options.data is None else ["--data DIR"])]
    words += [f"--method {options.method} --images-per-class {options.images_per_class}"]
    words += [
        f"--networks {','.join(kinds(options.networks))} --preset {options.preset} --steps {coreset.provenance['steps']}"
    ]
    words += [f"--seed {options.seed}"]
    words += [f"--image-size {options.image_size}"] if options.image_size else []
    words += [f"--minutes {options.minutes}"] if options.minutes else []
    words += ["--widths " + " ".join(map(str, options.widths))] if options.widths else []
    words += ["--set " + " ".join(options.set)] if options.set else []
    return " ".join([*words, "-o FILE"])
