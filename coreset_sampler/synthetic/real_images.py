"""As many real images as a coreset stores, at random or by herding: what a learned set has to beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from .dataset import SyntheticCoreset
from .image_data import ImageData
from .tiles import pack

PICKS = ("random", "herding", "random-packed")
"""Ways to pick real images to compare with."""

PACKED = "random-packed"


@dataclass(frozen=True)
class RealImages:
    """Training images picked as many per class as a coreset stores, in the coreset's own clothes.

    Args:
        data: to pick from its training images.
        like: whose size, preprocessing and settings of the closed form to take.
        how: `"random"`, other images for each seed; `"herding"`, always the same; or `"random-packed"`, as many random
            ones as the coreset has examples, shrunk and packed as its own are.
    """

    data: ImageData
    like: SyntheticCoreset
    how: str

    def __post_init__(self) -> None:
        if self.how not in PICKS:
            raise ValueError(f"against must be of {', '.join(PICKS)}, got {self.how!r}")
        if self.how == PACKED and self.like.tiles == 1:
            raise ValueError(
                f"against={PACKED!r} is for coresets with several examples in a stored image (tiles > 1), this one has one; "
                "pass 'random'"
            )

    @property
    def size(self) -> str:
        """How many images these are, in words."""
        count, stored = sum(self._counts()), len(self.like.stored)
        return f"{count} real images" + (f", shrunk into {stored}" if self.how == PACKED else "")

    def coreset(self, seed: int) -> SyntheticCoreset:
        """The images of this seed, with class numbers for targets."""
        pixels, labels = self.data.train
        generator = torch.Generator().manual_seed(seed)
        rows = torch.cat([self._of_class(c, count, generator) for c, count in enumerate(self._counts())])
        inputs = self.like.preprocessing(pixels[rows].float() / 255)
        tiles = self.like.tiles if self.how == PACKED else 1
        return SyntheticCoreset(
            pack(inputs, tiles),
            labels[rows],
            preprocessing=self.like.preprocessing,
            class_names=self.like.class_names,
            num_classes=self.data.num_classes,
            method=self.how,
            last_layer=self.like.last_layer,
            provenance={"data": self.data.name, "made": f"real training images, {self.how}", "seed": seed},
            tiles=tiles,
        )

    def _counts(self) -> list[int]:
        """Images of each class: as many as the coreset stores, or has examples, dealt out evenly."""
        whole, rest = divmod(len(self.like if self.how == PACKED else self.like.stored), self.data.num_classes)
        return [whole + (c < rest) for c in range(self.data.num_classes)]

    def _of_class(self, label: int, count: int, generator: Generator) -> Tensor:
        members = (self.data.train[1] == label).nonzero().flatten()
        if len(members) < count:
            name = self.data.class_names[label]
            raise ValueError(f"against needs {count} training images of class {name!r}, the data have {len(members)}")
        if self.how != "herding":
            return members[torch.randperm(len(members), generator=generator)[:count]]
        return members[herded(self.data.train[0][members].flatten(1).float() / 255, count)]


def herded(vectors: Tensor, count: int) -> Tensor:
    """Numbers of the vectors `(n, d)` whose mean, taken greedily, stays closest to the mean of all (Welling 2009)."""
    mean, total = vectors.mean(0), torch.zeros_like(vectors[0])
    free = torch.ones(len(vectors), dtype=torch.bool, device=vectors.device)
    chosen: list[int] = []
    for picked in range(1, count + 1):
        distance = ((total + vectors) / picked - mean).square().sum(1)
        chosen.append(int(distance.masked_fill(~free, torch.inf).argmin()))
        free[chosen[-1]] = False
        total = total + vectors[chosen[-1]]
    return torch.tensor(chosen)
