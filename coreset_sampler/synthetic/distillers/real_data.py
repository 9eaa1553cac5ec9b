"""Real examples in memory, as bytes where they are images, handed out in batches as a network sees them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Generator, Tensor

from ..preprocessing import Preprocessing


class RealData:
    """Inputs `(n, ...)` and targets. Bytes are pixels and become floats in [0, 1], then go through `preprocessing`.

    Only a batch is ever held as floats. Classes may be of any size, and batches have them as the data do.

    Args:
        inputs: `(n, ...)`, bytes or floats.
        targets: class numbers `(n,)` or soft `(n, num_classes)`.
        preprocessing: what a network sees of the inputs; as they are if not said.
        device: where batches are put.
    """

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor,
        *,
        preprocessing: Preprocessing | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        if not len(inputs) or len(inputs) != len(targets):
            raise ValueError(
                f"each input needs one target, got {len(inputs)} inputs and targets {tuple(targets.shape)}"
            )
        self.inputs, self.targets, self.preprocessing = inputs, targets, preprocessing
        self.device, self.n = device, len(inputs)

    def rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """These examples."""
        inputs, targets = self.inputs[rows].to(self.device), self.targets[rows].to(self.device)
        inputs = inputs.float() / 255 if inputs.dtype == torch.uint8 else inputs
        return inputs if self.preprocessing is None else self.preprocessing(inputs), targets

    def batch(self, size: int, generator: Generator) -> tuple[Tensor, Tensor]:
        """Different random examples, all of them if there are no more than `size`."""
        return self.rows(torch.randperm(self.n, generator=generator)[:size])

    def epoch(self, size: int, generator: Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """All examples once, in random batches."""
        for rows in torch.randperm(self.n, generator=generator).split(size):
            yield self.rows(rows)

    def segment(self, epochs: int, generator: Generator, kind: int) -> tuple[Tensor, Tensor]:
        """Real data alone have no experts."""
        raise ValueError("this method learns from experts: pass Experts(folder, data), made by train_experts")

    def per_class(self, count: int, generator: Generator) -> tuple[Tensor, Tensor]:
        """Random examples to begin a coreset with: `count` of each class, or all where a class has fewer."""
        if count < 1:
            raise ValueError(f"images per class must be at least 1, got {count}")
        labels = self.targets.argmax(-1) if self.targets.ndim == 2 else self.targets
        picks = []
        for label in labels.unique():
            members = (labels == label).nonzero().flatten()
            picks.append(members[torch.randperm(len(members), generator=generator)[:count]])
        return self.rows(torch.cat(picks))
