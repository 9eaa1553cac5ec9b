"""Networks of timm and Hugging Face by name, made for small images: `timm:resnet18`, `hf:DIR`.

They start from random weights and take images as a coreset holds them, so nothing is downloaded and nothing rescaled.
"""

from __future__ import annotations

import difflib
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..extras import need
from ..randomness import seeded
from .networks import Network

_PATCHES = 4  # of a side at least, or a transformer sees next to nothing of where things are


def other_network(name: str, channels: int, num_classes: int, image_size: int) -> tuple[Network, str]:
    """A maker of the network that `name` stands for, and a line that says how it was made to fit.

    Args:
        name: `timm:MODEL`, with arguments of the model as in `timm:vit_tiny_patch16_224+depth=4`; or `hf:DIR`, a folder
            with the `config.json` of an image classifier.
        channels, num_classes, image_size: of the images, the last in pixels of a side.
    """
    library, _, rest = name.partition(":")
    make, note = {"timm": _timm, "hf": _huggingface}[library](rest, channels, num_classes, image_size)
    try:
        with seeded(0), torch.no_grad():
            shape = make().eval()(torch.zeros(2, channels, image_size, image_size)).shape
    except (RuntimeError, AssertionError, ValueError, TypeError, IndexError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{name} does not take images of {image_size} pixels with {channels} channel(s): {reason}; larger images "
            "(image_size), other arguments (timm:MODEL+img_size=32), or another network"
        ) from None
    if tuple(shape) != (2, num_classes):
        raise ValueError(f"{name} must give logits (n, {num_classes}), got {tuple(shape)} for n = 2")
    return make, f"{name}: {note}"


def is_other(name: str) -> bool:
    """Whether a name stands for a network of another library."""
    return name.partition(":")[0] in ("timm", "hf") and ":" in name


def _timm(text: str, channels: int, num_classes: int, image_size: int) -> tuple[Network, str]:
    timm = need("timm", extra="timm", what="networks called timm:...")
    model, *changes = text.split("+")
    if not timm.is_model(model):
        close = difflib.get_close_matches(model, timm.list_models(), 3) or timm.list_models("resnet1*")[:3]
        raise ValueError(f"timm has no model {model!r}; there are {', '.join(close)}, ... (timm.list_models())")
    small_stem = "small_stem" in changes
    settings: dict[str, Any] = {"num_classes": num_classes, "in_chans": channels}
    if timm.get_pretrained_cfg(model).fixed_input_size:
        settings["img_size"] = image_size
        if _patch_in(model) * _PATCHES > image_size:
            settings["patch_size"] = patch_size(image_size)
    settings |= _assignments([each for each in changes if each != "small_stem"])
    note = ", ".join(f"{key} {value}" for key, value in settings.items())
    make = partial(timm.create_model, model, pretrained=False, **settings)
    stem = "convolution at the start without stride and no pooling after it" if small_stem else "its own stem"
    return (partial(_with_small_stem, make) if small_stem else make), f"{note}; {stem}; random weights"


def _patch_in(model: str) -> int:
    """The patch size that a name of timm says, 0 if none."""
    _, found, rest = model.partition("patch")
    digits = rest.split("_")[0] if found else ""
    return int(digits) if digits.isdigit() else 0


def patch_size(image_size: int) -> int:
    """The largest patch that divides an image into at least four by four."""
    return max(size for size in range(1, image_size // _PATCHES + 1) if image_size % size == 0)


def _with_small_stem(make: Network) -> nn.Module:
    """A ResNet that keeps a small image at its size up to the first block. Costs 16 times as much."""
    model = make()
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    if first is None or not isinstance(getattr(model, "maxpool", None), nn.Module):
        raise ValueError(
            "small_stem is for networks with a convolution and a max pooling at the start, such as resnet18"
        )
    first.stride = (1, 1)
    model.maxpool = nn.Identity()
    return model


def _assignments(texts: list[str]) -> dict[str, Any]:
    values = {}
    for text in texts:
        name, equals, value = text.partition("=")
        try:
            values[name] = json.loads(value)
        except ValueError:
            equals = ""
        if not equals:
            raise ValueError(f"timm:MODEL+NAME=VALUE takes numbers, true or false, or small_stem, got {text!r}")
    return values


class _Logits(nn.Module):
    """A Hugging Face model that gives its logits and nothing else."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        logits: Tensor = self.model(pixel_values).logits
        return logits


def _huggingface(folder: str, channels: int, num_classes: int, image_size: int) -> tuple[Network, str]:
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(f"hf:DIR must be a folder with a config.json, got {folder!r}, which has none")
    transformers = need("transformers", extra="huggingface", what="networks called hf:...")
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    config.num_labels = num_classes
    wanted = {"num_channels": channels, "image_size": image_size}
    if getattr(config, "patch_size", None) and int(config.patch_size) * _PATCHES > image_size:
        wanted["patch_size"] = patch_size(image_size)
    settings = {name: value for name, value in wanted.items() if hasattr(config, name)}
    for name, value in settings.items():
        setattr(config, name, value)
    make = partial(transformers.AutoModelForImageClassification.from_config, config)
    said = ", ".join(f"{name} {value}" for name, value in ({"num_labels": num_classes} | settings).items())
    return (lambda: _Logits(make())), f"{config.model_type}, {said}; random weights"
