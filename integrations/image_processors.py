"""Image processors of Hugging Face: what their settings come to, and whether that is all that they do."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .images import ImageConfig

_RESAMPLING = {0: "nearest", 2: "bilinear", 3: "bicubic"}
_CLOSE = 0.005  # of the range of pixels, on average: about one byte


def config_of(processor: Any, image: tuple[int, int]) -> ImageConfig:
    """What the settings come to for images of this height and width; a processor that does not keep to them is refused."""
    config = _by_settings(processor, image)
    _check(processor, config, image)
    return config


def _by_settings(processor: Any, image: tuple[int, int]) -> ImageConfig:
    size, crop = _sizes(processor, image)
    resample = getattr(processor, "resample", None)
    normalises = _on(processor, "do_normalize")
    mean = tuple(getattr(processor, "image_mean", None) or (0.0,) * 3)
    std = tuple(getattr(processor, "image_std", None) or (1.0,) * len(mean))
    twice = _on(processor, "include_top")  # EfficientNet divides by the deviations again
    return ImageConfig(
        size,
        mean if normalises else (0.0,) * len(mean),
        tuple(each**2 if twice else each for each in std) if normalises else (1.0,) * len(mean),
        interpolation=_RESAMPLING.get(int(resample) if resample is not None else 2, "bicubic"),
        crop=crop,
        scale=255 * float(processor.rescale_factor) if _on(processor, "do_rescale") else 255.0,
        shift=-1.0 if _on(processor, "rescale_offset") else 0.0,
        bgr=_on(processor, "do_flip_channel_order"),
    )


def _sizes(processor: Any, image: tuple[int, int]) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """What to resize to and what to crop to."""
    crops = _on(processor, "do_center_crop")
    crop = _size(processor.crop_size, None) if crops else None
    if not _on(processor, "do_resize"):
        return None, crop
    share, edge = getattr(processor, "crop_pct", None), dict(processor.size or {}).get("shortest_edge")
    if share is None or not edge:
        return _size(processor.size, image), crop
    if crops or edge < 384:  # PoolFormer and ConvNeXT resize to more than they keep
        return _size(int(edge / share), image), crop or (edge, edge)
    return (edge, edge), None  # ConvNeXT keeps all of large images


def _on(processor: Any, switch: str) -> bool:
    return bool(getattr(processor, switch, False))


def _size(size: Any, image: tuple[int, int] | None) -> tuple[int, int]:
    """Height and width out of the forms that processors write sizes in."""
    values = {"shortest_edge": size} if isinstance(size, int) else dict(size or {})
    height, width, edge = (values.get(key) for key in ("height", "width", "shortest_edge"))
    if height and width:
        return int(height), int(width)
    if edge and image is None:
        return int(edge), int(edge)
    if edge and image is not None:
        least = min(image)
        return edge * image[0] // least, edge * image[1] // least
    raise ValueError(f"the processor's size must have height and width, or shortest_edge; got {size}")


def _check(processor: Any, config: ImageConfig, image: tuple[int, int]) -> None:
    """Refuses a processor that makes something else of a picture of bytes than its settings say."""
    name = type(processor).__name__
    picture = _picture(len(config.mean), *image)
    try:
        made = processor(images=picture, return_tensors="pt", input_data_format="channels_last")["pixel_values"][0]
    except Exception as error:
        raise ValueError(
            f"image_processor must take pictures as image processors of transformers do, got {name}: {error}; pass "
            "AutoImageProcessor.from_pretrained(...), or transformers.ViTImageProcessor with the model's size, mean and std"
        ) from error
    theirs = torch.as_tensor(made)
    ours = config(torch.from_numpy(picture).permute(2, 0, 1).float() / 255)
    if ours.shape != theirs.shape or _apart(ours, theirs, config) > _CLOSE:
        shapes = f"{tuple(theirs.shape)} where these say {tuple(ours.shape)}"
        what = "other values than these say" if ours.shape == theirs.shape else shapes
        raise ValueError(
            f"image_processor must do what its settings say and no more, but {name} makes {what}; pass "
            "transformers.ViTImageProcessor(size=..., image_mean=..., image_std=...) with what the model was trained on"
        )


def _apart(ours: Tensor, theirs: Tensor, config: ImageConfig) -> float:
    """The mean difference, as a share of the range of pixels."""
    std = torch.tensor(config.std)[:, None, None] / config.scale
    return float(((ours - theirs.float()).abs() * std).mean())


def _picture(channels: int, height: int, width: int) -> np.ndarray[Any, Any]:
    """Bytes `(height, width, channels)`, smooth, with no two sides or channels alike."""
    down, right = np.linspace(0, 1, height)[:, None], np.linspace(0, 1, width)[None]
    planes = [0.2 + 0.6 * (down + (c + 1) * right) / (c + 2) / (c + 1) for c in range(channels)]
    return np.rint(255 * np.stack(planes, -1)).astype(np.uint8)
