"""A Hugging Face dataset: a folder of `save_to_disk` or of parquet files, or the object itself.

`to_dataset` and `from_dataset` go between a coreset and `datasets.Dataset`; what a coreset knows about
itself rides in the dataset's description.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from ..coreset_file import FORMAT, VERSION, CoresetFileError
from ..preprocessing import Raw
from ..synthetic import SyntheticCoreset, from_tensors, to_tensors
from . import ask
from .extras import need
from .image_folder import from_picture
from .plain import kind_of
from .published import Published
from .source import Source

name = "huggingface"
layout = "a folder of datasets' save_to_disk, or of parquet files, with images and labels"

_INPUTS = ("image", "img", "images", "inputs", "pixel_values")
_TARGETS = ("label", "labels", "targets", "fine_label")


def recognise(source: Source) -> bool:
    """True for the files that `save_to_disk` writes, or for parquet files."""
    folder = source.path
    if not folder.is_dir():
        return False
    saved = any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))
    return saved or any(_parquet(folder))


def read(source: Source) -> Published:
    """Images as bytes, or float arrays as they are."""
    dataset = open_folder(source.path)
    ours = _ours(dataset)
    if ours is not None:
        values = ours.describe()
        return Published(ours.inputs, ours.targets, preprocessing=ours.preprocessing, **values)
    return _columns(source.path, dataset)


def open_folder(folder: Path) -> Any:
    """The dataset in the folder; of several splits, `train`."""
    datasets = need("datasets", extra="formats", what="Hugging Face dataset folders")
    if any(_parquet(folder)):
        # read directly: load_dataset would copy the data into the user's cache
        parquet = need("pyarrow.parquet", extra="formats", what="parquet files")
        files = sorted(_parquet(folder))
        train = [path for path in files if path.name.startswith("train")]
        if len(files) > 1 and not train:
            raise CoresetFileError(
                f"{folder} has several parquet files and none is called train*: {[p.name for p in files]}"
            )
        tables = [datasets.Dataset(parquet.read_table(path)) for path in train or files]
        return datasets.concatenate_datasets(tables)
    loaded = datasets.load_from_disk(str(folder))
    if isinstance(loaded, datasets.DatasetDict):
        if "train" not in loaded:
            raise CoresetFileError(f"{folder} has splits {', '.join(loaded)}; point at the folder of one")
        loaded = loaded["train"]
    return loaded


def to_dataset(coreset: SyntheticCoreset) -> Any:
    """Columns `inputs` and `labels`, bit for bit."""
    datasets = need("datasets", extra="formats", what="Hugging Face datasets")
    tensors, description = to_tensors(coreset)
    inputs, targets = tensors.pop("inputs"), tensors.pop("targets")
    extra = base64.b64encode(safetensors.torch.save({k: t.contiguous() for k, t in tensors.items()})).decode()
    about = {
        "format": FORMAT,
        "version": VERSION,
        "coreset": description,
        "tensors": extra if tensors else "",
    }
    features = datasets.Features(
        {"inputs": _feature(datasets, inputs), "labels": _label_feature(datasets, coreset, targets)}
    )
    columns = {"inputs": list(inputs.cpu().numpy()), "labels": list(targets.cpu().numpy())}
    info = datasets.DatasetInfo(description=json.dumps(about), features=features)
    return datasets.Dataset.from_dict(columns, features=features, info=info)


def from_dataset(dataset: Any) -> SyntheticCoreset:
    """The coreset that `to_dataset` packed."""
    coreset = _ours(dataset)
    if coreset is None:
        raise ValueError(
            "this dataset was not made by to_hf, so it does not say how its inputs were preprocessed; "
            "save it with dataset.save_to_disk(folder) and use read_published(folder, preprocessing=...)"
        )
    return coreset


def _ours(dataset: Any) -> SyntheticCoreset | None:
    try:
        about = json.loads(dataset.info.description or "")
    except ValueError:
        return None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        return None
    if about["version"] > VERSION:
        raise CoresetFileError(f"this dataset is newer than this coreset_sampler: format version {about['version']}")
    tensors = safetensors.torch.load(base64.b64decode(about["tensors"])) if about["tensors"] else {}
    columns = dataset.with_format("numpy")
    tensors["inputs"] = _tensor(columns["inputs"][:], dataset.features["inputs"])
    tensors["targets"] = _tensor(columns["labels"][:], dataset.features["labels"])
    return from_tensors(tensors, about["coreset"])


def _columns(folder: Path, dataset: Any) -> Published:
    picture, label = (_pick(folder, dataset, names) for names in (_INPUTS, _TARGETS))
    datasets = need("datasets", extra="formats", what="Hugging Face dataset folders")
    if isinstance(dataset.features[picture], datasets.Image):
        images = [from_picture(image) for image in dataset[picture]]
        if len({image.shape for image in images}) != 1:
            raise CoresetFileError(f"{folder}: all images must have one size and mode")
        inputs = torch.stack(images)
    else:
        inputs = torch.from_numpy(np.array(dataset.with_format("numpy")[picture][:]))
    targets = torch.from_numpy(np.array(dataset.with_format("numpy")[label][:]))
    lines = ["If they were normalised:", ask.normalize(folder, inputs), "If they were not:", ask.raw(folder)]
    return Published(
        inputs,
        targets,
        kind_of(targets),
        preprocessing=Raw() if inputs.dtype == torch.uint8 else None,
        ask="\n".join(lines),
        classes=tuple(getattr(dataset.features[label], "names", None) or ()) or None,
        provenance={"folder": folder.name},
    )


def _pick(folder: Path, dataset: Any, names: tuple[str, ...]) -> str:
    found = [column for column in names if column in dataset.column_names]
    if len(found) != 1:
        raise CoresetFileError(
            f"{folder} must have one column of {', '.join(names)}; it has {', '.join(dataset.column_names)}"
        )
    return found[0]


def _feature(datasets: Any, values: Tensor) -> Any:
    """Fixed shapes, so that values come back bit for bit."""
    dtype, shape = str(values.dtype).removeprefix("torch."), tuple(values.shape[1:])
    if not shape:
        return datasets.Value(dtype)
    if len(shape) == 1:
        return datasets.Sequence(datasets.Value(dtype), length=shape[0])
    return getattr(datasets, f"Array{len(shape)}D")(shape=shape, dtype=dtype)


def _label_feature(datasets: Any, coreset: SyntheticCoreset, targets: Tensor) -> Any:
    if coreset.target_kind == "hard" and coreset.classes and targets.dtype == torch.int64:
        return datasets.ClassLabel(names=list(coreset.classes))
    return _feature(datasets, targets)


def _tensor(values: Any, feature: Any) -> Tensor:
    array = np.stack(list(values)) if getattr(values, "dtype", None) is np.dtype(object) else np.array(values)
    return torch.from_numpy(array.astype(getattr(feature, "dtype", None) or feature.feature.dtype))


def _parquet(folder: Path) -> list[Path]:
    inside = [folder, folder / "data"]
    return [p for place in inside if place.is_dir() for p in place.glob("*.parquet") if p.is_file()]
