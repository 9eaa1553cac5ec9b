"""Test images as bad cameras, weather and compression make them: the corruptions of ImageNet-C."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor

_SMALLEST = 32  # pixels of a side that the library takes
_OWN_RANDOMNESS = ("impulse_noise", "glass_blur")  # these draw from no global state and take a seed


def corruption_names() -> tuple[str, ...]:
    """All nineteen, the four that Hendrycks and Dietterich keep for validation last."""
    return tuple(_library().get_corruption_names("all"))


def corrupted(pixels: Tensor, name: str, *, severity: int = 3, seed: int = 0) -> Tensor:
    """Images as bytes `(n, 1 or 3, h, w)` changed by the corruption `name`, the same for the same seed.

    Severities 1 to 5 are those of ImageNet-C (Hendrycks and Dietterich 2019), made for 224 pixels: on small images they
    are harsher than in CIFAR-10-C, whose settings are weaker. Images of less than 32 pixels are scaled up to 32 for it
    and back, grey ones are made grey again. Global random state stays as it was.
    """
    if name not in corruption_names():
        raise ValueError(f"unknown corruption {name!r}; known: {', '.join(corruption_names())}")
    if severity not in range(1, 6):
        raise ValueError(f"severity must be 1 to 5, got {severity}")
    if pixels.ndim != 4 or pixels.shape[1] not in (1, 3) or pixels.dtype != torch.uint8:
        raise ValueError(f"pixels must be bytes (n, 1 or 3, h, w), got {pixels.dtype} {tuple(pixels.shape)}")
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 - the library draws from these
    try:
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        return torch.stack([_one(image, name, severity) for image in pixels])
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002


def _one(image: Tensor, name: str, severity: int) -> Tensor:
    from PIL import Image

    channels, height, width = image.shape
    picture = Image.fromarray(image.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy())
    size = max(width, _SMALLEST), max(height, _SMALLEST)
    large = np.asarray(picture if picture.size == size else picture.resize(size, Image.Resampling.BICUBIC))
    seed = {"seed": int(np.random.randint(2**31))} if name in _OWN_RANDOMNESS else {}  # noqa: NPY002
    array = _library().corrupt(large, corruption_name=name, severity=severity, **seed)
    changed = Image.fromarray(array.astype(np.uint8))
    small = changed if changed.size == (width, height) else changed.resize((width, height), Image.Resampling.BOX)
    result = torch.from_numpy(np.array(small.convert("L" if channels == 1 else "RGB")))
    return result[None] if channels == 1 else result.permute(2, 0, 1)


def _library():  # type: ignore[no-untyped-def]
    try:
        import imagecorruptions
    except ImportError as error:
        raise ImportError(
            "corruptions need imagecorruptions-imaug: pip install 'coreset-sampler[corruptions]'"
        ) from error
    return imagecorruptions
