"""A Hugging Face dataset: a folder of `save_to_disk` or of parquet files, or the object itself.

`to_dataset` and `from_dataset` go between a coreset and `datasets.Dataset`; what a coreset knows about
itself rides in the dataset's description. Folders are read without `datasets`, which would follow what they point to.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from ...extras import need
from ..dataset import SyntheticCoreset, from_tensors, to_tensors
from ..file import FORMAT, VERSION, version_for
from ..preprocessing import Raw
from ..untrusted import LIMITS, CoresetFileError, inside, parse_json, reading
from . import ask, pictures, safe_arrow
from .plain import kind_of
from .published import Published
from .source import Source

name = "huggingface"
layout = "a folder of datasets' save_to_disk, or of parquet files, with images and labels"

_INPUTS = ("image", "img", "images", "inputs", "pixel_values")
_TARGETS = ("label", "labels", "targets", "fine_label")


@dataclass(frozen=True)
class Rows:
    """What a folder or a `datasets.Dataset` holds: its columns, what is said about them, and its size on disk."""

    path: Path
    table: Any
    features: dict[str, Any]
    description: str
    on_disk: int


def recognise(source: Source) -> bool:
    """True for the files that `save_to_disk` writes, or for parquet files."""
    folder = source.path
    if not folder.is_dir():
        return False
    saved = any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))
    return saved or any(_parquet(folder))


def read(source: Source) -> Published:
    """Images and 8-bit columns as bytes, other numbers as float32 or int64."""
    rows = open_folder(source.path)
    ours = _ours(rows)
    if ours is not None:
        return Published(ours.stored, ours.targets, preprocessing=ours.preprocessing, **ours.describe())
    return _columns(rows)


def open_folder(folder: Path) -> Rows:
    """The rows of the folder; of several splits, `train`."""
    files = [inside(path.parent, path.name) for path in sorted(_parquet(folder))]
    info: dict[str, Any] = {}
    if files:
        train = [path for path in files if path.name.startswith("train")]
        if len(files) > 1 and not train:
            raise CoresetFileError(
                f"{folder} has several parquet files and none is called train*: {[p.name for p in files]}"
            )
        files = train or files
    else:
        files, info = _saved(_split(folder))
    tables = [safe_arrow.read_table(path, (*_INPUTS, *_TARGETS)) for path in files]
    with reading(folder):
        table = need("pyarrow", extra="formats", what="Hugging Face dataset folders").concat_tables(tables)
        info = info or parse_json(folder, (table.schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {})
        features, description = info.get("features") or {}, info.get("description") or ""
        if not isinstance(features, dict) or not isinstance(description, str):
            raise CoresetFileError(f"{folder} is damaged: features must be an object, the description text")
    return Rows(folder, table, features, description, sum(path.stat().st_size for path in files))


def _split(folder: Path) -> Path:
    if not (folder / "dataset_dict.json").is_file():
        return folder
    splits = _json(folder, "dataset_dict.json").get("splits")
    if not isinstance(splits, list) or "train" not in splits:
        raise CoresetFileError(f"{folder} has splits {splits}; point at the folder of one")
    return inside(folder, "train")


def _saved(folder: Path) -> tuple[list[Path], dict[str, Any]]:
    """The Arrow files of `save_to_disk`, and its dataset_info.json."""
    state, info = _json(folder, "state.json"), _json(folder, "dataset_info.json")
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise CoresetFileError(f"{folder} is a selection of rows; save dataset.flatten_indices() instead")
    with reading(folder / "state.json"):
        return [inside(folder, file["filename"]) for file in state["_data_files"]], info


def _json(folder: Path, name: str) -> dict[str, Any]:
    path = inside(folder, name)
    with reading(path), open(path, "rb") as file:
        return parse_json(path, file.read(LIMITS.json_bytes + 1))


def to_dataset(coreset: SyntheticCoreset) -> Any:
    """Columns `inputs` and `labels`, bit for bit, a row for each stored image."""
    datasets = need("datasets", extra="formats", what="Hugging Face datasets")
    tensors, description = to_tensors(coreset)
    columns = {"inputs": tensors.pop("inputs").cpu(), "labels": tensors.pop("targets").cpu()}
    if coreset.examples_per_image > 1:  # a row is a stored image, with the targets of all examples in it
        columns["labels"] = columns["labels"].unflatten(0, (-1, coreset.examples_per_image))
    extra = base64.b64encode(safetensors.torch.save({k: t.contiguous() for k, t in tensors.items()})).decode()
    about: dict[str, Any] = {
        "format": FORMAT,
        "version": version_for(description),
        "coreset": description,
        "tensors": extra if tensors else "",
    }
    # Arrow has no bfloat16; float32 holds every one of them
    narrow = [name for name, values in columns.items() if values.dtype == torch.bfloat16]
    if narrow:
        about["bfloat16"] = narrow
        columns |= {name: columns[name].float() for name in narrow}
    features = datasets.Features(
        {
            "inputs": _feature(datasets, columns["inputs"]),
            "labels": _label_feature(datasets, coreset, columns["labels"]),
        }
    )
    info = datasets.DatasetInfo(description=json.dumps(about), features=features)
    rows = {name: list(values.numpy()) for name, values in columns.items()}
    return datasets.Dataset.from_dict(rows, features=features, info=info)


def from_dataset(dataset: Any) -> SyntheticCoreset:
    """The coreset that `to_dataset` packed."""
    table = dataset.with_format("arrow")[:]
    coreset = _ours(Rows(Path("the dataset"), table, {}, dataset.info.description or "", table.nbytes))
    if coreset is None:
        raise ValueError(
            "this dataset was not made by to_hf, so it does not say how its inputs were preprocessed; "
            "save it with dataset.save_to_disk(folder) and use read_published(folder, preprocessing=...)"
        )
    return coreset


def _ours(rows: Rows) -> SyntheticCoreset | None:
    if f'"{FORMAT}"' not in rows.description:
        return None
    with reading(rows.path, "is damaged: its description is unreadable"):
        about = parse_json(rows.path, rows.description)
    if about.get("format") != FORMAT:
        return None
    with reading(rows.path, "holds no valid coreset"):
        if about["version"] > VERSION:
            raise CoresetFileError(
                f"{rows.path} is newer than this coreset_sampler: it has format version {about['version']}"
            )
        tensors = safetensors.torch.load(base64.b64decode(about["tensors"])) if about["tensors"] else {}
        for column, tensor in (("inputs", "inputs"), ("labels", "targets")):
            tensors[tensor] = torch.from_numpy(safe_arrow.values(rows.path, rows.table[column]).copy())
            if column in about.get("bfloat16", ()):
                tensors[tensor] = tensors[tensor].bfloat16()
        if about["coreset"].get("tiles", 1) != 1 or about["coreset"].get("views") is not None:
            tensors["targets"] = tensors["targets"].flatten(0, 1)
        return from_tensors(tensors, about["coreset"])


def _columns(rows: Rows) -> Published:
    picture, label = (_pick(rows, names) for names in (_INPUTS, _TARGETS))
    files = safe_arrow.embedded(rows.path, rows.table[picture])
    if files is not None:
        inputs = pictures.stack(rows.path, files, lambda i: f"{rows.path}, picture {i}", rows.on_disk)
    else:
        inputs = _numbers(rows, picture)
    targets = _numbers(rows, label)
    targets = targets if targets.is_floating_point() else targets.long()
    lines = ["If they were normalised:", ask.normalize(rows.path, inputs), "If they were not:", ask.raw(rows.path)]
    names = rows.features.get(label, {}).get("names")
    return Published(
        inputs,
        targets,
        kind_of(targets),
        preprocessing=Raw() if inputs.dtype == torch.uint8 else None,
        ask="\n".join(lines),
        class_names=tuple(map(str, names)) if isinstance(names, list) and names else None,
        provenance={"folder": rows.path.name},
    )


def _numbers(rows: Rows, column: str) -> Tensor:
    """Bytes stay bytes; other numbers become what models are trained on."""
    array = safe_arrow.values(rows.path, rows.table[column])
    kind = array.dtype.kind
    if array.dtype != np.uint8 and kind in "iuf":
        array = array.astype(np.float32 if kind == "f" else np.int64, copy=False)
    return torch.from_numpy(np.array(array))


def _pick(rows: Rows, names: tuple[str, ...]) -> str:
    found = [column for column in names if column in rows.table.column_names]
    if len(found) != 1:
        raise CoresetFileError(
            f"{rows.path} must have one column of {', '.join(names)}; it has {', '.join(found) or 'none'} of them"
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
    if coreset.target_kind == "hard" and coreset.class_names and targets.dtype == torch.int64 and targets.ndim == 1:
        return datasets.ClassLabel(names=list(coreset.class_names))
    return _feature(datasets, targets)


def _parquet(folder: Path) -> list[Path]:
    inside_folders = [folder, folder / "data"]
    places = [place for place in inside_folders if place.is_dir() and (place == folder or not place.is_symlink())]
    return [path for place in places for path in place.glob("*.parquet")]
