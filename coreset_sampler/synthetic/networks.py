"""Small classifiers of the distillation literature, for images of any size. Bring your own instead: any module will do."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

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


NETWORKS: dict[str, Callable[..., nn.Module]] = {"convnet": convnet, "resnet": resnet, "vgg": vgg, "alexnet": alexnet}


def network(
    name: str, channels: int, num_classes: int, image_size: int, *, widths: Sequence[int] | None = None
) -> Network:
    """A maker of fresh networks by name.

    Args:
        name: of `NETWORKS`.
        channels, num_classes, image_size: of the images, the last in pixels of a side.
        widths: channels of the blocks; the network's own if not said.
    """
    _check(name, widths)
    make = partial(NETWORKS[name], channels, num_classes, image_size)
    return make if widths is None else partial(make, widths=tuple(widths))


def description(name: str, widths: Sequence[int] | None = None) -> dict[str, Any]:
    """A network of this file in plain values, for a coreset to record: `net`, `widths`, `depth` and `norm`."""
    _check(name, widths)
    defaults = {key: p.default for key, p in inspect.signature(NETWORKS[name]).parameters.items()}
    widths = list(defaults["widths"] if widths is None else widths)
    return {"net": name, "widths": widths, "depth": len(widths), "norm": getattr(defaults["norm"], "__name__", None)}


def _check(name: str, widths: Sequence[int] | None) -> None:
    if name not in NETWORKS:
        raise ValueError(f"unknown network {name!r}; known: {', '.join(NETWORKS)}")
    if widths is None:
        return
    listed = isinstance(widths, (list, tuple)) and 0 < len(widths) <= 64
    if not listed or not all(type(width) is int and 0 < width <= 10_000 for width in widths):
        raise ValueError(f"widths must be 1 to 64 whole numbers from 1 to 10000, such as 32 64, got {widths}")


def fresh(make: Network, generator: torch.Generator) -> nn.Module:
    """A new network whose random weights come from `generator`; the global random state is left as it was."""
    seed = int(torch.randint(2**62, (), generator=generator))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()
