"""FRePo (Zhou et al. 2022): a flax checkpoint with `params/x_proto` `(n, h, w, c)` and `params/y_proto`."""

from __future__ import annotations

from torch import Tensor

from . import ask
from .published import Published
from .source import Source

name = "frepo"
layout = "a flax msgpack checkpoint of FRePo with params/x_proto and params/y_proto"

_NAMES = ("x_proto", "y_proto")


def recognise(source: Source) -> bool:
    """True if both are there and are arrays."""
    content = source.content
    params = content.get("params") if isinstance(content, dict) else None
    if not isinstance(params, dict) or not all(isinstance(params.get(key), Tensor) for key in _NAMES):
        return False
    return bool(params["x_proto"].ndim == 4)


def read(source: Source) -> Published:
    """Channels first; the labels are learned values for the squared error."""
    params = source.content["params"]
    images = params["x_proto"].permute(0, 3, 1, 2).float().contiguous()
    lines = ["FRePo's checkpoints do not name their data. MNIST and Fashion-MNIST were normalised:"]
    lines += [
        ask.normalize(source.path, images)
        if images.shape[1] == 1
        else ask.call(source.path, "Normalize(mean=..., std=...)")
    ]
    lines += [
        "All others were normalised and then whitened (CIFAR-10: mean=(0.4914, 0.4822, 0.4465), "
        "std=(0.2470, 0.2435, 0.2616)):"
    ]
    lines += [ask.zca(source.path, images, "B", first=", first=Normalize(mean=..., std=...)")]
    return Published(
        images,
        params["y_proto"].float(),
        "regression",
        ask="\n".join(lines),
        method="FRePo",
        num_classes=params["y_proto"].shape[1] if params["y_proto"].ndim == 2 else None,
        provenance={"file": source.path.name},
    )
