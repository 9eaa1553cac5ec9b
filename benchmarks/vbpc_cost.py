"""What a step of VBPC costs: the closed form against the h x h one, where the time goes, and what makes it faster.

    python benchmarks/vbpc_cost.py            # a quarter of an hour of one core; --quick takes five minutes

One thread; times are CPU seconds of the process, which other work on the machine disturbs less than wall time. Contestants
take turns and each counts by its fastest turn. Memory is the peak of the process over what it held before (Linux). Images
are random numbers: their cost does not depend on what they show. Prints markdown.

First table: loss and its gradient in features and targets, by `LastLayerPosterior` and by the h x h matrices that the
paper's equation 21 writes down. Second: the parts of a step, and real batch and coreset through one pass. Third: steps a
second, plain, in bf16, compiled and both, and what it would cost to train all ten networks of the pool every step: one
after the other, or at once by `torch.vmap`.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from coreset_sampler.synthetic.distillers.real_data import RealData
from coreset_sampler.synthetic.distillers.state import State
from coreset_sampler.synthetic.distillers.variational import Variational
from coreset_sampler.synthetic.networks import convnet

RHO, GAMMA, BETA = 100.0, 1.0, 1e-4
PROBLEMS = [  # name, channels, pixels, widths, images per class
    ("28 x 28, 1 a class", 1, 28, (32, 64, 128), 1),
    ("28 x 28, 10 a class, narrow", 1, 28, (16, 32, 64), 10),
    ("28 x 28, 10 a class", 1, 28, (32, 64, 128), 10),
    ("3 x 32 x 32, 10 a class", 3, 32, (32, 64, 128), 10),
]


def fastest(contestants: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """CPU milliseconds of each contestant's best turn."""
    best = dict.fromkeys(contestants, math.inf)
    for run in contestants.values():
        run()
    for _ in range(turns):
        for name, run in contestants.items():
            began = time.process_time()
            run()
            best[name] = min(best[name], 1e3 * (time.process_time() - began))
    return best


def peak_megabytes(run: Callable[[], object]) -> float:
    """What the process held at most while running, over what it held before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    run()
    return max(0.0, _status("VmHWM") - before)


def measured(run: Callable[[], Tensor], turns: int) -> tuple[float, float, Tensor]:
    """CPU milliseconds of the best turn, megabytes of the first, and the answer."""
    best, megabytes, answers = math.inf, None, []
    for _ in range(turns):
        began = time.process_time()
        peak = peak_megabytes(lambda: answers.append(run()))
        best, megabytes = min(best, 1e3 * (time.process_time() - began)), peak if megabytes is None else megabytes
    return best, megabytes or 0.0, answers[-1]


def _status(field: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def by_matrices(phi: Tensor, y: Tensor, real: Tensor, labels: Tensor, n: int) -> Tensor:
    """The same loss by matrices of h x h, in float64."""
    phi, y, real = phi.double(), y.double(), real.double()
    h, k = phi.shape[1], y.shape[1]
    eye = torch.eye(h, dtype=torch.float64)
    precision = RHO * eye + GAMMA / BETA * phi.T @ phi
    covariance = torch.linalg.inv(precision)
    mean = covariance @ (GAMMA / BETA * phi.T @ y)
    scores = real @ mean / (1 + math.pi / 8 * (real @ covariance * real).sum(1)).sqrt()[:, None]
    logdet = torch.linalg.slogdet(precision).logabsdet - h * math.log(RHO)
    kl = k / 2 * (logdet + RHO * covariance.trace() - h) + RHO / 2 * mean.square().sum()
    return functional.cross_entropy(scores, labels) + kl / n


def closed_form(sizes: Sequence[int], turns: int) -> None:
    """The first table."""
    print("\nLoss and gradient for 100 coreset images, 128 real ones and 10 classes, as the features h grow\n")
    print(
        "| h | ours, ms | ours, MB | h x h, ms | h x h, MB | ratio of times | gradients differ by |\n"
        + "|---" * 7
        + "|"
    )
    distiller = Variational(convnet, rho=RHO, gamma=GAMMA, beta=BETA, weight=1.0)
    for h in sizes:
        generator = torch.Generator().manual_seed(h)
        phi, real = (torch.randn(rows, h, generator=generator).relu() for rows in (100, 128))
        y, labels = torch.randn(100, 10, generator=generator), torch.arange(128) % 10

        def gradient(loss: Callable[..., Tensor], phi=phi, y=y, real=real, labels=labels) -> Tensor:
            seen, targets = phi.clone().requires_grad_(), y.clone().requires_grad_()
            return torch.autograd.grad(loss(seen, targets, real, labels, 60_000), (seen, targets))[0]

        rows = {}
        for name, loss in (("ours", lambda *a: distiller.loss(*a)[0]), ("h x h", by_matrices)):
            rows[name] = measured(partial(gradient, loss), turns if name == "ours" or h < 4096 else 1)
        (ours, mine, one), (theirs, matrices, other) = rows["ours"], rows["h x h"]
        off = float((one - other).norm() / one.norm())
        print(
            f"| {h} | {ours:.1f} | {mine:.0f} | {theirs:.0f} | {matrices:.0f} | {theirs / ours:.0f} | {off:.0e} |",
            flush=True,
        )


def problem(channels: int, pixels: int, widths: Sequence[int], per_class: int, **settings) -> tuple:
    """A distiller, its first state and random data."""
    generator = torch.Generator().manual_seed(0)
    data = RealData(torch.randn(2000, channels, pixels, pixels, generator=generator), torch.arange(2000) % 10)
    network = partial(convnet, channels, 10, pixels, widths=tuple(widths))
    distiller = Variational(network, **settings)
    return distiller, distiller.init(*data.per_class(per_class, generator), seed=0), data


def parts(distiller: Variational, state: State, data: RealData) -> dict[str, Callable[[], object]]:
    """A step, and its parts one by one."""
    kind = distiller._kinds[0]
    parameters = kind.parameters(state.memory["network.0"])
    real, labels = data.batch(distiller.batch, torch.Generator().manual_seed(0))
    with torch.no_grad():
        seen = kind.features(parameters, real)
    inputs, targets = state.inputs.clone().requires_grad_(), state.targets.clone().requires_grad_()
    phi = kind.features(parameters, inputs).detach().requires_grad_()

    def coreset() -> None:
        torch.autograd.grad(kind.features(parameters, inputs).sum(), inputs)

    def head() -> None:
        torch.autograd.grad(distiller.loss(phi, targets, seen, labels, data.n)[0], (phi, targets))

    def batch() -> None:
        with torch.no_grad():
            kind.features(parameters, real)

    def together() -> None:
        both = kind.features(parameters, torch.cat([inputs, real]))
        torch.autograd.grad(both[: len(inputs)].sum(), inputs)

    return {
        "step": lambda: distiller.step(state, data),
        "real batch forward": batch,
        "coreset forward and back": coreset,
        "both in one pass": together,
        "closed form forward and back": head,
        "pool step": lambda: distiller._trained(state, 0, torch.Generator().manual_seed(0)),
    }


def whole_pool(distiller: Variational, state: State) -> dict[str, Callable[[], object]]:
    """One step of every network of the pool: one after the other, or batched."""
    kind = distiller._kinds[0]
    module, each = kind._template, [kind.parameters(state.memory[f"network.{i}"]) for i in range(distiller.pool)]
    stacked = {name: torch.stack([p[name] for p in each]) for name in each[0]}

    def error(parameters: dict[str, Tensor]) -> Tensor:
        return functional.mse_loss(functional_call(module, parameters, (state.inputs,)), state.targets)

    return {
        "all ten, one by one": lambda: [grad(error)(parameters) for parameters in each],
        "all ten, by vmap": lambda: vmap(grad(error))(stacked),
    }


def where_time_goes(turns: int, problems: list, ways: Sequence[str]) -> None:
    """The second table."""
    print("\nCPU milliseconds of a step and its parts, real batch 128 (64 at 1 a class)\n")
    names = ["step", "real batch forward", "coreset forward and back", "both in one pass"]
    names += ["closed form forward and back", "pool step"]
    print("| | way | " + " | ".join(names) + " |\n|---" + "|---" * (len(names) + 1) + "|")
    speeds = []
    for label, channels, pixels, widths, per_class in problems:
        batch = 64 if per_class == 1 else 128
        made = {way: problem(channels, pixels, widths, per_class, batch=batch, **WAYS[way]) for way in ways}
        contestants = {(way, part): run for way in ways for part, run in parts(*made[way]).items()}
        times = fastest(contestants, turns)
        for way in ways:
            print(f"| {label} | {way} | " + " | ".join(f"{times[way, name]:.1f}" for name in names) + " |", flush=True)
        for way in ways[1:]:
            plain, fast = times[ways[0], "step"], times[way, "step"]
            speeds.append((label, way, plain, fast, _difference(made[ways[0]], made[way])))
    print(
        f"\nSteps a second of one core\n\n| | way | {ways[0]} | this way | ratio | coresets after one step differ by |\n"
        + "|---" * 6
        + "|"
    )
    for label, way, plain, fast, apart in speeds:
        print(
            f"| {label} | {way} | {1e3 / plain:.1f} | {1e3 / fast:.1f} | {plain / fast:.2f} | {apart:.0e} |", flush=True
        )


WAYS: dict[str, dict] = {"plain": {}, "bf16": {"precision": "bf16"}, "compiled": {"compiled": True}}
WAYS["both"] = WAYS["bf16"] | WAYS["compiled"]


def _difference(one: tuple, other: tuple) -> float:
    moved = [distiller.step(state, data)[0].inputs for distiller, state, data in (one, other)]
    return float((moved[0] - moved[1]).abs().mean() / (moved[0] - one[1].inputs).abs().mean())


def pools(turns: int, problems: list) -> None:
    """The third table."""
    print("\nGradients for the pool, CPU ms: the network that was used, and all ten every step\n")
    print("| | the one used | all ten, one by one | all ten, by vmap |\n|---|---|---|---|")
    for label, channels, pixels, widths, per_class in problems:
        distiller, state, data = problem(channels, pixels, widths, per_class)
        times = fastest({"one": parts(distiller, state, data)["pool step"], **whole_pool(distiller, state)}, turns)
        print(f"| {label} | " + " | ".join(f"{value:.1f}" for value in times.values()) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer turns, sizes and problems")
    parser.add_argument("--only", choices=["closed-form", "step", "pool"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="of the second table")
    parser.add_argument("--problems", type=int, nargs="+", choices=range(len(PROBLEMS)), help="by number; default all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    turns, problems = (3, PROBLEMS[:3]) if options.quick else (8, PROBLEMS)
    problems = problems if options.problems is None else [PROBLEMS[number] for number in options.problems]
    if options.only in (None, "closed-form"):
        closed_form((256, 1024, 2048) if options.quick else (256, 512, 1024, 2048, 4096, 8192), turns)
    if options.only in (None, "step"):
        where_time_goes(turns, problems, options.ways)
    if options.only in (None, "pool"):
        pools(max(2, turns // 2), problems[:2])


if __name__ == "__main__":
    main()
