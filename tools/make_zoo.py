"""Makes the coresets that ship, measures them and writes the index.

    python tools/make_zoo.py --data data --only digits/vbpc-1 fashion-mnist/vbpc-10
    python tools/make_zoo.py --data data --only fashion-mnist/views-10
    python benchmarks/distilled.py fashion-mnist/views-10 --data data/fashion-mnist --bf16 --results FILE
    python tools/make_zoo.py --only fashion-mnist/views-10 --measured FILE

`--data` is a folder of folders by data set, `mnist`, `fashion-mnist` and `cifar10`, each of which
`datasets.load_dataset` opens; the digits of scikit-learn need none. Three kinds ship: real images picked by k-center or
herding on pixels, class by class, which take a moment; images learned by VBPC for one ConvNet, from all training images
in minutes of one core (they save themselves in `--runs`: a killed run, started again, continues); and real images with
labelled views, for networks of any kind (`views`). These are measured by the benchmark, whose records the last command
takes over.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coreset_sampler import SyntheticCoreset, distill, evaluate, teach
from coreset_sampler.selection.coreset import Coreset
from coreset_sampler.selection.strategies.herding import match_mean
from coreset_sampler.selection.strategies.k_center import farthest_first
from coreset_sampler.synthetic.distillers.presets import VBPC
from coreset_sampler.synthetic.image_data import ImageData, open_images
from coreset_sampler.synthetic.networks import convnet, description
from coreset_sampler.synthetic.preprocessing import Raw

HERE = Path(__file__).resolve().parent.parent / "coreset_sampler" / "synthetic" / "zoo"
SEEDS = 5
DISTILLED_SEEDS = 3
METRICS = ("accuracy", "nll", "ece", "brier")
STEPS = 500
METHODS: dict[str, Callable[[Tensor, int], Coreset]] = {"k-center": farthest_first, "herding": match_mean}
PICKED = ["digits/k-center-1", "digits/k-center-10", "fashion-mnist/herding-1", "fashion-mnist/herding-10"]
MANY = ["digits/views-10", "mnist/views-1", "mnist/views-10"]
MANY += [f"{data}/views-{count}" for data in ("fashion-mnist", "cifar10") for count in (1, 10, 50)]
VIEWS = {f"{data}/views-1": 256 for data in ("mnist", "fashion-mnist", "cifar10")} | {"mnist/views-10": 64}  # for size
NAMES = PICKED + [f"{data}/vbpc-{count}" for data, count in VBPC] + MANY
LICENCES = {
    "mnist": "CC BY-SA 3.0 (LeCun, Cortes, Burges)",
    "fashion-mnist": "MIT (Zalando SE 2017)",
    "cifar10": "unstated (Krizhevsky 2009)",
}
NOTES = {
    "digits/k-center-10": "preferred to herding (0.9552 ± 0.0044, n = 5) on these same 500 images: slightly favourable",
}
RECIPE = f"ConvNet, width 32, InstanceNorm; Adam 1e-3, {STEPS} steps of the whole set, no augmentation"


def digits() -> ImageData:
    """scikit-learn's digits, 500 of them held out by a fixed split."""
    return open_images("digits")


def pick(data: ImageData, method: str, per_class: int) -> list[int]:
    """Indices into the training images, class after class."""
    pixels, labels = data.train
    chosen: list[int] = []
    for label in range(data.num_classes):
        members = (labels == label).nonzero().flatten()
        vectors = pixels[members].flatten(1).float() / 255
        chosen += members[METHODS[method](vectors, per_class).indices].tolist()
    return chosen


def blocks(image_size: int, width: int = 32) -> list[int]:
    """Widths of a ConvNet that halves images down to less than 4 pixels."""
    return [width] * next(count for count in range(1, 20) if image_size >> count < 4)


def accuracy(coreset: SyntheticCoreset, test: tuple[Tensor, Tensor], seed: int) -> float:
    """Of a network trained on the coreset alone, on all test images."""
    torch.manual_seed(seed)
    channels, _, image_size = coreset.stored.shape[1:]
    model = convnet(channels, coreset.num_classes or 0, image_size, widths=blocks(image_size))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    inputs, targets = coreset.pixels(), coreset.targets
    for _ in range(STEPS):
        optimizer.zero_grad()
        coreset.loss(model(inputs), targets).backward()
        optimizer.step()
    with torch.no_grad():
        pixels = coreset.preprocessing(test[0].float() / 255)
        right = [
            (model(x).argmax(1) == y).sum().item() for x, y in zip(pixels.split(500), test[1].split(500), strict=True)
        ]
    return sum(right) / len(test[1])


def picked(data: ImageData, method: str, per_class: int, commit: str) -> SyntheticCoreset:
    """Real images, with their measured accuracy."""
    indices = pick(data, method, per_class)
    pixels, labels = data.train

    def build(measured: dict[str, object]) -> SyntheticCoreset:
        provenance = {
            "data": data.name,
            "licence": data.licence,
            "made": f"real training images picked by {method} on pixels, per class; nothing is distilled",
            "settings": {
                "features": "pixels / 255",
                "images_per_class": per_class,
                "seed": "none: deterministic",
            },
            "command": f"python tools/make_zoo.py --data DIR --only {data.name}/{method}-{per_class}",
            "commit": commit,
            "train_indices": indices,
            "network": description("convnet", blocks(data.image_size)),
            "accuracy": measured,
        }
        return SyntheticCoreset(
            pixels[indices],
            labels[indices],
            preprocessing=Raw(),
            class_names=data.class_names,
            method=method,
            provenance=provenance,
        )

    results = [accuracy(build({}), data.test, seed) for seed in range(SEEDS)]
    measured = {
        "mean": round(statistics.mean(results), 4),
        "std": round(statistics.stdev(results), 4),
        "n": SEEDS,
        "test_images": len(data.test[1]),
        "how": RECIPE,
    }
    if (name := f"{data.name}/{method}-{per_class}") in NOTES:
        measured["note"] = NOTES[name]
    return build(measured)


def distilled(data: ImageData, method: str, per_class: int, *, runs: Path, commit: str) -> SyntheticCoreset:
    """Images learned by VBPC from all training images, measured on all test images as they are meant to be used."""
    name, before = f"{data.name}/{method}-{per_class}", time.process_time()
    coreset = distill(
        data,
        images_per_class=per_class,
        settings={"compiled": True},
        held_out=0.0,
        resume=runs / f"{name.replace('/', '-')}.run.safetensors",
        progress=lambda line: print(f"{name}: {line}", flush=True),
    )
    kept = ("data", "settings", "network", "networks", "seed", "steps", "minutes", "version")
    facts = {key: coreset.provenance[key] for key in kept if key in coreset.provenance}
    coreset.provenance = facts | {
        "licence": data.licence,
        "made": "learned by VBPC from all training images; started from random real ones",
        "cpu_minutes": round((time.process_time() - before) / 60, 1),
        "command": f"python tools/make_zoo.py --data DIR --only {name}",
        "commit": commit,
    }
    coreset.provenance |= {"accuracy": measured(coreset, data)}
    return coreset


def taught(data: ImageData, per_class: int, *, commit: str) -> SyntheticCoreset:
    """Real images with labelled views, by a teacher of all training images; to be measured by the benchmark."""
    name = f"{data.name}/views-{per_class}"
    coreset = teach(
        data,
        images_per_class=per_class,
        views=VIEWS.get(name),
        held_out=0.0,
        progress=lambda line: print(f"{name}: {line}", flush=True),
    )
    command = f"python tools/make_zoo.py --data DIR --only {name}"
    coreset.provenance |= {"licence": data.licence, "command": command, "commit": commit, "accuracy": {}}
    return coreset


def from_records(name: str, file: Path) -> dict[str, Any]:
    """What the benchmark has recorded of a set on each network, beside real images; the index leads with the ConvNet."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    networks: dict[str, dict[str, Any]] = {}
    rows = [row for row in rows if row["coreset"] == name and row["on"] == "test" and row["steps"] is None]
    for row in rows:
        images = "the coreset" if row["images"] == "set" else row["images"]
        networks.setdefault(row["network"], {}).setdefault(images, []).append(row["accuracy"])
    if not networks:
        raise SystemExit(
            f"{file} has no run of {name} on test images: python benchmarks/distilled.py {name} --data DIR"
        )
    table = {
        net: {how: of(values) for how, values in found.items()}
        for net, found in sorted(networks.items(), key=_convnet_first)
    }
    first = next(iter(table.values()))["the coreset"]
    how = f"{next(iter(table))} trained as recipe_for says; networks: others, beside as many real images"
    return {**first, "test_images": rows[0]["test_images"], "how": how, "networks": table}


def _convnet_first(entry: tuple[str, Any]) -> bool:
    return not entry[0].startswith("convnet:")


def of(values: list[float]) -> dict[str, float]:
    """Mean, deviation and number."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return spread({"mean": statistics.mean(values), "std": deviation}, len(values))


def measured(coreset: SyntheticCoreset, data: ImageData) -> dict[str, Any]:
    """Every metric by closed form and by SGD; the accuracy that the index leads with is that of the closed form."""
    groups = evaluate(coreset, data, by=("last-layer", "sgd"), seeds=DISTILLED_SEEDS, progress=False).summary()
    by = {group["by"]: {metric: spread(group[metric], group["n"]) for metric in METRICS} for group in groups}
    widths = "-".join(map(str, coreset.provenance["network"]["widths"]))
    how = f"VBPC's closed form on a fresh ConvNet {widths} after its steps on the coreset; by: also SGD, and other metrics"
    return {**by["last-layer"]["accuracy"], "test_images": len(data.test[1]), "how": how, "by": by}


def spread(values: dict[str, float], n: int) -> dict[str, float]:
    """Mean and deviation, rounded."""
    return {"mean": round(values["mean"], 4), "std": round(values["std"], 4), "n": n}


def write(name: str, coreset: SyntheticCoreset) -> dict[str, object]:
    """Writes the file and returns its line of the index."""
    file = f"{name.replace('/', '_')}.safetensors"
    coreset.save(HERE / file)
    about = {key: coreset.provenance[key] for key in ("data", "licence", "accuracy", "commit", "command")}
    return about | {"file": file, "method": coreset.method, "images_per_class": coreset.images_per_class}


def opened(name: str, folder: str | None) -> ImageData:
    """A data set by its name, with its licence."""
    if name == "digits":
        return digits()
    if folder is None:
        raise SystemExit(f"--data must name the folder that holds {name}")
    return replace(open_images(str(Path(folder) / name)), name=name, licence=LICENCES[name])


def main() -> None:
    """Makes what is asked for and keeps the rest of the index."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="FOLDER")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), help="where long runs save themselves (default runs)"
    )
    parser.add_argument("--measured", type=Path, help="records of benchmarks/distilled.py to take figures from")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.runs.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True
    ).stdout.strip()
    for name in options.only:
        data_name, method, per_class = re.fullmatch(r"(.+)/(.+)-(\d+)", name).groups()  # type: ignore[union-attr]
        if options.measured:
            coreset = SyntheticCoreset.load(HERE / f"{name.replace('/', '_')}.safetensors")
            coreset.provenance |= {"accuracy": from_records(name, options.measured)}
        else:
            data = opened(data_name, options.data)
            if method == "vbpc":
                coreset = distilled(data, method, int(per_class), runs=options.runs, commit=commit)
            elif method == "views":
                coreset = taught(data, int(per_class), commit=commit)
            else:
                coreset = picked(data, method, int(per_class), commit)
        about = write(name, coreset)
        print(name, about["accuracy"], flush=True)
        index = json.loads((HERE / "index.json").read_text(encoding="utf-8")) | {name: about}
        (HERE / "index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
