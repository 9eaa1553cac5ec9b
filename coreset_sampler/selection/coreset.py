"""What a selection returns: which examples, and how many others each stands for."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


def own_storage(tensor: Tensor) -> Tensor:
    """The tensor, copied if it is a part of a larger one, all of which would be kept and saved with it."""
    partial = tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    return tensor.clone() if partial else tensor


@dataclass(frozen=True, eq=False)
class Coreset:
    """Examples that stand for all others, and how many each stands for.

    Args:
        indices: `(size,)` distinct positions in the full data.
        weights: `(size,)` the number of examples that each stands for: non-negative, with the number of examples covered
            as their sum.
    """

    indices: Tensor
    weights: Tensor

    def __post_init__(self) -> None:
        indices = torch.as_tensor(self.indices).to("cpu", torch.int64)
        weights = torch.as_tensor(self.weights).to("cpu", torch.float64)
        if indices.ndim != 1 or indices.shape != weights.shape:
            raise ValueError(
                f"indices and weights must be vectors of one length, got shapes {tuple(indices.shape)} "
                f"and {tuple(weights.shape)}"
            )
        ranked = np.sort(indices.numpy())
        if len(ranked) and (ranked[0] < 0 or (ranked[1:] == ranked[:-1]).any()):
            raise ValueError("indices must be distinct and non-negative; Coreset.merge adds up repeated ones")
        if len(weights) and not (weights.min() >= 0 and weights.max() < math.inf):  # NaN is neither
            raise ValueError("weights must be finite and non-negative")
        object.__setattr__(self, "indices", own_storage(indices))
        object.__setattr__(self, "weights", own_storage(weights))

    def __len__(self) -> int:
        return len(self.indices)

    @classmethod
    def merge(cls, parts: Iterable[Coreset]) -> Coreset:
        """One coreset out of several; an example kept by more than one of them adds up its weights."""
        parts = list(parts)
        if not parts:
            return cls(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.float64))
        indices = torch.cat([part.indices for part in parts])
        distinct, where = torch.unique(indices, return_inverse=True)
        weights = torch.zeros(len(distinct), dtype=torch.float64)
        weights.index_add_(0, where, torch.cat([part.weights for part in parts]))
        return cls(distinct, weights)

    def overlap(self, other: Coreset) -> float:
        """The share of these examples that `other` keeps too."""
        both = np.intersect1d(self.indices.numpy(), other.indices.numpy(), assume_unique=True)
        return len(both) / len(self) if len(self) else 0.0
