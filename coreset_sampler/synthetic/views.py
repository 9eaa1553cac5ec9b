"""Views: many labelled examples out of each stored image, moved, mirrored and mixed with another one.

A hundred images have room for a hundred labels. What a teacher says of 6,400 mixtures of them tells a new network far more
of what the teacher knows. Only the labels are stored: views are made from images and a seed, the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .per_image import moved

MOST_VIEWS = 1024
"""Of an image. A file of a megabyte must not ask for gigabytes."""

_COLUMNS = 7  # random numbers that a view is made of


@dataclass(frozen=True)
class Views:
    r"""How examples are made of stored images: `count` of each, and no other random numbers than the seed's.

    A view moves its image $x_i$ by up to an eighth of the sides, mirrors it every other time, does the same to a partner
    $x_j$ drawn from all images, and mixes the two. The first view and every second one after it *blends* them,
    $\lambda x_i + (1 - \lambda) x_j$ with $\lambda \in [1/2, 1)$; the others *paste* the partner over one side of the
    image, a quarter to three quarters of it wide.

    The numbers are those of numpy's Philox generator, whose stream does not change between versions (docs/file_format.md).

    Args:
        count: examples per image.
        seed: of all views.
        mirror: not for digits and letters, whose class it changes.

    Example:
        >>> Views(64)(torch.rand(100, 1, 28, 28)).shape
        torch.Size([6400, 1, 28, 28])
    """

    count: int = 64
    seed: int = 0
    mirror: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or not 1 <= self.count <= MOST_VIEWS:
            raise ValueError(f"views must be an integer from 1 to {MOST_VIEWS} for each image, got {self.count!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise ValueError(f"the seed of views must be an integer from 0 to 2**63 - 1, got {self.seed!r}")
        if not isinstance(self.mirror, bool):
            raise ValueError(f"mirror must be True or False, got {self.mirror!r}")

    def __call__(self, images: Tensor) -> Tensor:
        """The views of `(n, c, h, w)`: `(n * count, c, h, w)`, differentiable in the images.

        Example `i * count + v` is view `v` of image `i`.
        """
        return torch.cat(list(self.parts(images)))

    def parts(self, images: Tensor, at_once: int = 1024) -> Iterator[Tensor]:
        """The same, so many at once: what making them takes besides is then little."""
        raw = np.random.Philox(key=self.seed).random_raw(len(images) * self.count * _COLUMNS) >> np.uint64(16)
        numbers = torch.from_numpy(raw.reshape(-1, _COLUMNS).astype(np.int64))
        examples = torch.arange(len(numbers))
        for some, rows in zip(numbers.split(at_once), examples.split(at_once), strict=True):
            drawn = self._drawn(some, *images.shape[-2:])
            own = _shown(images, rows // self.count, drawn.own)
            other = _shown(images, drawn.partner % len(images), drawn.other)
            blends = (rows % self.count % 2 == 0)[:, None, None]
            share = torch.where(blends, drawn.share[:, None, None].expand_as(drawn.kept), drawn.kept)
            share = share[:, None].to(images)
            yield share * own + (1 - share) * other

    def state(self) -> dict[str, Any]:
        """As a file says it."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Views:
        """What a file said; a file may say anything."""
        if set(state) != {"count", "seed", "mirror"}:
            raise ValueError(
                f"views must say count, seed and mirror, got {', '.join(map(str, state))[:80] or 'nothing'}"
            )
        return cls(**state)

    def _drawn(self, numbers: Tensor, height: int, width: int) -> _Drawn:
        """What random numbers `(views, 7)` say of each view."""
        bits, amount = numbers[:, 2], numbers[:, 6] % 256
        turned = [
            (bits >> place) % 2 == 1 if self.mirror else torch.zeros(len(bits), dtype=torch.bool) for place in (0, 1)
        ]
        own, other = (
            _Place(_offset(numbers[:, at], height), _offset(numbers[:, at + 1], width), turn)
            for at, turn in zip((0, 4), turned, strict=True)
        )
        return _Drawn(own, other, numbers[:, 3], 0.5 + amount / 512, _kept(bits >> 2, amount, height, width))


def keep_class_mirrored(class_names: Sequence[str] | None) -> bool:
    """Whether mirrored images keep their class: not those of digits and letters, whose names are single characters."""
    return not (class_names is not None and all(len(name) == 1 for name in class_names))


class _Place(NamedTuple):
    """Where and how an image is shown: rows and columns that it is moved by, and whether it is mirrored; `(views,)`."""

    down: Tensor
    right: Tensor
    mirrored: Tensor


class _Drawn(NamedTuple):
    """All of each view: two places, the partner's number, the share if it blends, what is `kept` if it pastes."""

    own: _Place
    other: _Place
    partner: Tensor
    share: Tensor
    kept: Tensor


def _offset(numbers: Tensor, side: int) -> Tensor:
    most = max(1, round(side / 8))
    return numbers % (2 * most + 1) - most


def _kept(bits: Tensor, amount: Tensor, height: int, width: int) -> Tensor:
    """1 where a view that pastes shows its own image, `(views, height, width)`: all but a strip along one side."""
    upright, far = bits % 2 == 1, (bits >> 1) % 2 == 1
    lines = []
    for side in (height, width):
        strip = (side * (64 + amount // 2) // 256)[:, None]  # 1/4 to 3/4
        place = torch.arange(side).expand(len(bits), side)
        lines.append(torch.where(far[:, None], place < side - strip, place >= strip))
    rows, columns = lines[0][:, :, None], lines[1][:, None, :]
    return torch.where(upright[:, None, None], rows, columns).float()


def _shown(images: Tensor, rows: Tensor, place: _Place) -> Tensor:
    """These of the images, moved and mirrored."""
    seen = moved(images[rows.to(images.device)], place.down, place.right)
    return torch.where(place.mirrored.to(images.device)[:, None, None, None], seen.flip(-1), seen)
