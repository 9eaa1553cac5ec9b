"""Makes the coresets of the zoo that are learned by VBPC, and measures them as they are meant to be used."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coreset_sampler.synthetic.dataset import SyntheticCoreset
from coreset_sampler.synthetic.distillers import checkpoint
from coreset_sampler.synthetic.distillers.claim import claimed
from coreset_sampler.synthetic.distillers.real_data import RealData
from coreset_sampler.synthetic.distillers.run import as_coreset, run, saver, settings_of, start
from coreset_sampler.synthetic.distillers.variational_presets import PRESETS, VariationalPreset
from coreset_sampler.synthetic.image_data import ImageData
from coreset_sampler.synthetic.inference.predict import Inference, by_last_layer, by_sgd
from coreset_sampler.synthetic.metrics import accuracy, brier, ece, nll
from coreset_sampler.synthetic.networks import Network, description

METRICS = {"accuracy": accuracy, "nll": nll, "ece": ece, "brier": brier}
INFERENCES: dict[str, Inference] = {"last-layer": by_last_layer(), "sgd": by_sgd()}


def distilled(data: ImageData, per_class: int, *, seeds: int, runs: Path, commit: str) -> SyntheticCoreset:
    """Learns a coreset from all training images, then measures it on all test images.

    The run saves itself in the folder `runs` and goes on from there if it was interrupted.
    """
    preset = PRESETS[data.name, per_class]
    make = preset.network(data.channels, len(data.classes), data.size)
    path = runs / f"{data.name}-vbpc-{per_class}.run.safetensors"
    with claimed(path):
        coreset = _learned(data, per_class, preset, make, path, commit)
    return _with(coreset, measure(coreset, make, data, seeds=seeds), preset, len(data.test[1]))


def measure(coreset: SyntheticCoreset, make: Network, data: ImageData, *, seeds: int) -> dict[str, Any]:
    """Mean and deviation over fresh networks of every metric, by closed form and by SGD, on all test images."""
    inputs = coreset.preprocessing(data.test[0].float() / 255)
    results = {}
    for name, infer in INFERENCES.items():
        answers = [infer(coreset, make, seed)(inputs) for seed in range(seeds)]
        rows = {metric: [judge(p, data.test[1]) for p in answers] for metric, judge in METRICS.items()}
        results[name] = {metric: _spread(values) for metric, values in rows.items()}
    return results


def _learned(
    data: ImageData, per_class: int, preset: VariationalPreset, make: Network, path: Path, commit: str
) -> SyntheticCoreset:
    normalize = data.normalize()
    distiller, source = preset.build(make, compiled=True), RealData(*data.train, preprocessing=normalize)
    settings = settings_of(distiller) | {"widths": preset.widths, "steps": preset.steps, "seed": 0}
    began, changes = _begun(path, settings) if path.exists() else (start(distiller, source, per_class), [[0, settings]])
    before = time.process_time()
    save = saver(path, {"settings": changes})
    done = run(distiller, began, source, steps=preset.steps, save=save, report=_say(path.name))
    provenance = {
        "data": data.name,
        "licence": data.licence,
        "made": "learned by VBPC from all training images; started from random real ones",
        "settings": settings if len(changes) == 1 else changes,
        "network": description("convnet", preset.widths),
        "minutes": round(done.seconds / 60, 1),
        "cpu_minutes": round((time.process_time() - before) / 60, 1),
        "command": f"python tools/make_zoo.py --data DIR --only {data.name}/vbpc-{per_class}",
        "commit": commit,
    }
    about: dict[str, Any] = {"classes": data.classes, "images_per_class": per_class, "provenance": provenance}
    return as_coreset(distiller, done.state, preprocessing=normalize, method="vbpc", **about)


def _begun(path: Path, settings: dict[str, Any]) -> tuple[checkpoint.Progress, list[list[Any]]]:
    """A run under way, and from which step on which settings held."""
    progress, before = checkpoint.load(path)
    changes = before["settings"]
    plain = json.loads(json.dumps(settings))
    return progress, changes if changes[-1][1] == plain else [*changes, [progress.state.step, plain]]


def _with(
    coreset: SyntheticCoreset, measured: dict[str, Any], preset: VariationalPreset, test_images: int
) -> SyntheticCoreset:
    """The same with its figures; the accuracy that the index leads with is that of the closed form."""
    closed = measured["last-layer"]["accuracy"]
    widths = "-".join(map(str, preset.widths))
    how = f"VBPC's closed form on a fresh ConvNet {widths} after its steps on the coreset; by: also SGD, and other metrics"
    led = {**closed, "test_images": test_images, "how": how, "by": measured}
    coreset.provenance = coreset.provenance | {"accuracy": led}
    return coreset


def _spread(values: list[float]) -> dict[str, float]:
    return {"mean": round(statistics.mean(values), 4), "std": round(statistics.stdev(values), 4), "n": len(values)}


def _say(name: str) -> Callable[[str], None]:
    return lambda line: print(f"{name}: {line}", flush=True)
