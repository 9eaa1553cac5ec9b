"""Opens image data sets for distillation: the digits of scikit-learn, or any folder that `datasets.load_dataset` opens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..randomness import check_default_device
from .formats.pictures import in_bytes
from .preprocessing import Normalize


@dataclass(frozen=True)
class ImageData:
    """Training and test images as bytes `(n, channels, h, w)` with labels `(n,)`, in memory."""

    name: str
    class_names: tuple[str, ...]
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    licence: str = "unknown"
    named: bool = True
    """False if the data have no class names, and `class_names` are numbers."""

    @property
    def channels(self) -> int:
        """1 or 3."""
        return self.train[0].shape[1]

    @property
    def image_size(self) -> int:
        """Pixels of a side."""
        return self.train[0].shape[-1]

    @property
    def num_classes(self) -> int:
        """As many as have names."""
        return len(self.class_names)

    def normalize(self) -> Normalize:
        """Mean 0 and deviation 1 in each channel over the training images."""
        pixels = self.train[0].double() / 255
        mean, std = pixels.mean((0, 2, 3)), pixels.std((0, 2, 3))
        return Normalize(tuple(mean.tolist()), tuple(std.tolist()))

    def validation_split(self, share: float = 0.1, seed: int = 0, *, without: Tensor | None = None) -> ImageData:
        """The training images alone, a share of each class held out in place of the test images; never all of it.

        Args:
            share, seed: of the images of each class, and of the draw.
            without: `(n, channels, h, w)` in [0, 1], images that nothing is measured on: those of a set that is judged.
        """
        if not 0 < share < 1:
            raise ValueError(f"share must be in (0, 1), got {share}")
        pixels, labels = self.train
        generator = torch.Generator().manual_seed(seed)
        held_out = torch.zeros(len(labels), dtype=torch.bool)
        for label in labels.unique():
            members = (labels == label).nonzero().flatten()
            order = torch.randperm(len(members), generator=generator)
            count = min(max(1, round(share * len(members))), len(members) - 1)  # never the last one
            held_out[members[order[:count]]] = True
        if not held_out.any():
            raise ValueError("no image can be held out: every class has one image; hold none out")
        measured = held_out if without is None else held_out & ~_among(pixels, without)
        if not measured.any():
            raise ValueError("no image is left to measure on: all that are held out are in the set; raise share")
        return replace(self, train=(pixels[~held_out], labels[~held_out]), test=(pixels[measured], labels[measured]))


def _among(pixels: Tensor, images: Tensor) -> Tensor:
    """`(n,)` which of the images `pixels` are one of `images`."""
    if pixels.shape[1:] != images.shape[1:]:
        return torch.zeros(len(pixels), dtype=torch.bool)
    known = {image.numpy().tobytes() for image in (images * 255).round().byte().cpu()}
    return torch.tensor([image.numpy().tobytes() in known for image in pixels])


Images = str | os.PathLike[str] | tuple[Any, Any] | ImageData
"""`"digits"`, a folder, or images and labels."""


def open_images(data: Images, *, image_size: int | None = None) -> ImageData:
    """Training and test images in memory.

    Args:
        data: `"digits"`; a folder (or hub id) that `datasets.load_dataset` opens, parquet or a folder of images per
            class, whose test images are the split `test` or else `validation`; or `(images, labels)`, which then
            stand for both: bytes, or floats in [0, 1], `(n, channels, h, w)` or `(n, h, w)`, and class numbers `(n,)`.
        image_size: scale and crop every image to a square of so many pixels; without it all must have one size already.
    """
    check_default_device()
    if isinstance(data, ImageData):
        if image_size not in (None, data.image_size):
            raise ValueError(
                f"image_size must be left out for images that are open already, of {data.image_size} pixels, got "
                f"{image_size}; pass it to open_images with the folder"
            )
        return data
    if isinstance(data, (tuple, list)):
        return _of_tensors(data, image_size)
    if data == "digits":
        if image_size not in (None, 8):
            raise ValueError(f"image_size must be left out for digits, which have 8 x 8 pixels, got {image_size}")
        return _digits()
    return _of_folder(os.fspath(data), image_size)


def _of_tensors(data: Sequence[Any], image_size: int | None) -> ImageData:
    if len(data) != 2:
        raise ValueError(
            f"data must be a folder, 'digits' or (images, labels), got a {type(data).__name__} of {len(data)}"
        )
    images, labels = torch.as_tensor(data[0]), torch.as_tensor(data[1])
    images = images[:, None] if images.ndim == 3 else images
    if images.ndim != 4 or images.shape[1] not in (1, 3) or images.shape[2] != images.shape[3]:
        raise ValueError(
            f"images must be squares (n, 1 or 3, h, h) or (n, h, h), got {tuple(images.shape)}; crop them, or permute "
            "channels to the front"
        )
    if image_size not in (None, images.shape[-1]):
        raise ValueError(
            f"image_size must be left out for images that are open already, of {images.shape[-1]} pixels, got {image_size}"
        )
    if labels.shape != images.shape[:1] or labels.is_floating_point() or not len(labels) or int(labels.min()) < 0:
        raise ValueError(
            f"labels must be class numbers 0, 1, ... ({len(images)},), got {labels.dtype} {tuple(labels.shape)}"
        )
    if images.is_floating_point():
        if not bool(((images >= 0) & (images <= 1)).all()):
            raise ValueError("images must be bytes or floats in [0, 1]: pass pixels before they are normalised")
        images = (images * 255).round().byte()
    if images.dtype != torch.uint8:
        raise ValueError(f"images must be bytes or floats in [0, 1], got {images.dtype}")
    labels = labels.long()
    names = tuple(str(i) for i in range(int(labels.max()) + 1))
    return ImageData("images", names, (images, labels), (images, labels), named=False)


def _of_folder(data: str, image_size: int | None) -> ImageData:
    from datasets import load_dataset

    if Path(data).exists() and not any(Path(data).iterdir()):
        raise ValueError(f"{data} is empty")
    loaded = load_dataset(data)
    held_out = next((split for split in ("test", "validation", "valid", "val") if split in loaded), None)
    if "train" not in loaded or held_out is None:
        raise ValueError(f"{data} must have splits train and test (or validation), it has {list(loaded)}")
    image, label, names = _columns(data, loaded["train"].features)
    labels = [_class_numbers(data, label, loaded[split][label][:]) for split in ("train", held_out)]
    pixels = [_pixels(data, loaded[split][image], image_size) for split in ("train", held_out)]
    if pixels[0].shape[1] != pixels[1].shape[1]:
        pixels = [part.expand(-1, 3, -1, -1).contiguous() for part in pixels]  # one of them is in colour
    train, test = zip(pixels, labels, strict=True)
    if train[0].shape[1:] != test[0].shape[1:]:
        raise ValueError(f"training images are {tuple(train[0].shape[1:])}, test images {tuple(test[0].shape[1:])}")
    if min(int(train[1].min()), int(test[1].min())) < 0:
        raise ValueError(f"{data} has negative labels, which stand for missing ones in Hugging Face data sets")
    numbers = tuple(str(i) for i in range(int(train[1].max()) + 1))
    return ImageData(Path(data).name, names or numbers, train, test, named=bool(names))


def _columns(data: str, features: Any) -> tuple[str, str, tuple[str, ...]]:
    images = [name for name, feature in features.items() if type(feature).__name__ == "Image"]
    labels = [name for name, feature in features.items() if type(feature).__name__ == "ClassLabel"]
    labels = labels or [name for name in features if name in ("label", "labels", "fine_label")]
    if not images or not labels:
        raise ValueError(f"{data} must have a column of images and one of labels, it has {dict(features)}")
    label = "fine_label" if "fine_label" in labels else labels[0]
    names = getattr(features[label], "names", None) or ()
    return images[0], label, tuple(name.replace(" - ", "-").replace(" / ", "/") for name in names)


def _class_numbers(data: str, column: str, labels: Sequence[Any]) -> Tensor:
    """`(n,)`; text and missing labels are refused, and so are floats, which would be cut down to whole numbers."""
    for row, label in enumerate(labels):
        if not isinstance(label, int):
            raise ValueError(
                f"column {column!r} of {data} must hold class numbers, row {row} has {label!r}; keep a folder per class, or "
                f"make numbers of them by dataset.class_encode_column({column!r}) and save as parquet"
            )
    return torch.tensor(labels, dtype=torch.long)


def _pixels(data: str, images: Any, image_size: int | None) -> Tensor:
    """Bytes `(n, 1 or 3, h, w)`: in colour if any image is."""
    arrays = []
    for row, image in enumerate(images):
        image = in_bytes(image, f"image {row} of {data}")
        if image_size is not None and image.size != (image_size, image_size):
            from PIL import ImageOps

            image = ImageOps.fit(image, (image_size, image_size))
        arrays.append(np.asarray(image))
    shapes = {array.shape[:2] for array in arrays}
    if len(shapes) > 1 or next(iter(shapes))[0] != next(iter(shapes))[1]:
        raise ValueError(f"images of {data} are not squares of one size, but {sorted(shapes)[:4]} ...; pass image_size")
    if len({array.ndim for array in arrays}) > 1:
        arrays = [np.broadcast_to(array.reshape(*array.shape[:2], -1), (*array.shape[:2], 3)) for array in arrays]
    pixels = torch.from_numpy(np.stack(arrays))
    return pixels.permute(0, 3, 1, 2).contiguous() if pixels.ndim == 4 else pixels[:, None]


def _digits() -> ImageData:
    """scikit-learn's digits, 500 of them held out by a fixed split."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    loaded = load_digits()
    pixels = torch.from_numpy(np.rint(loaded.images * (255 / 16)).astype(np.uint8))[:, None]
    labels = torch.from_numpy(loaded.target).long()
    train, test = train_test_split(np.arange(len(labels)), test_size=500, random_state=0, stratify=loaded.target)
    names = tuple(str(digit) for digit in range(10))
    parts = (pixels[train], labels[train]), (pixels[test], labels[test])
    return ImageData("digits", names, *parts, licence="CC BY 4.0 (UCI: Alpaydin and Kaynak 1998)")
