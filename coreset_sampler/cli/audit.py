"""`coreset-sampler audit`: the options of `coreset_sampler.selection.audit.audit`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ..selection.audit import audit
from ..synthetic.untrusted import printable
from .options import add_defaults


def add_audit(commands: Any) -> None:
    """Adds the command."""
    command = commands.add_parser(
        "audit",
        help="which labels are probably wrong, by what a training run saw",
        description="Shows the examples whose labels are most likely wrong. sampler.save_scores(FILE) writes the scores.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n"
        "  coreset-sampler audit scores.safetensors --data DIR -o suspects.html\n"
        "  coreset-sampler audit scores.safetensors --csv suspects.csv --top 1000\n"
        "  coreset-sampler audit scores.safetensors --cleanlab FOLDER",
    )
    command.add_argument("scores", metavar="FILE", help="scores of a training run (.safetensors)")
    text = "what the run was trained on: a folder that datasets.load_dataset opens, or digits; without it indices only"
    command.add_argument("--data", metavar="DIR", help=text)
    command.add_argument("--split", help="of the data; row i of it is row i of FILE")
    command.add_argument("-o", "--output", dest="page", metavar="HTML", help="page to write, in one piece")
    command.add_argument("--csv", metavar="CSV", help="table to write, a row per suspect")
    command.add_argument("--cleanlab", metavar="DIR", help="folder for pred_probs.npy, labels.npy and indices.npy")
    command.add_argument("--top", type=int, metavar="N", help="how many suspects")
    command.add_argument("--force", dest="overwrite", action="store_true", help="overwrite files that exist")
    add_defaults(command, audit)
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    same = ["scores", "data", "split", "page", "csv", "cleanlab", "top", "overwrite"]
    found = audit(**{name: getattr(options, name) for name in same})
    for note in found.notes:
        sys.stderr.write(f"coreset-sampler: {printable(note)}\n")
    for path in (options.page, options.csv, options.cleanlab):
        if path is not None:
            print(f"wrote {path}")
    rate = found.noise_rate
    share = f"; about {rate:.1%} of the labels are wrong" if rate is not None else ""
    print(f"{len(found.suspects)} suspects of {int(found.scores.seen.sum())} examples seen{share}")
