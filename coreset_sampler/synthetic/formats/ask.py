"""What to write when a file does not say how its inputs were preprocessed.

Never guessed: a wrong guess trains to chance.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

# Means and deviations that the released distillation code normalises with, by input shape.
_USUAL: dict[tuple[int, ...], str] = {
    (1, 28, 28): "Normalize(mean=0.1307, std=0.3081)  # MNIST there; Fashion-MNIST: mean=0.2861, std=0.3530",
    (
        3,
        32,
        32,
    ): "Normalize(mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010))  # their CIFAR values",
    (3, 64, 64): "Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))  # their ImageNet values",
    (
        3,
        128,
        128,
    ): "Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))  # their ImageNet values",
}


def call(path: Path, preprocessing: str) -> str:
    """A line to copy."""
    value, _, comment = preprocessing.partition("  # ")
    return f"    read_published({str(path)!r}, preprocessing={value})" + (f"  # {comment}" if comment else "")


def normalize(path: Path, inputs: Tensor) -> str:
    """The line for channel means and deviations, with those usual for this shape filled in."""
    return call(path, _USUAL.get(tuple(inputs.shape[1:]), "Normalize(mean=..., std=...)"))


def zca(path: Path, inputs: Tensor, convention: str, *, first: str = "") -> str:
    """The line for whitening."""
    shape = "(n, " + ", ".join(map(str, inputs.shape[1:])) + ")"
    value = f'ZCA.fit(train_pixels, convention="{convention}"{first})'
    return call(path, f"{value}  # train_pixels: the training images, {shape} in [0, 1]")


def raw(path: Path) -> str:
    """The line for plain pixels."""
    return call(path, "Raw()  # pixels in [0, 1], or inputs that are not images")
