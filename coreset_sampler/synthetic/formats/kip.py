"""KIP (Nguyen et al. 2021): `{arch}_ssize{n}_{zca}_{l}_{aug}_ckpt{t}.npz`.

`images` are `(n, h, w, c)`, `labels` `(n, num_classes)`.
"""

from __future__ import annotations

import re

from torch import Tensor

from . import ask
from .published import Published
from .source import Source

name = "kip"
layout = "{arch}_ssize{n}_{zca}_{l}_{aug}_ckpt{t}.npz of KIP: 'images' (n, h, w, c), 'labels' (n, num_classes)"

_FILE = re.compile(
    r"(?P<arch>.+)_ssize(?P<size>\d+)_(?P<zca>zca|nozca)_(?P<labels>l|nol)_(?P<aug>aug|noaug)_ckpt(?P<step>\d+)"
)


def recognise(source: Source) -> bool:
    """True for channels-last images with one row of float labels each."""
    content = source.content
    if not isinstance(content, dict) or content.keys() != {"images", "labels"}:
        return False
    images, labels = content["images"], content["labels"]
    if not isinstance(images, Tensor) or not isinstance(labels, Tensor) or images.ndim != 4:
        return False
    return (
        labels.ndim == 2 and labels.is_floating_point() and images.shape[3] in (1, 3) and images.shape[1] not in (1, 3)
    )


def read(source: Source) -> Published:
    """Channels first; the labels are what kernel regression fits, centred one-hots or learned."""
    images = source.content["images"].permute(0, 3, 1, 2).float().contiguous()
    found = _FILE.match(source.path.name)
    named = found.groupdict() if found else {}
    return Published(
        images,
        source.content["labels"].float(),
        "regression",
        ask=_ask(source, images, named.get("zca")),
        method="KIP",
        num_classes=source.content["labels"].shape[1],
        provenance={"file": source.path.name} | named,
    )


def _ask(source: Source, images: Tensor, whitened: str | None) -> str:
    lines = []
    if whitened != "nozca":
        lines += ["Made with zca (KIP normalises each image first):", ask.zca(source.path, images, "C")]
    if whitened != "zca":
        lines += ["Made with nozca, which is per channel by the training set's mean and std:"]
        lines += [
            ask.call(source.path, "Normalize(mean=train_pixels.mean((0, 2, 3)), std=train_pixels.std((0, 2, 3)))")
        ]
    return "\n".join(lines)
