"""What a coreset is learned for: training images, images held out of them, and makers of networks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .checks import check_positive
from .distillers.real_data import RealData
from .image_data import ImageData
from .networks import Network, kinds, network
from .preprocessing import Normalize

_MOST_HELD_OUT = 1000


@dataclass(frozen=True)
class Problem:
    """Training images, images held out of them, and makers of networks. Test images are never here.

    Args:
        name: what the data are called.
        class_names: in the order of their numbers.
        train: what is learned from.
        held_out: what accuracy is measured on meanwhile; `None` if nothing is held out.
        preprocessing: of all of them.
        networks: makers of fresh networks, one for each kind.
        about_network: the same in plain values: kind and widths, or kinds; channels, number of classes and pixels.
    """

    name: str
    class_names: tuple[str, ...]
    train: RealData
    held_out: RealData | None
    preprocessing: Normalize
    networks: tuple[Network, ...]
    about_network: dict[str, Any]

    @property
    def network(self) -> Network:
        """The maker of the first kind: what accuracy is measured with."""
        return self.networks[0]

    @property
    def pixel_bounds(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Black and white as a network sees them, a number for each channel."""
        shape = self.about_network["channels"], 1, 1
        ends = self.preprocessing(torch.zeros(shape)), self.preprocessing(torch.ones(shape))
        black, white = (tuple(end.flatten().tolist()) for end in ends)
        return black, white

    def check_images_per_class(self, count: int, *, each: int = 1) -> None:
        """Refuses more images per class than every class has, where a stored image begins as `each` of them."""
        if count < 1:
            raise ValueError(f"images_per_class must be at least 1, got {count}")
        counts = self.train.targets.bincount(minlength=len(self.class_names))
        fewest = int(counts.argmin())
        if count * each > int(counts[fewest]):
            name, has = self.class_names[fewest], int(counts[fewest]) or "none"
            needed = "" if each == 1 else f", which begin as {each} real ones each"
            raise ValueError(
                f"images_per_class must be at most the training images of every class, got {count}{needed}: class "
                f"{name!r} has {has}{'' if self.held_out is None else ' besides those held out'}"
            )

    def part(self, examples: int | None) -> RealData:
        """A random part of the training images, always the same one; all if not said."""
        if examples is not None:
            check_positive("examples", examples, whole=True)
        if examples is None or examples >= self.train.n:
            return self.train
        rows = _random_rows(self.train.n, examples)
        part = self.train.inputs[rows], self.train.targets[rows]
        return RealData(*part, preprocessing=self.preprocessing, device=self.train.device)


def make_problem(
    images: ImageData,
    *,
    name: str | None = None,
    networks: str | Sequence[str] = "convnet",
    widths: Sequence[int] | None = None,
    held_out: float = 0.1,
    device: str = "cpu",
) -> Problem:
    """Holds a share of each class out and makes the rest ready for a network.

    Args:
        images: the data; of these only the training images are used.
        name: what to call them; their own name if not said.
        networks: one of `NETWORKS`, several kinds of them, or `"many"`.
        widths: channels of the blocks of the one; of the ConvNet 128 in up to three blocks if not said.
        held_out: share of each class that is not trained on; 0 for none.
        device: where batches are put.
    """
    _check_device(device)
    split = images.validation_split(held_out) if held_out else images
    normalize = split.normalize()
    shape = split.channels, split.num_classes, split.image_size
    kept = _some(split.test, _MOST_HELD_OUT)
    return Problem(
        name or images.name,
        split.class_names,
        RealData(*split.train, preprocessing=normalize, device=device),
        RealData(*kept, preprocessing=normalize, device=device) if held_out else None,
        normalize,
        *_networks(kinds(networks), widths, shape),
    )


def _some(images: tuple[Tensor, Tensor], most: int) -> tuple[Tensor, Tensor]:
    """At most so many of all classes: folders are sorted by class, so the first would not do."""
    rows = _random_rows(len(images[1]), most).sort().values
    return images[0][rows], images[1][rows]


def _random_rows(n: int, most: int) -> Tensor:
    """At most so many of n, always the same ones."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(0))[:most]


def _networks(
    names: tuple[str, ...], widths: Sequence[int] | None, shape: tuple[int, int, int]
) -> tuple[tuple[Network, ...], dict[str, Any]]:
    """Makers of networks, and what a record says of them."""
    about = dict(zip(("channels", "num_classes", "image_size"), shape, strict=True))
    if len(names) == 1:
        used = list(widths) if widths else _default_widths(names[0], shape[-1])
        return (network(names[0], *shape, widths=used),), {"network": names[0], "widths": used, **about}
    if widths:
        raise ValueError(
            f"widths must be left out where there are several networks, got {list(widths)}; say them with each, as in "
            "convnet:32-64"
        )
    return tuple(network(name, *shape) for name in names), {"networks": list(names), **about}


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device must be one that torch finds here, got {device!r} ({reason}); try cpu") from None


def _default_widths(name: str, image_size: int) -> list[int] | None:
    """As many blocks of the ConvNet as the image can be halved, three at most."""
    if name != "convnet":
        return None
    return [128] * max(1, min(3, image_size.bit_length() - 1))
