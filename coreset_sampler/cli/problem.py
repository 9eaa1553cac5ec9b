"""The data, split and network that a command is about, from its options."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch

from ..synthetic.distillers.real_data import RealData
from ..synthetic.image_data import ImageData, open_images
from ..synthetic.networks import NETWORKS, Network, network
from ..synthetic.preprocessing import Normalize


@dataclass(frozen=True)
class Problem:
    """Training images, images held out of them, and a maker of networks. Test images are never here."""

    name: str
    classes: tuple[str, ...]
    train: RealData
    held_out: RealData
    preprocessing: Normalize
    network: Network
    net: dict[str, Any]
    """The network in plain values: kind, widths, channels, classes and pixels."""

    def check_per_class(self, count: int) -> None:
        """Refuses more images per class than every class has."""
        labels, counts = self.train.targets.unique(return_counts=True)
        fewest = int(counts.argmin())
        if count > int(counts[fewest]):
            name, has = self.classes[int(labels[fewest])], int(counts[fewest])
            raise ValueError(
                f"--ipc must be at most the training images of every class, got {count}: class {name!r} has {has} "
                "besides those held out"
            )

    def part(self, examples: int | None) -> RealData:
        """A random part of the training images, always the same one; all if not said."""
        if examples is None or examples >= self.train.n:
            return self.train
        rows = torch.randperm(self.train.n, generator=torch.Generator().manual_seed(0))[:examples]
        part = self.train.inputs[rows], self.train.targets[rows]
        return RealData(*part, preprocessing=self.preprocessing, device=self.train.device)


def add_problem(command: argparse.ArgumentParser) -> None:
    """The options that name data and network."""
    command.add_argument("name", metavar="NAME", help="what to call the data: digits (built in), fashion-mnist, ...")
    command.add_argument("--data", metavar="DIR", help="folder that datasets.load_dataset opens; digits needs none")
    command.add_argument("--size", type=int, help="scale and crop images to so many pixels")
    command.add_argument("--net", choices=list(NETWORKS), default="convnet", help="network (default convnet)")
    add_widths(command, "channels of its blocks")
    command.add_argument("--seed", type=int, default=0, help="of everything random (default 0)")
    command.add_argument("--threads", type=int, help="of torch; the same bits need the same number")
    command.add_argument("--device", default="cpu", help="such as cuda (default cpu)")


def add_widths(command: argparse.ArgumentParser, meaning: str) -> None:
    """`--widths 32 64` and `--widths 32,64`, as a list of numbers."""
    text = f"{meaning}, as in 32 64 or 32,64"
    command.add_argument("--widths", nargs="+", type=_numbers, action=_Joined, metavar="N", help=text)


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


def open_problem(options: argparse.Namespace) -> Problem:
    """Opens the data and holds a tenth of each class out."""
    if options.threads:
        torch.set_num_threads(options.threads)
    _check_device(options.device)
    if options.data is None and options.name != "digits":
        raise ValueError(f"--data must name the folder with the images of {options.name}; only digits is built in")
    return make_problem(open_images(options.data or options.name, size=options.size), options)


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device must be one that torch finds here, got {device!r} ({reason}); try cpu") from None


def make_problem(images: ImageData, options: argparse.Namespace) -> Problem:
    """The same of images that are open already."""
    split = images.validation_split()
    normalize = split.normalize()
    widths = options.widths or _default_widths(options.net, split.size)
    shape = split.channels, len(split.classes), split.size
    net = {"net": options.net, "widths": widths, "channels": shape[0], "classes": shape[1], "pixels": shape[2]}
    return Problem(
        options.name,
        split.classes,
        RealData(*split.train, preprocessing=normalize, device=options.device),
        RealData(split.test[0][:1000], split.test[1][:1000], preprocessing=normalize, device=options.device),
        normalize,
        network(options.net, *shape, widths=widths),
        net,
    )


def _default_widths(net: str, size: int) -> list[int] | None:
    """As many blocks of the ConvNet as the image can be halved, three at most."""
    if net != "convnet":
        return None
    return [128] * max(1, min(3, size.bit_length() - 1))
