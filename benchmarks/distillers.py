"""The distillation methods side by side: random, herding, BPC-rKL, BPC-W, BPC-fKL, BPC-CD, VBPC, by SGD, HMC, closed form.

    python benchmarks/distillers.py fashion-mnist --data DIR --widths 16 32 64
    python benchmarks/distillers.py digits --widths 16 32 --images-per-class 1 --methods random fkl --seeds 3

Makes what is missing in --out (experts, coresets), measures it on the whole test set with fresh networks, prints the table.
A killed run, started again, continues. --tune first tries learning rates for a few steps on images held out of the training
set, and uses the best.

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
from functools import partial
from pathlib import Path
from typing import Any

import torch

from coreset_sampler import SyntheticCoreset, distill, evaluate, load_coreset
from coreset_sampler.selection.strategies.herding import match_mean
from coreset_sampler.synthetic.distillers import DivergedError, Experts
from coreset_sampler.synthetic.distillers.presets import METHODS, ExpertPreset, cpu
from coreset_sampler.synthetic.image_data import ImageData, open_images
from coreset_sampler.synthetic.inference.last_layer import features_of
from coreset_sampler.synthetic.problem import Problem, make_problem
from coreset_sampler.synthetic.reporting import Reporter
from coreset_sampler.synthetic.results import Log, Results
from coreset_sampler.synthetic.sources import make_experts

_RATES = [{"lr": 100.0, "inner_lr": 0.03}, {"lr": 1000.0, "inner_lr": 0.03}, {"lr": 1000.0, "inner_lr": 0.1}]
GRID: dict[str, list[dict[str, float]]] = {
    "rkl": [{"lr": 300.0}, {"lr": 3000.0}, {"lr": 30000.0}],
    "w": [{"lr": 1000.0, "inner_lr": 0.03}, {"lr": 300.0, "inner_lr": 0.1}, {"lr": 3000.0, "inner_lr": 0.1}],
    "fkl": _RATES,
    "cd": _RATES,
}
TUNE_STEPS = 60
BY: dict[str, dict[str, Any]] = {
    "sgd": {"steps": 200},
    "last-layer": {},
    "hmc": {"steps": 30, "burn_in": 15, "thin": 4},
}
PICKED = ("random", "herding")


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    images = open_images(options.data or options.name, image_size=options.image_size)
    log = Log(options.out / "tuned.json")
    if options.tune:
        for method in options.methods:
            for settings in GRID.get(method, ()):
                tune(options, images, method, settings, log)
    lines = {}
    for by, count, method in itertools.product(options.by, options.images_per_class, options.methods):
        path = options.out / f"{options.name}-{method}-{count}.safetensors"
        if not path.exists():
            make(options, images, method, count, best(log, method) if count < 10 else {}).save(path)
        if by != "last-layer" or method == "vbpc":
            lines[method, count, by] = line(method, count, by, load_coreset(path), measure(options, images, path, by))
        head = "| method | images per class | by | n | accuracy | NLL | ECE | minutes |\n" + "|---" * 8 + "|\n"
        (options.out / "table.md").write_text(head + "".join(lines.values()))
    print((options.out / "table.md").read_text())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="digits (built in), or what to call the data")
    parser.add_argument("--data", help="folder with the images; digits needs none")
    parser.add_argument("--image-size", type=int, help="scale and crop images to so many pixels")
    parser.add_argument("--widths", type=int, nargs="+", help="of the ConvNet (default: 128 in every block)")
    parser.add_argument("--images-per-class", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--methods", nargs="+", choices=[*PICKED, *METHODS], default=[*PICKED, *METHODS])
    parser.add_argument("--seeds", type=int, default=3, help="fresh networks to measure with")
    parser.add_argument("--seed", type=int, default=0, help="of distilling")
    parser.add_argument("--steps", type=int, help="of each method (default: the preset's)")
    parser.add_argument("--experts", type=int, help="how many (default: the preset's)")
    parser.add_argument("--tune", action="store_true", help="choose learning rates on held-out images first")
    parser.add_argument("--by", nargs="+", choices=list(BY), default=list(BY), help="inferences, in order")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/distillers"), help="folder for everything")
    return parser.parse_args()


def learned(
    options: argparse.Namespace, images: ImageData, method: str, count: int, settings: dict[str, Any], **more: Any
) -> SyntheticCoreset:
    """The coreset of a method; experts are shared by all of them."""
    return distill(
        images,
        method=method,
        images_per_class=count,
        settings=settings,
        name=options.name,
        widths=options.widths or problem_of(options, images).about_network["widths"],
        experts=experts_of(options, images) if method != "vbpc" else None,
        seed=options.seed,
        progress=lambda line: print(f"{method} {count}: {line}", flush=True),
        **more,
    )


def problem_of(options: argparse.Namespace, images: ImageData) -> Problem:
    return make_problem(images, name=options.name, widths=options.widths)


def experts_of(options: argparse.Namespace, images: ImageData) -> Path:
    """The folder of the experts, once they are trained."""
    plan = cpu("fkl", options.name, 1).experts or ExpertPreset(4)
    training = {"examples": plan.examples, **plan.training}
    training |= {"experts": options.experts} if options.experts else {}
    make_experts(problem_of(options, images), options.out / "experts", report=Reporter(print), **training)
    return options.out / "experts"


def tune(options: argparse.Namespace, images: ImageData, method: str, settings: dict[str, float], log: Log) -> None:
    """Held-out accuracy after a few steps at one image per class, with these settings."""
    row = {"method": method, "settings": settings, "steps": TUNE_STEPS}
    if log.find(row):
        return
    try:
        coreset = learned(options, images, method, 1, settings, steps=TUNE_STEPS, evaluate_every=TUNE_STEPS)
        accuracy = coreset.provenance["held_out"][-1]["accuracy"]
    except DivergedError as error:
        print(error)
        accuracy = 0.0
    log.add(row | {"accuracy": accuracy})
    print(f"{method} {settings}: held-out accuracy {accuracy:.3f} after {TUNE_STEPS} steps", flush=True)


def best(log: Log, method: str) -> dict[str, Any]:
    rows = [row for row in log.rows if row["method"] == method]
    return max(rows, key=lambda row: row["accuracy"])["settings"] if rows else {}


def make(
    options: argparse.Namespace, images: ImageData, method: str, count: int, settings: dict[str, Any]
) -> SyntheticCoreset:
    if method not in PICKED:
        film = options.out / f"{options.name}-{method}-{count}.png"
        resume = options.out / f"{options.name}-{method}-{count}.checkpoint.safetensors"
        return learned(options, images, method, count, settings, steps=options.steps, resume=resume, film=film)
    problem = problem_of(options, images)
    inputs, labels = picked(options, images, problem, method, count)
    about = {"class_names": problem.class_names, "provenance": {"data": options.name, "minutes": 0.0}}
    return SyntheticCoreset(inputs, labels, preprocessing=problem.preprocessing, method=method, **about)


def picked(
    options: argparse.Namespace, images: ImageData, problem: Problem, method: str, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Real images: random ones, or those whose mean features are their class's, as an expert sees them."""
    if method == "random":
        return problem.train.per_class(count, torch.Generator().manual_seed(options.seed))
    folder, part = experts_of(options, images), problem.part(10_000)
    network = problem.network()
    theta = Experts(folder).theta(0, 8)
    torch.nn.utils.vector_to_parameters(theta, network.parameters())
    features = features_of(network.eval())
    with torch.no_grad():
        seen = torch.cat([features(part.rows(rows)[0]).flatten(1) for rows in torch.arange(part.n).split(500)])
    picks = []
    for label in part.targets.unique():
        members = (part.targets == label).nonzero().flatten()
        picks.append(members[match_mean(seen[members], min(count, len(members))).indices])
    return part.rows(torch.cat(picks))


def measure(options: argparse.Namespace, images: ImageData, path: Path, by: str) -> Results:
    """Accuracy, NLL and ECE on the whole test set, a row for each network."""
    return evaluate(
        load_coreset(path),
        images,
        by=[by],
        settings={by: BY[by]},
        networks={"convnet": problem_of(options, images).network},
        seeds=options.seeds,
        output=path.with_name(f"{path.stem}-{by}.json"),
        progress=partial(print, f"{path.stem}:", flush=True),
    )


def line(method: str, count: int, by: str, coreset: SyntheticCoreset, results: Results) -> str:
    (group,) = results.summary()
    cells = [f"{group[name]['mean']:.3f} ± {group[name]['std'] or 0.0:.3f}" for name in ("accuracy", "nll", "ece")]
    return f"| {method} | {count} | {by} | {group['n']} | {' | '.join(cells)} | {coreset.provenance['minutes']:.1f} |\n"


if __name__ == "__main__":
    main()
