"""Options that several commands have."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any

import torch

from ..synthetic.networks import NETWORKS


def add_data_and_widths(command: argparse.ArgumentParser) -> None:
    """The options that name the data and those of a run, and the network's widths."""
    add_data(command)
    add_widths(command, "channels of the network's blocks")


def add_data(command: argparse.ArgumentParser) -> None:
    """The options that name the data, and those of a run."""
    command.add_argument("name", metavar="NAME", help="what to call the data: digits (built in), fashion-mnist, ...")
    command.add_argument("--data", metavar="DIR", help="folder that datasets.load_dataset opens; digits needs none")
    command.add_argument("--image-size", type=int, metavar="PIXELS", help="scale and crop images to so many pixels")
    command.add_argument("--seed", type=int, help="of everything random")
    command.add_argument("--threads", type=int, help="of torch; the same result needs the same number")
    command.add_argument("--device", help="such as cuda")


def data_of(options: argparse.Namespace) -> str:
    """The data that these options name; also sets the number of threads."""
    if options.threads is not None:
        if options.threads < 1:
            raise ValueError(
                f"--threads must be at least 1, got {options.threads}; leave it out for torch's own number"
            )
        torch.set_num_threads(options.threads)
    if options.data is None and options.name != "digits":
        raise ValueError(f"--data must name the folder with the images of {options.name}; only digits is built in")
    data: str = options.data or options.name
    return data


def add_widths(command: argparse.ArgumentParser, meaning: str) -> None:
    """`--widths 32 64` and `--widths 32,64`, as a list of numbers."""
    text = f"{meaning}, as in 32 64 or 32,64"
    command.add_argument("--widths", nargs="+", type=_numbers, action=_Joined, metavar="N", help=text)


def add_defaults(command: argparse.ArgumentParser, function: Callable[..., Any]) -> None:
    """Options without a default take that of the function's argument of their name, and say it in the help."""
    parameters = inspect.signature(function).parameters
    for action in (each for each in command._actions if each.default is None and each.dest in parameters):
        default = parameters[action.dest].default
        if default is not inspect.Parameter.empty:
            action.default = default
            shown = ",".join(default) if isinstance(default, tuple) else default
            action.help = f"{action.help} (default: {shown})" if shown not in (None, "") else action.help


ENDING = ".safetensors"
KNOWN = f"many, or one or more of {', '.join(NETWORKS)}, as in convnet,resnet-batch:16-32"


def coreset_file(text: str, name: str = "FILE") -> Path:
    """The file to write, which says by its ending what it is."""
    if Path(text).suffix != ENDING:
        raise ValueError(f"{name} must end in {ENDING}, got {text}")
    return Path(text)


def names(text: str) -> tuple[str, ...]:
    """`sgd,hmc` as names."""
    return tuple(text.split(","))


def assignments(texts: Sequence[str], words: Container[str] = ()) -> dict[str, Any]:
    """`["lr=300"]` as `{"lr": 300}`; settings named in `words` take text as it is, `network=vgg`."""
    values = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            values[name] = json.loads(value)
        except ValueError:
            if name in words and value:
                values[name] = value
                continue
            raise ValueError(f"--set takes NAME=VALUE with a number, true, false or null, got {text!r}") from None
    return values


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part]
    except ValueError:
        rule = "--widths takes whole numbers, as in 32 64 or 32,64; other arguments go before it"
        raise argparse.ArgumentTypeError(f"{rule}, got {text!r}") from None


class _Joined(argparse.Action):
    """Lists of numbers as one list."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, [number for part in values for number in part])
