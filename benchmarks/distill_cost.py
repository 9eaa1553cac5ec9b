"""What a step of a pseudo-coreset method costs as its unrolled steps grow: peak memory and time.

    python benchmarks/distill_cost.py                    # 5 to 50 steps, W, W recomputed, fKL and CD
    python benchmarks/distill_cost.py --widths 128 128 128 --pixels 32 --channels 3 --images 100

Every point is a fresh process on one thread. Memory is how far the process's peak rises above what it held before its first
step; time is the CPU time of one step, the second. Data and experts are random: their values do not matter here.
VBPC has its own: benchmarks/vbpc_cost.py.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from coreset_sampler.synthetic import distillers
from coreset_sampler.synthetic.distillers import pixels
from coreset_sampler.synthetic.networks import network

METHODS: dict[str, Callable[..., distillers.Distiller]] = {
    "W": partial(distillers.Wasserstein, recompute=False),
    "W recomputed": distillers.Wasserstein,
    "fKL": partial(distillers.ForwardKL, samples=5),
    "CD": distillers.ContrastiveDivergence,
}


class OneExpert:
    """A source with two points near each other."""

    n = 50_000

    def __init__(self, start: torch.Tensor) -> None:
        self.points = start, start + 0.01 * torch.randn(start.shape)

    def batch(self, size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """No method here looks at real examples."""
        raise NotImplementedError

    def segment(self, epochs: int, generator: torch.Generator, kind: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Always the same two."""
        return self.points


def main() -> None:
    options = arguments()
    if options.point:
        print(json.dumps(measure(options, options.point, options.steps[0])))
        return
    found = {(name, steps): in_new_process(options, name, steps) for name in METHODS for steps in options.steps}
    for what, digits in (("peak memory, MB", 0), ("CPU seconds a step", 2)):
        print(f"\n| {what} | " + " | ".join(f"{steps} steps" for steps in options.steps) + " |")
        print("|---" * (len(options.steps) + 1) + "|")
        for name in METHODS:
            values = [found[name, steps]["memory" if digits == 0 else "seconds"] for steps in options.steps]
            print(f"| {name} | " + " | ".join(f"{value:.{digits}f}" for value in values) + " |")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[5, 10, 20, 30, 50])
    parser.add_argument("--images", type=int, default=100, help="in the coreset")
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--pixels", type=int, default=28)
    parser.add_argument("--channels", type=int, default=1)
    parser.add_argument("--point", choices=list(METHODS), help="measure only this, in this process")
    return parser.parse_args()


def in_new_process(options: argparse.Namespace, name: str, steps: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--point", name, "--steps", str(steps), "--images", str(options.images)]
    command += ["--widths", *map(str, options.widths), "--pixels", str(options.pixels)]
    command += ["--channels", str(options.channels)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    result: dict[str, float] = json.loads(done.stdout)
    print(f"{name}, {steps} steps: {result['memory']:.0f} MB, {result['seconds']:.2f} s", file=sys.stderr, flush=True)
    return result


def measure(options: argparse.Namespace, name: str, steps: int) -> dict[str, float]:
    torch.set_num_threads(1)
    make = network("convnet", options.channels, 10, options.pixels, widths=options.widths)
    distiller = METHODS[name](make, inner_steps=steps, inner_lr=0.01, augmentation=None)
    source = OneExpert(pixels.flat_network(make).theta())
    images = torch.randn(options.images, options.channels, options.pixels, options.pixels)
    state = distiller.init(images, torch.arange(options.images) % 10, seed=0)
    before = peak()
    state, _ = distiller.step(state, source)
    began = time.process_time()
    distiller.step(state, source)
    return {"memory": peak() - before, "seconds": time.process_time() - began}


def peak() -> float:
    """The most memory that this process has held, in MB."""
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes / 1024 if sys.platform != "darwin" else kilobytes / 1024**2


if __name__ == "__main__":
    main()
