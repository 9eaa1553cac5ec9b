"""Any folder of images as 1 or 10 learned images per class: BPC-rKL, BPC-W, BPC-fKL, BPC-CD, VBPC, random, herding.

    python recipes/distill.py fashion-mnist --data DIR --widths 16 32 64
    python recipes/distill.py digits --widths 16 32 --ipc 1 --methods random fkl --seeds 3

Makes what is missing in --out (experts, coresets), judges it on the whole test set by SGD, HMC and for VBPC the closed form,
with fresh networks, and prints the table. Every step is kept on the way: a killed run, started again, goes on.
--tune first tries learning rates for a few steps on images held out of the training set, and uses the best.

Measured on Fashion-MNIST, widths 16 32 64, five experts of 8 epochs on 10,000 images, one core; accuracy by SGD on all test
images, n=3 networks, standard deviations 0.002 to 0.035:

    images per class   random  herding  rKL    W      fKL    CD     VBPC (1,500 steps)
    1                  0.551   0.657    0.560  0.684  0.706  0.694  0.755
    10                 0.704   0.758    0.719  0.795  0.782  0.787  0.843

0.5 to 2.1 CPU minutes each. NLL, ECE, HMC and the closed form: docs/choosing_a_distiller.md.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from coreset_sampler import SyntheticCoreset, load_coreset
from coreset_sampler.cli.distill import build, judge
from coreset_sampler.cli.evaluate import evaluate
from coreset_sampler.cli.experts import make_experts
from coreset_sampler.cli.problem import Problem, add_problem, make_problem
from coreset_sampler.cli.results import Log
from coreset_sampler.selection.strategies.herding import match_mean
from coreset_sampler.synthetic.distillers import Experts, checkpoint
from coreset_sampler.synthetic.distillers.claim import claimed
from coreset_sampler.synthetic.distillers.film import draw_film
from coreset_sampler.synthetic.distillers.presets import METHODS, Preset, cpu
from coreset_sampler.synthetic.distillers.run import as_coreset, checkpoint_beside, run, saver, settings_of, start
from coreset_sampler.synthetic.image_data import ImageData, open_images
from coreset_sampler.synthetic.inference.last_layer import features_of
from coreset_sampler.synthetic.inference.predict import Inference, by_hmc, by_last_layer, by_sgd
from coreset_sampler.synthetic.networks import description

_RATES = [{"lr": 100.0, "inner_lr": 0.03}, {"lr": 1000.0, "inner_lr": 0.03}, {"lr": 1000.0, "inner_lr": 0.1}]
GRID: dict[str, list[dict[str, float]]] = {
    "rkl": [{"lr": 300.0}, {"lr": 3000.0}, {"lr": 30000.0}],
    "w": [{"lr": 1000.0, "inner_lr": 0.03}, {"lr": 300.0, "inner_lr": 0.1}, {"lr": 3000.0, "inner_lr": 0.1}],
    "fkl": _RATES,
    "cd": _RATES,
}
TUNE_STEPS = 60
BY: dict[str, tuple[Callable[..., Inference], dict[str, Any]]] = {
    "sgd": (by_sgd, {"steps": 200}),
    "last-layer": (by_last_layer, {}),
    "hmc": (by_hmc, {"steps": 30, "burn_in": 15, "thin": 4}),
}


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads or 1)
    options.out.mkdir(parents=True, exist_ok=True)
    images = open_images(options.data or options.name, size=options.size)
    problem = make_problem(images, options)
    log = Log(options.out / "tuned.json")
    if options.tune:
        for method in options.methods:
            for settings in GRID.get(method, ()):
                tune(options, problem, method, settings, log)
    for by in options.by:
        for per_class, method in itertools.product(options.ipc, options.methods):
            path = options.out / f"{options.name}-{method}-{per_class}.safetensors"
            with claimed(path, checkpoint_beside(path)):
                make(options, problem, method, per_class, best(log, method) if per_class < 10 else {}, path)
            rows = figures(options, images, problem, method, path, by)
            report(options, method, per_class, by, load_coreset(path), rows)
    print((options.out / "table.md").read_text())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_problem(parser)
    parser.add_argument("--ipc", type=int, nargs="+", default=[1, 10], help="images per class")
    parser.add_argument("--methods", nargs="+", default=["random", "herding", *METHODS], help="which, in order")
    parser.add_argument("--seeds", type=int, default=3, help="fresh networks to judge with")
    parser.add_argument("--steps", type=int, help="of each method (default: the preset's)")
    parser.add_argument("--experts", type=int, help="how many (default: the preset's)")
    parser.add_argument("--tune", action="store_true", help="choose learning rates on held-out images first")
    parser.add_argument("--by", nargs="+", choices=list(BY), default=list(BY), help="how to judge, in order")
    parser.add_argument("--out", type=Path, default=Path("runs/distill"), help="folder for everything")
    options = parser.parse_args()
    unknown = [method for method in options.methods if method not in ("random", "herding", *METHODS)]
    if unknown:
        parser.error(f"unknown method {unknown[0]}; known: random, herding, {', '.join(METHODS)}")
    return options


def preset_of(options: argparse.Namespace, method: str, per_class: int) -> Preset:
    return cpu(METHODS[method], options.name, per_class)


def experts_of(options: argparse.Namespace, problem: Problem, preset: Preset) -> Experts:
    folder = options.out / "experts"
    make_experts(
        problem,
        folder,
        experts=options.experts or preset.experts,
        epochs=preset.epochs,
        rate=preset.expert_rate,
        batch=preset.expert_batch,
        examples=preset.examples,
        seed=0,
    )
    return Experts(folder, problem.train, max_start=preset.max_start)


def tune(options: argparse.Namespace, problem: Problem, method: str, settings: dict[str, float], log: Log) -> None:
    """Held-out accuracy after a few steps at one image per class, with these settings."""
    row = {"method": method, "settings": settings, "steps": TUNE_STEPS}
    if log.find(row):
        return
    preset = preset_of(options, method, 1)
    distiller = build(METHODS[method], problem, preset.settings | settings)
    try:
        progress = start(distiller, problem.train, 1, seed=options.seed)
        progress = run(distiller, progress, experts_of(options, problem, preset), steps=TUNE_STEPS, judge_every=10**9)
        accuracy = judge(distiller, progress.state, problem)
    except ValueError as error:  # it diverged
        print(error)
        accuracy = 0.0
    log.add(row | {"accuracy": accuracy})
    print(f"{method} {settings}: held-out accuracy {accuracy:.3f} after {TUNE_STEPS} steps", flush=True)


def best(log: Log, method: str) -> dict[str, Any]:
    rows = [row for row in log.rows if row["method"] == method]
    return max(rows, key=lambda row: row["accuracy"])["settings"] if rows else {}


def make(
    options: argparse.Namespace, problem: Problem, method: str, per_class: int, tuned: dict[str, Any], path: Path
) -> None:
    """Makes the coreset's file if it is missing."""
    if path.exists():
        return
    if method in ("random", "herding"):
        inputs, labels = picked(options, problem, method, per_class)
        about = {"classes": problem.classes, "provenance": {"data": options.name, "cpu_minutes": 0.0}}
        SyntheticCoreset(inputs, labels, preprocessing=problem.preprocessing, method=method, **about).save(path)
        return
    preset = preset_of(options, method, per_class)
    steps = options.steps or preset.steps
    decay = {"decay": steps} if method == "vbpc" else {}
    distiller = build(METHODS[method], problem, preset.settings | decay | tuned)
    source = experts_of(options, problem, preset) if preset.experts else problem.train
    under_way = checkpoint_beside(path)
    progress = start(distiller, problem.train, per_class, seed=options.seed)
    if under_way.exists():
        progress, _ = checkpoint.load(under_way)
    begun, clock = progress.state.step, time.process_time()
    progress = run(
        distiller,
        progress,
        source,
        steps=steps,
        save=saver(under_way, {}),
        report=lambda line: print(f"{method} {per_class}: {line}", flush=True),
    )
    spent = (time.process_time() - clock) / max(1, steps - begun) * steps
    settings = {
        "settings": settings_of(distiller),
        "network": problem.net | description(options.net, problem.net["widths"]),
        "experts": len(source) if preset.experts else 0,
    }
    facts = {"data": options.name, "steps": steps, "seed": options.seed, "cpu_minutes": spent / 60}
    about = {"classes": problem.classes, "images_per_class": per_class}
    coreset = as_coreset(
        distiller, progress.state, preprocessing=problem.preprocessing, provenance=facts | settings, **about
    )
    coreset.save(path)
    title = f"{options.name}, {method}, {per_class} per class, by step"
    draw_film(progress.frames, path.with_suffix(".png"), preprocessing=problem.preprocessing, title=title)
    under_way.unlink(missing_ok=True)


def picked(
    options: argparse.Namespace, problem: Problem, method: str, per_class: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Real images: random ones, or those whose mean features are their class's, as an expert sees them."""
    if method == "random":
        return problem.train.per_class(per_class, torch.Generator().manual_seed(options.seed))
    experts, part = experts_of(options, problem, preset_of(options, "fkl", per_class)), problem.part(10_000)
    network = problem.network()
    torch.nn.utils.vector_to_parameters(experts.theta(0, 8), network.parameters())
    features = features_of(network.eval())
    with torch.no_grad():
        seen = torch.cat([features(part.rows(rows)[0]).flatten(1) for rows in torch.arange(part.n).split(500)])
    picks = []
    for label in part.targets.unique():
        members = (part.targets == label).nonzero().flatten()
        picks.append(members[match_mean(seen[members], min(per_class, len(members))).indices])
    return part.rows(torch.cat(picks))


def figures(
    options: argparse.Namespace, images: ImageData, problem: Problem, method: str, path: Path, by: str
) -> list[dict[str, Any]]:
    """Accuracy, NLL and ECE on the whole test set, a row a network; none in closed form but for VBPC."""
    if by == "last-layer" and method != "vbpc":
        return []
    return evaluate(
        load_coreset(path),
        images,
        by={by: BY[by][0](**BY[by][1])},
        nets={options.net: problem.network},
        seeds=range(options.seeds),
        about=BY[by][1],
        log=Log(path.with_name(f"{path.stem}-{by}.json")),
        say=lambda line: print(f"{path.stem}: {line}", flush=True),
    )


def report(
    options: argparse.Namespace,
    method: str,
    per_class: int,
    by: str,
    coreset: SyntheticCoreset,
    rows: list[dict[str, Any]],
) -> None:
    """Adds lines to the table, in place of older ones of the same coreset."""
    path = options.out / "table.md"
    head = [
        "| method | images per class | by | n | accuracy | NLL | ECE | CPU minutes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines = path.read_text().splitlines()[2:] if path.exists() else []
    lines = [line for line in lines if not line.startswith(f"| {method} | {per_class} | {by} |")]
    if rows:
        cells = [
            method,
            per_class,
            by,
            len(rows),
            *(spread([row[name] for row in rows]) for name in ("accuracy", "nll", "ece")),
        ]
        lines.append("| " + " | ".join(map(str, cells)) + f" | {coreset.provenance['cpu_minutes']:.1f} |")
    path.write_text("\n".join([*head, *lines]) + "\n")


def spread(values: list[float]) -> str:
    return f"{statistics.fmean(values):.3f} ± {statistics.stdev(values) if len(values) > 1 else 0.0:.3f}"


if __name__ == "__main__":
    main()
