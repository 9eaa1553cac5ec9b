"""The command line: `coreset-sampler zoo | info | show | convert | experts | distill | teach | evaluate | audit`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .._version import __version__
from ..synthetic import zoo
from ..synthetic.dataset import SyntheticCoreset, load_coreset
from ..synthetic.file import CoresetFileError
from ..synthetic.formats import READERS, PreprocessingUnknownError, read_published
from ..synthetic.picture import draw, uneven
from ..synthetic.preprocessing import Normalize, Preprocessing, Raw
from ..synthetic.remarks import accuracy_range, remarks
from ..synthetic.untrusted import printable
from .audit import add_audit
from .distill import add_distill
from .evaluate import add_evaluate
from .experts import add_experts
from .options import ENDING, coreset_file
from .teach import add_teach

_EXAMPLES = """examples:
  coreset-sampler zoo
  coreset-sampler info digits/vbpc-1
  coreset-sampler show digits/vbpc-10 -o digits.png
  coreset-sampler evaluate digits/vbpc-1 --data digits --by last-layer,sgd --seeds 3
  coreset-sampler distill digits --images-per-class 1 --minutes 2 -o mine.safetensors
  coreset-sampler distill fashion-mnist --data DIR --method vbpc --images-per-class 10 -o fmnist.safetensors
  coreset-sampler teach fashion-mnist --data DIR --images-per-class 10 -o fmnist.safetensors
  coreset-sampler convert images_best.pt mine.safetensors --mean 0.2861 --std 0.3530
  coreset-sampler audit scores.safetensors --data DIR -o suspects.html

coreset-sampler COMMAND --help says more of each."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code; errors are one message on stderr, not a traceback."""
    options = parser().parse_args(arguments)
    try:
        options.run(options)
    except PreprocessingUnknownError as error:
        hint = "On the command line: --mean M ... --std S ..., --raw, or --preprocessing-from FILE."
        return _fail(f"{error}\n{hint}")
    except (ValueError, OSError, ImportError) as error:
        return _fail(str(error))
    except KeyboardInterrupt as stopped:
        kept = f"; {stopped}" if str(stopped) else ""
        print(f"\ncoreset-sampler: stopped{kept}", file=sys.stderr)
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    """All commands. A new one is a function that adds a parser and sets `run`."""
    top = argparse.ArgumentParser(
        prog="coreset-sampler",
        description="Small data sets to train on.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"coreset-sampler {__version__}")
    commands = top.add_subparsers(metavar="command", required=True)
    for add in (
        _add_zoo,
        _add_info,
        _add_show,
        _add_convert,
        add_experts,
        add_distill,
        add_teach,
        add_evaluate,
        add_audit,
    ):
        add(commands)
    return top


def _add_zoo(commands: Any) -> None:
    command = commands.add_parser("zoo", help="what ships, with method, images per class, accuracy over networks")
    command.add_argument("--json", action="store_true", help="the whole index")
    command.set_defaults(run=_zoo)


def _add_info(commands: Any) -> None:
    command = commands.add_parser("info", help="what is in a file")
    _add_reading(command)
    command.set_defaults(run=_info)


def _add_show(commands: Any) -> None:
    command = commands.add_parser("show", help="the images, one row per class, and what to know of them")
    _add_reading(command)
    command.add_argument("-o", "--output", required=True, metavar="PNG", help="picture to write (.png, .pdf, .svg)")
    command.add_argument("--rows", type=int, default=20, help="most classes to show (default 20)")
    command.add_argument("--columns", type=int, default=10, help="most images of a class to show (default 10)")
    command.set_defaults(run=_show)


def _add_convert(commands: Any) -> None:
    command = commands.add_parser("convert", help="a published layout into our format")
    _add_reading(command, metavar="IN")
    command.add_argument("output", metavar="OUT", help=f"file to write ({ENDING})")
    command.add_argument("--force", action="store_true", help="overwrite OUT if it exists")
    command.set_defaults(run=_convert)


def _add_reading(command: argparse.ArgumentParser, metavar: str = "FILE") -> None:
    """How to name a coreset, and what to say about one whose files do not say it."""
    command.add_argument(
        "file", metavar=metavar, help="a name from the zoo, a file of ours, or a published file or folder"
    )
    command.add_argument("--format", choices=list(READERS), help="layout, if it is not recognised")
    command.add_argument("--mean", type=float, nargs="+", help="channel means that the inputs were normalised with")
    command.add_argument("--std", type=float, nargs="+", help="channel deviations")
    command.add_argument("--raw", action="store_true", help="inputs are pixels in [0, 1], or no images")
    command.add_argument("--preprocessing-from", metavar="FILE", help="take it from a coreset of ours (ZCA, for one)")
    command.add_argument("--targets", choices=["hard", "soft", "logits", "regression"], help="what the targets are")
    command.add_argument("--class-names", nargs="+", metavar="NAME", help="names of the classes in order")


def _open(options: argparse.Namespace) -> SyntheticCoreset:
    path = Path(options.file)
    if options.file in zoo.index() or (path.is_file() and path.suffix == ENDING) or not path.exists():
        coreset = load_coreset(options.file)
        _check_nothing_said(options)
        return coreset
    return read_published(
        path,
        format=options.format,
        preprocessing=_preprocessing(options),
        target_kind=options.targets,
        class_names=options.class_names,
    )


def _check_nothing_said(options: argparse.Namespace) -> None:
    """Refuses what would be ignored: a file of ours says all of this itself."""
    names = ("format", "mean", "std", "raw", "preprocessing_from", "targets", "class_names")
    said = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) not in (None, False)]
    if said:
        raise ValueError(
            f"{options.file} is a coreset of ours, which says itself what {', '.join(said)} would say; leave it out. To "
            "change what a file says, make a SyntheticCoreset of its tensors in Python"
        )


def _preprocessing(options: argparse.Namespace) -> Preprocessing | None:
    said = [
        options.mean is not None or options.std is not None,
        options.raw,
        options.preprocessing_from is not None,
    ]
    if sum(said) > 1:
        raise ValueError("say the preprocessing once: --mean with --std, or --raw, or --preprocessing-from")
    if options.raw:
        return Raw()
    if options.preprocessing_from is not None:
        return load_coreset(options.preprocessing_from).preprocessing
    if said[0]:
        if options.mean is None or options.std is None:
            raise ValueError("--mean and --std go together")
        return Normalize(tuple(options.mean), tuple(options.std))
    return None


def _zoo(options: argparse.Namespace) -> None:
    entries = zoo.index()
    if options.json:
        print(json.dumps(entries, indent=2))
        return
    rows, notes = [("name", "method", "per class", "accuracy", "data, licence")], []
    for name, entry in sorted(entries.items()):
        coreset = load_coreset(name)
        measured, other = entry["accuracy"], uneven(coreset)
        several = coreset.examples_per_image
        packed = f" ({several * entry['images_per_class']} examples)" if several > 1 else ""
        notes += [f"* {name}: {other}"] if other else []
        rows.append(
            (
                name,
                entry["method"],
                f"{entry['images_per_class']}{packed}{'*' if other else ''}",
                accuracy_range(measured),
                f"{entry['data']}, {entry['licence']}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for note in notes:
        print(note)
    print(
        '\nload_coreset("name") opens one. Accuracy on all test images, from the worst network measured to the best;\n'
        '"ConvNet only": a ConvNet trained on it, vbpc by closed form; other networks were not measured. For yours:\n'
        "coreset-sampler evaluate NAME --data DIR --networks timm:resnet18 --against random"
    )


def _info(options: argparse.Namespace) -> None:
    coreset = _open(options)
    print(coreset)
    for name, value in coreset.info.items():
        if value not in (None, {}):
            more = f"; {uneven(coreset)}" if name == "images_per_class" and uneven(coreset) else ""
            print(printable(f"  {name:17} {value if not isinstance(value, dict) else ''}{more}".rstrip()))
            _print_nested(value, indent=4)


def _print_nested(value: Any, indent: int) -> None:
    for key, inner in value.items() if isinstance(value, dict) else ():
        if isinstance(inner, dict):
            print(printable(" " * indent + f"{key}"))
            _print_nested(inner, indent + 2)
        else:
            text = str(inner)
            print(printable(" " * indent + f"{key:18} {text if len(text) < 90 else text[:87] + '...'}"))


def _show(options: argparse.Namespace) -> None:
    coreset = _open(options)
    draw(coreset, options.output, rows=options.rows, columns=options.columns)
    print(f"wrote {options.output}", *remarks(coreset), sep="\n")


def _convert(options: argparse.Namespace) -> None:
    output = coreset_file(options.output, "OUT")
    if output.exists() and not options.force:
        raise CoresetFileError(f"{output} exists already; --force overwrites it")
    coreset = _open(options)
    coreset.save(output)
    print(f"wrote {output}: {coreset}")


def _fail(message: str) -> int:
    print(f"coreset-sampler: {printable(message)}", file=sys.stderr)
    return 1
