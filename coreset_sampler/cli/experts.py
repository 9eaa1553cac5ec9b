"""`coreset-sampler experts`: the options of `train_experts`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from torch import distributed

from ..distributed import world
from ..synthetic.distillers.experts import Experts, train_experts
from ..synthetic.image_data import open_images
from ..synthetic.pipeline import distill
from ..synthetic.problem import make_problem
from ..synthetic.reporting import Reporter
from ..synthetic.sources import make_experts, warn_if_untrained
from .options import KNOWN, add_data_and_widths, add_defaults, data_of, names


def add_experts(commands: Any) -> None:
    """Adds the command."""
    command = commands.add_parser(
        "experts",
        help="train expert trajectories, to distill from",
        description="Trains what is missing in the folder, so that a run may be killed and started again. "
        "torchrun --nproc-per-node N -m coreset_sampler.cli experts ... deals the experts out.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  coreset-sampler experts DIR digits --experts 6 --epochs 8 --lr 0.03 --batch 64",
    )
    command.add_argument("folder", metavar="DIR", help="folder for the trajectories")
    add_data_and_widths(command)
    command.add_argument(
        "--networks",
        type=names,
        metavar="NAMES",
        help=f"{KNOWN}; experts take several in turn",
    )
    command.add_argument("--experts", type=int, help="how many")
    command.add_argument("--epochs", type=int, help="of each")
    command.add_argument("--lr", type=float, help="learning rate of SGD")
    command.add_argument("--batch", type=int, help="batch size")
    command.add_argument("--examples", type=int, help="train on a random part of so many images")
    add_defaults(command, train_experts)
    add_defaults(command, distill)
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several:
        distributed.init_process_group("gloo")
    try:
        _train(options, several)
    except KeyboardInterrupt:
        kept = f"whole epochs are kept in {options.folder}. To continue, repeat the command"
        sys.stderr.write(f"coreset-sampler: stopped; {kept}.\n")
        raise SystemExit(130) from None
    finally:
        if several:
            distributed.destroy_process_group()


def _train(options: argparse.Namespace, several: bool) -> None:
    images, report = open_images(data_of(options), image_size=options.image_size), Reporter(True)
    problem = make_problem(
        images, name=options.name, networks=options.networks, widths=options.widths, device=options.device
    )
    training = {name: getattr(options, name) for name in ("experts", "epochs", "lr", "batch", "examples", "seed")}
    made = make_experts(problem, Path(options.folder), report=report, **training)
    if several:
        distributed.barrier()
        made = Experts(options.folder)
    sys.stdout.write(f"{options.folder} holds {len(made)} experts\n")
    if world()[0] == 0:
        warn_if_untrained(made, problem, report)
