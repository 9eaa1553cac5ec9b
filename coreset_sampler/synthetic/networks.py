"""Small classifiers of the distillation literature, for images of any size. Bring your own instead: any module will do."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..randomness import seeded

Network = Callable[[], nn.Module]
"""Makes a fresh network with random weights."""

Norm = Callable[[int], nn.Module]


def instance_norm(channels: int) -> nn.Module:
    """Instance norm with weights, as the literature has it."""
    return nn.GroupNorm(channels, channels)


def group_norm(channels: int) -> nn.Module:
    """Group norm with eight channels to a group, or fewer where the number of channels asks for it."""
    return nn.GroupNorm(max(1, channels // math.gcd(8, channels)), channels)


NORMS: dict[str, Norm] = {"instance": instance_norm, "batch": nn.BatchNorm2d, "group": group_norm}
"""Norm layers by the word that a kind of network says them with, as in `"resnet-batch"`."""


def convnet(
    channels: int,
    num_classes: int,
    image_size: int,
    *,
    widths: Sequence[int] = (128, 128, 128),
    norm: Norm = instance_norm,
) -> nn.Sequential:
    """Blocks of 3 x 3 convolution, norm, relu and average pooling, then a linear head: the field's ConvNet.

    Images of `image_size` pixels are halved in every block and must survive it. With the default widths and 32 pixels in
    colour it has the 320,010 parameters of MTT's and BPC's experts.
    """
    if image_size >> len(widths) < 1:
        raise ValueError(f"image_size {image_size} cannot be halved {len(widths)} times; pass fewer widths")
    layers: list[nn.Module] = []
    for width in widths:
        layers += [nn.Conv2d(channels, width, 3, padding=1), norm(width), nn.ReLU(), nn.AvgPool2d(2)]
        channels, image_size = width, image_size // 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * image_size * image_size, num_classes))


def alexnet(
    channels: int,
    num_classes: int,
    image_size: int,
    *,
    widths: Sequence[int] = (128, 192, 256, 192, 192),
    norm: Norm | None = None,
) -> nn.Sequential:
    """AlexNet for small images, as dataset condensation has it: one 5 x 5 layer, four 3 x 3, three poolings."""
    if image_size < 8:
        raise ValueError(f"alexnet takes images of 8 pixels or more, got {image_size}")
    layers: list[nn.Module] = []
    for i, width in enumerate(widths):
        layers += [nn.Conv2d(channels, width, 5 if i < 2 else 3, padding=2 if i < 2 else 1)]
        layers += [norm(width)] if norm else []
        layers += [nn.ReLU()]
        if i in (0, 1, len(widths) - 1):
            layers += [nn.MaxPool2d(2)]
            image_size //= 2
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * image_size * image_size, num_classes))


def vgg(
    channels: int,
    num_classes: int,
    image_size: int,
    *,
    widths: Sequence[int] = (64, 128, 256, 512, 512),
    norm: Norm = instance_norm,
) -> nn.Sequential:
    """VGG-11: one or two convolutions to a pooling; blocks that would pool below one pixel do not pool."""
    layers: list[nn.Module] = []
    for i, width in enumerate(widths):
        for _ in range(1 if i < 2 else 2):
            layers += [nn.Conv2d(channels, width, 3, padding=1), norm(width), nn.ReLU()]
            channels = width
        if image_size >= 4:
            layers += [nn.MaxPool2d(2)]
            image_size //= 2
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))


class _Residual(nn.Module):
    def __init__(self, channels: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, 1, bias=False),
            norm(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            norm(width),
        )
        straight = stride == 1 and channels == width
        self.skip = (
            nn.Identity() if straight else nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), norm(width))
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.skip(x))


def resnet(
    channels: int,
    num_classes: int,
    image_size: int,
    *,
    widths: Sequence[int] = (64, 128, 256, 512),
    norm: Norm = instance_norm,
) -> nn.Sequential:
    """ResNet-18 for small images: no pooling at the start, two residual blocks of each width."""
    layers: list[nn.Module] = [nn.Conv2d(channels, widths[0], 3, padding=1, bias=False), norm(widths[0]), nn.ReLU()]
    channels = widths[0]
    for i, width in enumerate(widths):
        stride = 2 if i and image_size >= 2 * 2**i else 1
        layers += [_Residual(channels, width, stride, norm), _Residual(width, width, 1, norm)]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))


class _Tokens(nn.Module):
    """Square patches as vectors, with a learned position each."""

    def __init__(self, channels: int, width: int, image_size: int) -> None:
        super().__init__()
        patch = max(1, image_size // 4)
        self.embed = nn.Conv2d(channels, width, patch, patch)
        self.position = nn.Parameter(0.02 * torch.randn((image_size // patch) ** 2, width))

    def forward(self, x: Tensor) -> Tensor:
        patches: Tensor = self.embed(x)
        return patches.flatten(2).transpose(1, 2) + self.position


class _Mean(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return tokens.mean(1)


def vit(
    channels: int, num_classes: int, image_size: int, *, widths: Sequence[int] = (64, 64, 64), norm: Norm | None = None
) -> nn.Sequential:
    """A small vision transformer: about 4 x 4 patches, a block for each width, which must all be the same; LayerNorm."""
    width = widths[0]
    if norm is not None or set(widths) != {width} or width % 32:
        raise ValueError(
            f"vit takes equal widths, multiples of 32, and no norm, got widths {list(widths)}, norm {norm}"
        )
    blocks = [
        nn.TransformerEncoderLayer(width, width // 32, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        for _ in widths
    ]
    tokens = _Tokens(channels, width, image_size)
    return nn.Sequential(tokens, *blocks, nn.LayerNorm(width), _Mean(), nn.Linear(width, num_classes))


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "convnet": convnet,
    "resnet": resnet,
    "vgg": vgg,
    "alexnet": alexnet,
    "vit": vit,
}


MANY: tuple[str, ...] = (
    "convnet-instance:16-32-64",
    "convnet-batch:16-32-64",
    "convnet-group:16-32-64",
    "resnet-batch:8-16-32",
    "vgg-batch:8-16-32-32-32",
    "vit:64-64",
)
"""Small networks of the kinds that people train: what `networks="many"` distils for."""


@dataclass(frozen=True)
class Kind:
    """A kind of network in words, such as `convnet-batch:32-64`: name, norm and widths, the last two as they come."""

    name: str
    norm: str | None = None
    widths: tuple[int, ...] | None = None

    @classmethod
    def parse(cls, text: str, widths: Sequence[int] | None = None) -> Kind:
        """The kind of this text; `widths` go before its own."""
        words, _, numbers = str(text).partition(":")
        name, _, norm = words.partition("-")
        if name not in NETWORKS or (norm and norm not in NORMS):
            raise ValueError(
                f"unknown network {text!r}; known: {', '.join(NETWORKS)}; norm and widths may follow, as in "
                f"convnet-batch:32-64 (norms: {', '.join(NORMS)})"
            )
        own = [int(part) if part.isdecimal() else part for part in numbers.split("-")] if numbers else None
        _check_widths(widths if widths is not None else own)
        used = widths if widths is not None else own
        return cls(name, norm or None, None if used is None else tuple(used))  # type: ignore[arg-type]

    def __str__(self) -> str:
        widths = "" if self.widths is None else ":" + "-".join(map(str, self.widths))
        return f"{self.name}{'' if self.norm is None else '-' + self.norm}{widths}"


def kinds(asked: str | Sequence[str]) -> tuple[str, ...]:
    """Kinds of networks as somebody names them: one, several, or `"many"` for those of `MANY`."""
    names = (asked,) if isinstance(asked, str) else tuple(asked)
    if not names:
        raise ValueError(
            f"networks must name at least one, such as convnet, got none; known: many, {', '.join(NETWORKS)}"
        )
    return MANY if names == ("many",) else tuple(str(Kind.parse(name)) for name in names)


def network(
    name: str, channels: int, num_classes: int, image_size: int, *, widths: Sequence[int] | None = None
) -> Network:
    """A maker of fresh networks by name, in float32 as images are, whatever the default is.

    Args:
        name: of `NETWORKS`; norm and widths may follow, as in `"resnet-batch:16-32"`.
        channels, num_classes, image_size: of the images, the last in pixels of a side.
        widths: channels of the blocks; the network's own if not said.
    """
    kind = Kind.parse(name, widths)
    make = partial(NETWORKS[kind.name], channels, num_classes, image_size)
    make = make if kind.widths is None else partial(make, widths=kind.widths)
    return partial(_float32, make if kind.norm is None else partial(make, norm=NORMS[kind.norm]))


def _float32(make: Network) -> nn.Module:
    return make().float()


def makers(network: Network | Sequence[Network]) -> tuple[Network, ...]:
    """One maker or several, as several."""
    found = (network,) if callable(network) else tuple(network)
    if not found or not all(callable(make) for make in found):
        got = "an empty list" if not found else repr(network)
        raise ValueError(f"network must be a function that makes one, or a list of such functions, got {got}")
    return found


def description(name: str, widths: Sequence[int] | None = None) -> dict[str, Any]:
    """A network of this file in plain values, for a coreset to record: `net`, `widths`, `depth` and `norm`."""
    kind = Kind.parse(name, widths)
    defaults = {key: p.default for key, p in inspect.signature(NETWORKS[kind.name]).parameters.items()}
    used = list(defaults["widths"] if kind.widths is None else kind.widths)
    norm = defaults["norm"] if kind.norm is None else NORMS[kind.norm]
    return {"net": kind.name, "widths": used, "depth": len(used), "norm": getattr(norm, "__name__", None)}


def _check_widths(widths: Sequence[Any] | None) -> None:
    if widths is None:
        return
    listed = isinstance(widths, (list, tuple)) and 0 < len(widths) <= 64
    if not listed or not all(type(width) is int and 0 < width <= 10_000 for width in widths):
        raise ValueError(f"widths must be 1 to 64 whole numbers from 1 to 10000, such as 32 64, got {widths}")


def fresh(make: Network, generator: torch.Generator) -> nn.Module:
    """A new network whose random weights come from `generator`; the global random state is left as it was."""
    seed = int(torch.randint(2**62, (), generator=generator))
    with seeded(seed, [torch.get_default_device()]):
        return make()
