"""`coreset-sampler experts`: trains the trajectories that the BPC methods learn from."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from torch import distributed

from ..distributed import world
from ..synthetic.distillers.experts import Experts, train_experts, untrained
from .problem import Problem, add_problem, open_problem


def add_experts(commands: Any) -> None:
    """Adds the command."""
    command = commands.add_parser(
        "experts",
        help="train expert trajectories, to distill from",
        description="Trains what is missing in the folder, so that a run may be killed and started again. "
        "torchrun --nproc-per-node N -m coreset_sampler.cli experts ... deals the experts out.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  coreset-sampler experts DIR digits --experts 6 --epochs 8 --rate 0.03 --batch 64",
    )
    command.add_argument("folder", metavar="DIR", help="folder for the trajectories")
    add_problem(command)
    command.add_argument("--experts", type=int, default=100, help="how many (default 100)")
    command.add_argument("--epochs", type=int, default=50, help="of each (default 50)")
    command.add_argument("--rate", type=float, default=0.01, help="learning rate of SGD (default 0.01)")
    command.add_argument("--batch", type=int, default=256, help="batch size (default 256)")
    command.add_argument("--examples", type=int, help="train on a random part of so many images")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several:
        distributed.init_process_group("gloo")
    try:
        problem = open_problem(options)
        made = make_experts(
            problem,
            Path(options.folder),
            experts=options.experts,
            epochs=options.epochs,
            rate=options.rate,
            batch=options.batch,
            examples=options.examples,
            seed=options.seed,
        )
        if several:
            distributed.barrier()
            made = Experts(options.folder)
        sys.stdout.write(f"{options.folder} holds {len(made)} experts\n")
        if world()[0] == 0 and (warning := untrained(made, problem.network, problem.held_out)):
            _report(f"coreset-sampler: {warning}")
    finally:
        if several:
            distributed.destroy_process_group()


def make_experts(
    problem: Problem,
    folder: Path,
    *,
    experts: int,
    epochs: int,
    rate: float,
    batch: int,
    examples: int | None,
    seed: int,
) -> Experts:
    """Trains what is missing, saying so line by line."""
    try:
        return train_experts(
            problem.network,
            problem.part(examples),
            folder,
            experts=experts,
            epochs=epochs,
            rate=rate,
            batch=batch,
            seed=seed,
            about={"data": problem.name, **problem.net},
            report=_report,
        )
    except KeyboardInterrupt:
        _report(f"stopped; whole epochs are kept in {folder}, and the same command goes on")
        raise SystemExit(130) from None


def _report(line: str) -> None:
    sys.stderr.write(line + "\n")
