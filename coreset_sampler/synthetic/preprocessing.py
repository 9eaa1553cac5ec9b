"""What was done to the pixels before a coreset was made, and so what must be done to test images too.

Each of these is called on pixels in [0, 1] and gives what the coreset holds, so it serves as the last step of
a transform for test data. `invert` goes back exactly, `look` to something in [0, 1] that can be shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor


class Preprocessing(Protocol):
    """Pixels in [0, 1], `(c, h, w)` or `(n, c, h, w)`, to model inputs and back."""

    kind: ClassVar[str]

    def __call__(self, pixels: Tensor) -> Tensor:
        """What a model trained on the coreset expects for these pixels."""

    def invert(self, inputs: Tensor) -> Tensor:
        """The pixels, neither clamped nor rounded: distilled images often leave [0, 1]."""

    def look(self, inputs: Tensor) -> Tensor:
        """Something in [0, 1] to look at."""

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What a file stores: plain values, and tensors."""


@dataclass(frozen=True)
class Raw:
    """Inputs as they are: images as pixels in [0, 1] (or bytes), text and tables untouched."""

    kind: ClassVar[str] = "raw"

    def __call__(self, pixels: Tensor) -> Tensor:
        """The pixels."""
        return pixels

    def invert(self, inputs: Tensor) -> Tensor:
        """The inputs."""
        return inputs

    def look(self, inputs: Tensor) -> Tensor:
        """The inputs, clamped."""
        return inputs.clamp(0, 1)

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Nothing but the kind."""
        return {"kind": self.kind}, {}


@dataclass(frozen=True)
class Normalize:
    """Subtracts `mean` and divides by `std`, one of each per channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    kind: ClassVar[str] = "normalize"

    def __post_init__(self) -> None:
        mean, std = _floats("mean", self.mean), _floats("std", self.std)
        if len(mean) != len(std):
            raise ValueError(f"mean and std must have one value per channel each, got {mean} and {std}")
        if min(std) <= 0:
            raise ValueError(f"std must be positive, got {std}")
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "std", std)

    def _broadcast(self, values: Tensor) -> tuple[Tensor, Tensor]:
        if values.ndim < 3 or values.shape[-3] != len(self.mean):
            raise ValueError(
                f"Normalize with {len(self.mean)} channel(s) takes images (..., {len(self.mean)}, h, w), "
                f"got shape {tuple(values.shape)}"
            )
        mean, std = (torch.tensor(each, dtype=torch.float64) for each in (self.mean, self.std))
        return mean[:, None, None].to(values), std[:, None, None].to(values)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Normalised pixels."""
        mean, std = self._broadcast(pixels)
        return (pixels - mean) / std

    def invert(self, inputs: Tensor) -> Tensor:
        """The pixels before normalising."""
        mean, std = self._broadcast(inputs)
        return inputs * std + mean

    def look(self, inputs: Tensor) -> Tensor:
        """The pixels, clamped."""
        return self.invert(inputs).clamp(0, 1)

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Both lists."""
        return {"kind": self.kind, "mean": list(self.mean), "std": list(self.std)}, {}


@dataclass(frozen=True, eq=False)
class ZCA:
    r"""Whitens: $z = (x - m) W$ with $W = U (S + \epsilon)^{-1/2} U^T$ of the training images' covariance.

    Three conventions are in use, and a set whitened by one trains to chance under another:

    - `"A"` (MTT, DATM, BPC): pixels in [0, 1]; $\epsilon = 0.1$; covariance over n - 1.
    - `"B"` (FRePo): pixels normalised per channel by `first`; $\epsilon = 0.1\,\mathrm{tr}(C)/d$; over n.
    - `"C"` (KIP): each image less its own mean and scaled to unit norm; $\epsilon = 0.1\,\mathrm{tr}(C)/d$,
      C the uncentred second moment over n. Brightness and contrast are lost: `invert` refuses.

    `matrix` `(d, d)` and `mean` `(d,)` act on images flattened as `(c, h, w)`. `ZCA.fit` makes them; a matrix
    from JAX code acts on `(h, w, c)` and must be permuted first.
    """

    convention: str
    matrix: Tensor
    mean: Tensor | None = None
    first: Normalize | None = None
    kind: ClassVar[str] = "zca"

    def __post_init__(self) -> None:
        if self.convention not in ("A", "B", "C"):
            raise ValueError(
                f"convention must be 'A' (MTT, DATM, BPC), 'B' (FRePo) or 'C' (KIP), got {self.convention!r}"
            )
        if self.matrix.ndim != 2 or self.matrix.shape[0] != self.matrix.shape[1]:
            raise ValueError(f"matrix must be square, (c*h*w, c*h*w), got shape {tuple(self.matrix.shape)}")
        if (self.mean is None) != (self.convention == "C"):
            raise ValueError(f"conventions A and B need mean (c*h*w,), C has none; got convention {self.convention}")
        if self.mean is not None and self.mean.shape != self.matrix.shape[:1]:
            raise ValueError(f"mean must have shape ({len(self.matrix)},), got {tuple(self.mean.shape)}")
        if self.convention == "B" and self.first is None:
            raise ValueError("convention B normalises per channel first: pass first=Normalize(mean=..., std=...)")
        for name, values in (("matrix", self.matrix), ("mean", self.mean)):
            if values is not None and not bool(torch.isfinite(values).all()):
                raise ValueError(f"{name} must be finite")

    @classmethod
    def fit(cls, pixels: Tensor, *, convention: str = "A", first: Normalize | None = None) -> ZCA:
        """The whitening of training images `(n, c, h, w)` in [0, 1].

        Costs n d^2 for the covariance and d^3 for its eigenvectors, d = c h w: about a minute for CIFAR-10.
        """
        if pixels.ndim != 4 or not pixels.is_floating_point():
            raise ValueError(f"pixels must be floats (n, c, h, w) in [0, 1], got {pixels.dtype} {tuple(pixels.shape)}")
        n, d = len(pixels), pixels[0].numel()
        probe = cls(convention, torch.zeros(d, d), None if convention == "C" else torch.zeros(d), first)
        total, second = torch.zeros(d, dtype=torch.float64), torch.zeros(d, d, dtype=torch.float64)
        for chunk in pixels.split(4096):
            flat = probe._before(chunk).flatten(1).double()
            total += flat.sum(0)
            second += flat.T @ flat
        if convention == "C":
            mean, covariance = None, second / n
        else:
            mean = total / n
            covariance = (second - n * torch.outer(mean, mean)) / (n - 1 if convention == "A" else n)
        extra = 0.1 if convention == "A" else 0.1 * float(covariance.trace()) / d
        values, vectors = torch.linalg.eigh(covariance)
        matrix = (vectors * (values.clamp(min=0) + extra).rsqrt()) @ vectors.T
        return cls(convention, matrix.float(), None if mean is None else mean.float(), first)

    def _before(self, pixels: Tensor) -> Tensor:
        """What precedes whitening."""
        if self.first is not None:
            pixels = self.first(pixels)
        if self.convention == "C":
            pixels = pixels - pixels.mean((-3, -2, -1), keepdim=True)
            pixels = pixels / pixels.flatten(-3).norm(dim=-1).clamp(min=1e-12)[..., None, None, None]
        return pixels

    def _check(self, images: Tensor) -> None:
        if images.ndim < 3 or images.shape[-3:].numel() != len(self.matrix):
            raise ValueError(f"this ZCA is for images of {len(self.matrix)} values, got shape {tuple(images.shape)}")

    def __call__(self, pixels: Tensor) -> Tensor:
        """Whitened pixels."""
        self._check(pixels)
        flat = self._before(pixels).flatten(-3)
        if self.mean is not None:
            flat = flat - self.mean.to(flat)
        return (flat @ self.matrix.to(flat)).reshape(pixels.shape)

    def _unwhiten(self, inputs: Tensor) -> Tensor:
        self._check(inputs)
        flat = inputs.flatten(-3)
        # float64: whitening matrices have condition numbers in the hundreds
        matrix = self.matrix.to(flat.device, torch.float64)
        flat = torch.linalg.solve(matrix.T, flat.double().reshape(-1, len(matrix)).T).T
        if self.mean is not None:
            flat = flat + self.mean.to(flat)
        return flat.to(inputs.dtype).reshape(inputs.shape)

    def invert(self, inputs: Tensor) -> Tensor:
        """The pixels before whitening; convention C cannot."""
        if self.convention == "C":
            raise ValueError(
                "ZCA convention C (KIP) discards each image's brightness and contrast, so pixels are lost. "
                "Train on the coreset as it is and pass test images through coreset.preprocessing."
            )
        pixels = self._unwhiten(inputs)
        return pixels if self.first is None else self.first.invert(pixels)

    def look(self, inputs: Tensor) -> Tensor:
        """The pixels, clamped; for convention C each image stretched to [0, 1]."""
        if self.convention != "C":
            return self.invert(inputs).clamp(0, 1)
        images = self._unwhiten(inputs)
        low, high = images.amin((-3, -2, -1), keepdim=True), images.amax((-3, -2, -1), keepdim=True)
        return (images - low) / (high - low).clamp(min=1e-12)

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The convention and `first`; matrix and mean as tensors."""
        tensors = {"matrix": self.matrix} | ({} if self.mean is None else {"mean": self.mean})
        first = None if self.first is None else self.first.state()[0]
        return {"kind": self.kind, "convention": self.convention, "first": first}, tensors


def from_state(values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Preprocessing:
    """The preprocessing that `state` described."""
    kind = values.get("kind")
    if kind == Raw.kind:
        return Raw()
    if kind == Normalize.kind:
        return Normalize(values["mean"], values["std"])
    if kind == ZCA.kind:
        first = values.get("first")
        normalize = None if first is None else Normalize(first["mean"], first["std"])
        return ZCA(values["convention"], tensors["matrix"], tensors.get("mean"), normalize)
    raise ValueError(f"preprocessing kind must be one of raw, normalize, zca, got {kind!r}")


def _floats(name: str, values: float | Iterable[float]) -> tuple[float, ...]:
    if isinstance(values, (int, float)):
        values = (values,)
    floats = tuple(float(value) for value in values)
    if not floats or not all(abs(value) < float("inf") for value in floats):
        raise ValueError(f"{name} must hold one finite number per channel, got {floats}")
    return floats


def packed(inputs: Tensor, preprocessing: Preprocessing) -> Tensor:
    """The bytes that normalised images were, a quarter of the size, if they come back from these bit for bit."""
    if not isinstance(preprocessing, Normalize) or inputs.dtype != torch.float32 or inputs.ndim < 4:
        return inputs
    if inputs.shape[-3] != len(preprocessing.mean):
        return inputs  # no images of these channels
    pixels = (preprocessing.invert(inputs) * 255).round().clamp(0, 255).to(torch.uint8)
    again = unpacked(pixels, preprocessing)
    return pixels if torch.equal(again.view(torch.int32), inputs.view(torch.int32)) else inputs  # -0.0 is not 0.0


def unpacked(inputs: Tensor, preprocessing: Preprocessing) -> Tensor:
    """What `packed` was given."""
    normalised = isinstance(preprocessing, Normalize) and inputs.dtype == torch.uint8
    return preprocessing(inputs.float() / 255) if normalised else inputs
