"""DC, DSA and DM (Zhao et al. 2021-23): `res_{method}_{data}_{net}_{ipc}ipc.pt`.

A dict: `data`, a list of `[images, labels]`, one per run, and `accs_all_exps`, accuracies by network.
"""

from __future__ import annotations

import math
import re
from statistics import fmean, stdev
from typing import Any

from torch import Tensor

from ..preprocessing import Normalize
from . import ask
from .published import Published
from .source import Source

name = "dc"
layout = "res_{method}_{data}_{net}_{ipc}ipc.pt of DC, DSA or DM: a dict with 'data' and 'accs_all_exps'"

_FILE = re.compile(r"res_(?:(?P<method>DC|DSA|DM)_)?(?P<data>[^_]+)_(?P<net>.+)_(?P<ipc>\d+)ipc")
_CIFAR = Normalize((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
# Shape and normalisation by data set, as get_dataset in the utils.py of their code has them.
_DATA = {
    "MNIST": ((1, 28, 28), Normalize((0.1307,), (0.3081,))),
    "FashionMNIST": ((1, 28, 28), Normalize((0.2861,), (0.3530,))),
    "SVHN": ((3, 32, 32), Normalize((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970))),
    "CIFAR10": ((3, 32, 32), _CIFAR),
    "CIFAR100": ((3, 32, 32), _CIFAR),
    "TinyImageNet": ((3, 64, 64), Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))),
}


def recognise(source: Source) -> bool:
    """True for a dict whose `data` is a list of pairs of tensors."""
    content = source.content
    runs = content.get("data") if isinstance(content, dict) else None
    return isinstance(runs, list) and bool(runs) and all(_is_run(run) for run in runs)


def read(source: Source) -> Published:
    """The last run; how many there were, and the accuracies, go into the provenance."""
    images, labels = source.content["data"][-1]
    found = _FILE.match(source.path.name)
    named: dict[str, Any] = found.groupdict() if found else {}
    shape, preprocessing = _DATA.get(named.get("data", ""), (None, None))
    known = preprocessing is not None and shape == tuple(images.shape[1:])
    provenance = {"file": source.path.name, "runs_in_file": len(source.content["data"])} | {
        key: value for key, value in named.items() if value and key != "method"
    }
    provenance["recorded_accuracy"] = _accuracies(source.content.get("accs_all_exps"))
    if known:
        provenance["preprocessing_from"] = f"the mean and std of {named['data']} in the DC code, by the file's name"
    return Published(
        images,
        labels.long(),
        "hard",
        preprocessing=preprocessing if known else None,
        ask=f"Its name names no data set with images {tuple(images.shape[1:])} that their code knows:\n"
        + ask.normalize(source.path, images),
        method=named.get("method") or "DC, DSA or DM",
        provenance=provenance,
    )


def _is_run(run: Any) -> bool:
    return isinstance(run, (list, tuple)) and len(run) == 2 and all(isinstance(part, Tensor) for part in run)


def _accuracies(recorded: Any) -> dict[str, Any]:
    """Mean, spread and n of each network's accuracies."""
    result = {}
    for network, values in recorded.items() if isinstance(recorded, dict) else ():
        plain = values.flatten().tolist() if isinstance(values, Tensor) else values
        numbers = [float(v) for v in plain if isinstance(v, (int, float)) and math.isfinite(v)]
        if numbers:
            spread = stdev(numbers) if len(numbers) > 1 else None
            result[str(network)] = {"mean": fmean(numbers), "std": spread, "n": len(numbers)}
    return result
