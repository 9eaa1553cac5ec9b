"""The distillation methods side by side: random, herding, BPC-rKL, BPC-W, BPC-fKL, BPC-CD, VBPC, by SGD, HMC, closed form.

    python benchmarks/distillers.py fashion-mnist --data DIR --widths 16 32 64 --experts 12 --longer 2
    python benchmarks/distillers.py digits --widths 16 32 --images-per-class 1 --methods random fkl
    python benchmarks/distillers.py cifar10 --data DIR --images-per-class 10 --methods random fkl vbpc --corruptions all

Makes what is missing in --out (experts, then --coresets of each method, each from a seed of its own), measures each with
--seeds fresh networks on all test images, clean and corrupted. Finished runs are lines of --results and are not run again;
a coreset whose making was killed is continued. --tune first tries learning rates for a few steps on images held out of
the training set, and uses the best. Figures: docs/choosing_a_distiller.md and docs/results.md.
"""

from __future__ import annotations

import argparse
import time
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from harness import Row, grouped, run_all, spread
from torch import Tensor

from coreset_sampler import SyntheticCoreset, distill, load_coreset
from coreset_sampler.selection.strategies.herding import match_mean
from coreset_sampler.synthetic.corruptions import corrupted, corruption_names
from coreset_sampler.synthetic.distillers import DivergedError, Experts
from coreset_sampler.synthetic.distillers.presets import METHODS, ExpertPreset, cpu
from coreset_sampler.synthetic.evaluation import METRICS
from coreset_sampler.synthetic.image_data import ImageData, open_images
from coreset_sampler.synthetic.inference.by_name import inferences
from coreset_sampler.synthetic.inference.last_layer import features_of
from coreset_sampler.synthetic.inference.predict import Predictive
from coreset_sampler.synthetic.problem import Problem, make_problem
from coreset_sampler.synthetic.reporting import Reporter
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


class Bench:
    """Coresets, networks that know only these, and test images, each made once."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.images: ImageData = open_images(options.data or options.name, image_size=options.image_size)
        self.problem: Problem = make_problem(self.images, name=options.name, widths=options.widths)
        self.widths = options.widths or self.problem.about_network["widths"]
        self.experts = cache(self._experts)
        self.test = lru_cache(maxsize=1)(self._test)
        self.predictive = lru_cache(maxsize=256)(self._predictive)
        self.tuned: dict[str, Any] = {method: {} for method in METHODS}

    def _experts(self) -> Path:
        """The folder of the experts, shared by all methods, once they are trained."""
        plan = cpu("fkl", self.options.name, 1).experts or ExpertPreset(4)
        training = {"examples": plan.examples, **plan.training}
        training |= {"experts": self.options.experts} if self.options.experts else {}
        folder: Path = self.options.out / f"{self.options.name}-experts"
        make_experts(self.problem, folder, report=Reporter(print), **training)
        return folder

    def learned(self, method: str, count: int, **more: Any) -> SyntheticCoreset:
        """What a method makes of the training images, from the shared experts if it needs any."""
        return distill(
            self.images,
            method=method,
            images_per_class=count,
            name=self.options.name,
            widths=self.widths,
            experts=self.experts() if method != "vbpc" else None,
            progress=lambda line: print(f"{method} {count}: {line}", flush=True),
            **more,
        )

    def coreset(self, method: str, count: int, seed: int) -> SyntheticCoreset:
        """From its file, made if it is not there."""
        length = f"{self.options.steps} steps" if self.options.steps else f"{self.options.longer:g} times the steps"
        how = f"{'-'.join(map(str, self.widths))}, {self.options.experts} experts, {length}"
        path = self.options.out / how / f"{self.options.name}-{method}-{count}-{seed}.safetensors"
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            (self._picked if method in PICKED else self._distilled)(method, count, seed, path).save(path)
        return load_coreset(path)

    def _distilled(self, method: str, count: int, seed: int, path: Path) -> SyntheticCoreset:
        steps = self.options.steps or int(cpu(method, self.options.name, count).steps * self.options.longer)
        settings = self.tuned[method] if count < 10 else {}
        resume = path.with_suffix(".checkpoint.safetensors")
        return self.learned(
            method, count, seed=seed, settings=settings, steps=steps, evaluate_every=steps, resume=resume
        )

    def _picked(self, method: str, count: int, seed: int, _: Path) -> SyntheticCoreset:
        """Real images: random ones, or those whose mean features are their class's, as an expert sees them."""
        if method == "random":
            inputs, labels = self.problem.train.per_class(count, torch.Generator().manual_seed(seed))
        else:
            part, network = self.problem.part(10_000), self.problem.network()
            torch.nn.utils.vector_to_parameters(Experts(self.experts()).theta(seed, 8), network.parameters())
            features = features_of(network.eval())
            with torch.no_grad():
                seen = torch.cat([features(part.rows(rows)[0]).flatten(1) for rows in torch.arange(part.n).split(500)])
            members = [(part.targets == label).nonzero().flatten() for label in part.targets.unique()]
            picks = [each[match_mean(seen[each], min(count, len(each))).indices] for each in members]
            inputs, labels = part.rows(torch.cat(picks))
        about = {"class_names": self.problem.class_names, "provenance": {"data": self.options.name, "minutes": 0.0}}
        return SyntheticCoreset(inputs, labels, preprocessing=self.problem.preprocessing, method=method, **about)

    def _predictive(self, method: str, count: int, coreset: int, by: str, seed: int) -> Predictive:
        (infer,) = (inferences([by], {by: BY[by]}) or {}).values()
        return infer(self.coreset(method, count, coreset), self.problem.network, seed)

    def _test(self, corruption: str | None, severity: int) -> tuple[Tensor, Tensor]:
        pixels, labels = self.images.test
        changed = pixels if corruption is None else corrupted(pixels, corruption, severity=severity)
        return self.problem.preprocessing(changed.float() / 255), labels

    def measure(self, job: Row) -> Row:
        """What one network that knows one coreset says of one test set."""
        made = (job["method"], job["images_per_class"], job["coreset"])
        minutes, begin = self.coreset(*made).provenance["minutes"], time.process_time()
        inputs, labels = self.test(job["corruption"], job["severity"] or 0)
        probabilities = self.predictive(*made, job["by"], job["seed"])(inputs)
        figures = {name: metric(probabilities, labels) for name, metric in METRICS.items()}
        return figures | {"minutes": minutes, "cpu": round(time.process_time() - begin, 2)}

    def tune(self, job: Row) -> Row:
        """Held-out accuracy after a few steps at one image per class, with these settings."""
        try:
            few = dict(steps=TUNE_STEPS, evaluate_every=TUNE_STEPS, settings=job["settings"])
            accuracy = self.learned(job["method"], 1, **few).provenance["held_out"][-1]["accuracy"]
        except DivergedError as error:
            print(error)
            accuracy = 0.0
        return {"accuracy": accuracy}


def jobs_of(options: argparse.Namespace) -> list[Row]:
    """Each network and test set; all that one corrupted test set is for before the next."""
    names = corruption_names() if options.corruptions == ["all"] else options.corruptions
    for unknown in (name for name in names if name not in corruption_names()):
        raise SystemExit(f"unknown corruption {unknown!r}; known: all, {', '.join(corruption_names())}")
    return [
        dict(data=options.name, on="test", widths=options.widths, experts=options.experts)
        | dict(longer=options.longer, steps=options.steps)
        | dict(method=method, images_per_class=count, coreset=coreset, by=by, seed=seed)
        | dict(corruption=corruption, severity=corruption and options.severity)
        for corruption in (None, *names)
        for coreset in range(options.coresets)
        for count in options.images_per_class
        for method in options.methods
        for by in options.by
        if by != "last-layer" or method == "vbpc"
        for seed in range(options.seeds)
    ]


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    jobs, bench = jobs_of(options), Bench(options)
    if options.tune:
        trials = [
            dict(data=options.name, on="validation", steps=TUNE_STEPS, method=method, settings=settings)
            for method in options.methods
            for settings in GRID.get(method, ())
        ]
        rows = run_all(trials, bench.tune, options.results.with_name(f"{options.results.stem}-tuned.jsonl"))
        for (method,), found in grouped(rows, "method").items():
            bench.tuned[method] = max(found, key=lambda row: row["accuracy"])["settings"]
    rows = run_all(jobs, bench.measure, options.results)
    by = ("method", "images_per_class", "by", "corruption")
    for group, found in grouped(rows, *by).items():
        figures = ", ".join(f"{name} {spread([row[name] for row in found])}" for name in ("accuracy", "nll", "ece"))
        print(*group, figures, f"n = {len(found)}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="digits (built in), or what to call the data")
    parser.add_argument("--data", help="folder with the images; digits needs none")
    parser.add_argument("--image-size", type=int, help="scale and crop images to so many pixels")
    parser.add_argument("--widths", type=int, nargs="+", help="of the ConvNet (default: 128 in every block)")
    parser.add_argument("--images-per-class", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--methods", nargs="+", choices=[*PICKED, *METHODS], default=[*PICKED, *METHODS])
    parser.add_argument("--coresets", type=int, default=2, help="of each method, from different seeds")
    parser.add_argument("--seeds", type=int, default=3, help="fresh networks to measure each coreset with")
    parser.add_argument("--longer", type=float, default=1.0, help="so many times the preset's steps")
    parser.add_argument("--steps", type=int, help="of each method, in place of the preset's")
    parser.add_argument("--experts", type=int, help="how many (default: the preset's)")
    parser.add_argument("--tune", action="store_true", help="choose learning rates on held-out images first")
    parser.add_argument("--by", nargs="+", choices=list(BY), default=list(BY), help="inferences, in order")
    parser.add_argument(
        "--corruptions", nargs="+", default=[], help="test sets besides the clean one; all for nineteen"
    )
    parser.add_argument("--severity", type=int, default=3, choices=range(1, 6), help="of the corruptions")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/distillers"), help="folder for experts and coresets")
    parser.add_argument("--results", type=Path, default=Path("runs/distillers.jsonl"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
