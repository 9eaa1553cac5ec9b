"""Which labels of a data set are probably wrong: scores of a training run as a page, a CSV file or what cleanlab reads.

audit("scores.safetensors", "data/cifar10", page="suspects.html", csv="suspects.csv")
"""

from __future__ import annotations

import csv as csv_files
import io
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from .audit_data import open_examples
from .audit_page import audit_page
from .audit_rows import Audit, SuspectRow, audit_scores
from .score_file import Scores, read_scores

StrPath = str | os.PathLike[str]

CSV_COLUMNS = ("index", "label", "label_name", "predicted", "predicted_name", "probability_wrong", "times_seen")
CLEANLAB_FILES = ("pred_probs.npy", "labels.npy", "indices.npy")


def audit(
    scores: StrPath,
    data: StrPath | None = None,
    *,
    page: StrPath | None = None,
    csv: StrPath | None = None,
    cleanlab: StrPath | None = None,
    top: int = 100,
    split: str = "train",
    overwrite: bool = False,
) -> Audit:
    """Finds the labels that are most likely wrong and writes them in the forms asked for. Only the top rows are read.

    Args:
        scores: file that `sampler.save_scores` wrote.
        data: the examples, row by row those of the scores: a folder that `datasets.load_dataset` opens, or `"digits"`.
            Without it indices are all there is.
        page: HTML file to write, in one piece.
        csv: file to write, a row per suspect.
        cleanlab: folder for `pred_probs.npy`, `labels.npy` and `indices.npy`, which rows of the data these are.
        top: how many suspects.
        split: of the data.
        overwrite: replace files that exist.
    """
    if top < 1:
        raise ValueError(f"top must be at least 1, got {top}")
    _check_outputs(page, csv, cleanlab, overwrite)
    found = audit_scores(read_scores(scores), None if data is None else open_examples(data, split), top=top)
    contents: dict[Path, bytes] = {}
    if page is not None:
        contents[Path(page)] = audit_page(found, Path(scores).name).encode(errors="replace")
    if csv is not None:
        contents[Path(csv)] = suspects_csv(found.suspects).encode(errors="replace")
    if cleanlab is not None:
        contents |= {Path(cleanlab) / name: array for name, array in cleanlab_files(found.scores, scores).items()}
        Path(cleanlab).mkdir(parents=True, exist_ok=True)
    for path, content in contents.items():
        _write(path, content)
    return found


def suspects_csv(rows: Sequence[SuspectRow]) -> str:
    """The rows as CSV, with a header.

    Args:
        rows: most suspicious first.
    """
    text = io.StringIO()
    writer = csv_files.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for row in rows:
        values = [getattr(row, name) for name in CSV_COLUMNS]
        writer.writerow([f"{value:.6g}" if isinstance(value, float) else value for value in values])
    return text.getvalue()


def cleanlab_files(scores: Scores, source: StrPath = "the file") -> dict[str, bytes]:
    """What `cleanlab.filter.find_label_issues(labels, pred_probs)` takes, by name of the file, for all examples seen.

    Args:
        scores: of the whole data set.
        source: where they are from, for the error message.
    """
    if scores.pred_probs is None:
        raise ValueError(
            f"--cleanlab needs the probabilities of all classes, and {source} has none: of runs with over 64 classes only "
            f"projections are kept, this one had {scores.classes}. The page and --csv need none"
        )
    rows = (scores.seen & scores.pred_probs.isfinite().all(1)).nonzero().flatten()
    probabilities = scores.pred_probs[rows].clamp(min=0)
    arrays = (probabilities / probabilities.sum(1, keepdim=True), scores.labels[rows], rows)
    return {name: _npy(array) for name, array in zip(CLEANLAB_FILES, arrays, strict=True)}


def _npy(tensor: Tensor) -> bytes:
    content = io.BytesIO()
    np.save(content, tensor.numpy(), allow_pickle=False)
    return content.getvalue()


def _check_outputs(page: StrPath | None, csv: StrPath | None, cleanlab: StrPath | None, overwrite: bool) -> None:
    """Before anything is computed: something is asked for, and no file is in its place."""
    files = [Path(path) for path in (page, csv) if path is not None]
    files += [Path(cleanlab) / name for name in CLEANLAB_FILES] if cleanlab is not None else []
    if not files:
        raise ValueError(
            "nothing to write: name a page with -o FILE, a table with --csv FILE or a folder with --cleanlab DIR"
        )
    if page is not None and Path(page).suffix.lower() == ".csv":
        raise ValueError(f"-o writes an HTML page, got {page}: for a table pass --csv {page}")
    for path in (Path(path) for path in (page, csv) if path is not None):
        if not path.parent.is_dir():
            raise ValueError(f"cannot write {path}: make the folder first")
    for path in files:
        if path.exists() and not overwrite:
            raise ValueError(f"{path} exists already; --force overwrites it")
    if page is not None and csv is not None and Path(page).resolve() == Path(csv).resolve():
        raise ValueError(f"-o and --csv must be two files, both are {page}")


def _write(path: Path, content: bytes) -> None:
    """Writes beside the target, then renames: readers see the old file or the new, never half."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
