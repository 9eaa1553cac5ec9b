"""Random changes to a training batch, drawn for each image by itself: moved, mirrored, cut, and mixed in pairs.

A network that learns from a hundred images sees each of them many times, so no two visits should look the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Generator, Tensor
from torch.nn import functional

from ..randomness import seeded

Change = Callable[[Tensor, Generator], Tensor]
"""Images `(n, c, h, w)` to images of the same shape."""


def shift(images: Tensor, generator: Generator) -> Tensor:
    """Each image moved by up to an eighth of its sides; its border is repeated where pixels are missing.

    No value that is not in the image comes in, so it does not matter how pixels were normalised.
    """
    n, _, height, width = images.shape
    return moved(images, *(_offsets(n, side, generator) for side in (height, width)))


def _offsets(n: int, side: int, generator: Generator) -> Tensor:
    most = max(1, round(side / 8))
    return torch.randint(-most, most + 1, (n, 1), generator=generator)[:, 0]


def moved(images: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Each image with its lines taken from so many `(n,)` further down and to the right, borders repeated."""
    rows, columns = (
        (torch.arange(side) + offsets[:, None]).clamp(0, side - 1).to(images.device)
        for side, offsets in zip(images.shape[-2:], (down, right), strict=True)
    )
    number = torch.arange(len(images), device=images.device)[:, None, None]
    shown = images.permute(0, 2, 3, 1)[number, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    # not contiguous(): with one channel that keeps strides which convolutions take for channels last, and InstanceNorm in
    # bf16 is then five times slower
    return shown.clone(memory_format=torch.contiguous_format)


def flip(images: Tensor, generator: Generator) -> Tensor:
    """About half of the images with left and right exchanged."""
    turned = (torch.rand(len(images), generator=generator) < 0.5).to(images.device)
    return torch.where(turned[:, None, None, None], images.flip(-1), images)


def scale(images: Tensor, generator: Generator) -> Tensor:
    """Each image enlarged or shrunk about its centre by up to a quarter, height and width apart; borders are repeated."""
    factors = torch.rand(len(images), 2, generator=generator) * 0.45 + 0.8  # 0.8 to 1.25: what a side of the view spans
    grid = torch.diag_embed(factors).to(images)
    view = functional.affine_grid(functional.pad(grid, (0, 1)), list(images.shape), align_corners=False)
    return functional.grid_sample(images, view, padding_mode="border", align_corners=False)


def cutout(images: Tensor, generator: Generator) -> Tensor:
    """A square of half a side somewhere in each image takes the image's mean colour (DeVries and Taylor 2017)."""
    n, _, height, width = images.shape
    inside = _boxes(n, height, width, torch.full((n, 1), 0.5), generator).to(images.device)
    return torch.where(inside[:, None], images.mean((2, 3), keepdim=True), images)


def _boxes(n: int, height: int, width: int, shares: Tensor, generator: Generator) -> Tensor:
    """True inside a box of each image, `(n, height, width)`: centred anywhere, of so large a share `(n, 1)` of each side."""
    lines = []
    for side in (height, width):
        centre = torch.rand(n, 1, generator=generator) * side
        place = torch.arange(side) + 0.5
        lines.append((place - centre).abs() < shares * side / 2)
    return lines[0][:, :, None] & lines[1][:, None, :]


CHANGES: dict[str, Change] = {"shift": shift, "flip": flip, "scale": scale, "cutout": cutout}


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
    share = _shares(len(images), alpha, generator).to(images)
    of_image, of_target = share[:, None, None, None], share[:, None].to(targets)
    mixed_targets = of_target * targets + (1 - of_target) * targets[partner]
    return of_image * images + (1 - of_image) * images[partner], mixed_targets


def pasted(images: Tensor, targets: Tensor, alpha: float, generator: Generator) -> tuple[Tensor, Tensor]:
    r"""A box of each image replaced by the same box of another, targets mixed by area: cutmix (Yun et al. 2019).

    The box spans $\sqrt{1-\lambda_i}$ of each side, $\lambda_i \sim \mathrm{Beta}(\alpha, \alpha)$, one for each image,
    and is cut at the border; what is left of it counts. Targets are floats `(n, k)`.
    """
    n, _, height, width = images.shape
    partner = torch.randperm(n, generator=generator).to(images.device)
    sides = (1 - _shares(n, alpha, generator)).sqrt()[:, None]
    inside = _boxes(n, height, width, sides, generator).to(images.device)
    area = inside.flatten(1).float().mean(1)[:, None].to(targets)
    return torch.where(inside[:, None], images[partner], images), (1 - area) * targets + area * targets[partner]


def _shares(n: int, alpha: float, generator: Generator) -> Tensor:
    """Draws of a symmetric beta distribution; torch has none that takes a generator."""
    with seeded(int(torch.randint(2**62, (), generator=generator))):
        return torch.distributions.Beta(alpha, alpha).sample((n,))


def one_hot(labels: Tensor, num_classes: int) -> Tensor:
    """Class numbers as probabilities, which can be mixed."""
    return functional.one_hot(labels.long(), num_classes).float()
