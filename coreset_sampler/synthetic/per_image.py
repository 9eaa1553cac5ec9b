"""Random changes to a training batch, drawn for each image by itself: shifts, flips, and images mixed in pairs.

A network that learns from a hundred images sees each of them many times, so no two visits should look the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Generator, Tensor
from torch.nn import functional

Change = Callable[[Tensor, Generator], Tensor]
"""Images `(n, c, h, w)` to images of the same shape."""


def shift(images: Tensor, generator: Generator) -> Tensor:
    """Each image moved by up to an eighth of its sides; its border is repeated where pixels are missing.

    No value that is not in the image comes in, so it does not matter how pixels were normalised.
    """
    n, _, height, width = images.shape
    rows, columns = (_moved(n, side, generator).to(images.device) for side in (height, width))
    number = torch.arange(n, device=images.device)[:, None, None]
    return images.permute(0, 2, 3, 1)[number, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def _moved(n: int, side: int, generator: Generator) -> Tensor:
    """Where each line of each moved image is taken from, `(n, side)`."""
    most = max(1, round(side / 8))
    offsets = torch.randint(-most, most + 1, (n, 1), generator=generator)
    return (torch.arange(side) + offsets).clamp(0, side - 1)


def flip(images: Tensor, generator: Generator) -> Tensor:
    """About half of the images with left and right exchanged."""
    turned = (torch.rand(len(images), generator=generator) < 0.5).to(images.device)
    return torch.where(turned[:, None, None, None], images.flip(-1), images)


CHANGES: dict[str, Change] = {"shift": shift, "flip": flip}


def changed(images: Tensor, names: Sequence[str], generator: Generator) -> Tensor:
    """The images after each of these changes in turn."""
    for name in names:
        images = CHANGES[name](images, generator)
    return images


def mixed(images: Tensor, targets: Tensor, alpha: float, generator: Generator) -> tuple[Tensor, Tensor]:
    r"""Each image blended with another of the batch, and its target with the other's: mixup (Zhang et al. 2018).

    $x_i \leftarrow \lambda_i x_i + (1-\lambda_i) x_{\pi(i)}$ with $\lambda_i \sim \mathrm{Beta}(\alpha, \alpha)$, one for
    each image. Targets are floats `(n, k)`.
    """
    partner = torch.randperm(len(images), generator=generator).to(images.device)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(torch.randint(2**62, (), generator=generator)))
        share = torch.distributions.Beta(alpha, alpha).sample((len(images),)).to(images)
    of_image, of_target = share[:, None, None, None], share[:, None]
    mixed_targets = of_target * targets + (1 - of_target) * targets[partner]
    return of_image * images + (1 - of_image) * images[partner], mixed_targets


def one_hot(labels: Tensor, num_classes: int) -> Tensor:
    """Class numbers as probabilities, which can be mixed."""
    return functional.one_hot(labels.long(), num_classes).float()
