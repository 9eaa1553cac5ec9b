"""Facility location against submodlib-py and apricot-select, and against the memory bandwidth of the machine.

    pip install "coreset-sampler[benchmarks]"
    python benchmarks/facility_location.py            # a few minutes; --quick leaves out the largest cases

All contestants get the same float32 matrix in one run. The vectors are real: scikit-learn's digits, repeated
with a little noise up to the number wanted, or the images of a data set on disk (`--data`). Peers are timed
on the selection alone, their set-up is left out; apricot compiles for every selection, which counts. Times
on one thread are CPU seconds, which other work on the machine disturbs less; those on two are wall time.
Prints markdown tables.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from coreset_sampler.selection import _greedy
from coreset_sampler.selection.facility_location import (
    _rows_of,
    cover,
    facility_location,
    facility_location_pools,
    pairwise_distances,
)

DIMENSIONS = 40


def images(data: str | None) -> np.ndarray:
    """Pixels in [0, 1], one image a row."""
    if data is None:
        from sklearn.datasets import load_digits

        return load_digits().data / 16
    import datasets

    split = datasets.load_dataset(data)["train"].with_format("numpy")
    return np.stack(split[:50_000]["image"]).reshape(-1, 28 * 28) / 255


def vectors(n: int, data: str | None) -> torch.Tensor:
    """`(n, 40)` float32: the leading principal components of the images."""
    rng = np.random.default_rng(0)
    pixels = images(data)
    pixels = pixels - pixels.mean(0)
    _, axes = np.linalg.eigh(pixels.T @ pixels)
    leading = pixels @ axes[:, : -DIMENSIONS - 1 : -1]
    rows = np.resize(rng.permutation(len(leading)), n)
    jitter = 0.25 * leading.std(0) * rng.normal(size=(n, DIMENSIONS)) if n > len(leading) else 0
    return torch.from_numpy((leading[rows] + jitter).astype(np.float32))


def timed(run: Callable[[], object], repeats: int, clock: Callable[[], float] = time.thread_time) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = clock()
        run()
        best = min(best, clock() - start)
    return best


def on_threads(threads: int, run: Callable[[], object], repeats: int) -> float:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return timed(run, repeats, time.thread_time if threads == 1 else time.perf_counter)
    finally:
        torch.set_num_threads(before)


def bandwidth(repeats: int) -> float:
    """Bytes per second that one thread reads from memory: the largest entry of 400 MB."""
    block = np.ones(100_000_000, np.float32)
    return block.nbytes / timed(block.max, repeats)


def status(field: str) -> float:
    """A field of this process in MB. Unlike getrusage, its peak does not include the parent's before exec."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if field in line)
    return int(line.split()[1]) / 1024


def peak_growth(run: Callable[[], object]) -> float:
    """MB by which the resident memory rises at most while `run` runs; NaN where the kernel does not tell."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        run()
        return status("VmHWM") - before
    except OSError:
        return float("nan")


def objective(distances: torch.Tensor, picks: object) -> float:
    return float(distances[torch.as_tensor(picks)].amin(0).double().sum())


def rows_touched(distances: torch.Tensor, size: int) -> tuple[int, int]:
    """Rows that plain lazy greedy reads, and rows that ours reads, which keeps lists of what still counts."""
    rows, n = _rows_of(distances), len(distances)
    sums, picks, weights = np.empty(n), np.empty(size, np.int64), np.empty(size)
    _greedy.row_totals(rows, 0, n, sums)
    first = _greedy.first_pick(rows, sums)
    least = distances[first].numpy().copy()
    _greedy.row_bounds(rows, 0, n, least, sums)
    _, read, computed = _greedy.lazy(rows, first, least, sums, picks, weights)
    return 2 * n + computed + size, 2 * n + read


@contextmanager
def silence() -> Iterator[None]:
    """Sends what C++ code prints to nowhere."""
    sys.stdout.flush()
    kept, nowhere = [os.dup(1), os.dup(2)], os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        yield
    finally:
        for stream, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, stream)
            os.close(copy)
        os.close(nowhere)


def submodlib(similarity: np.ndarray, size: int) -> tuple[float, list[int]]:
    from submodlib import FacilityLocationFunction

    function = FacilityLocationFunction(
        n=len(similarity), mode="dense", sijs=similarity, separate_rep=False, pybind_mode="array"
    )
    options = {"stopIfZeroGain": False, "stopIfNegativeGain": False, "show_progress": False}
    with silence():
        start = time.thread_time()
        picked = function.maximize(budget=size, optimizer="LazyGreedy", **options)
        seconds = time.thread_time() - start
    return seconds, [index for index, _ in picked]


def apricot(similarity: np.ndarray, size: int) -> tuple[float, list[int]]:
    from apricot import FacilityLocationSelection

    selection = FacilityLocationSelection(size, metric="precomputed", optimizer="lazy")
    start = time.thread_time()
    selection.fit(similarity)
    return time.thread_time() - start, selection.ranking.tolist()


def compare(n: int, size: int, speed: float, args: argparse.Namespace) -> str:
    distances = pairwise_distances(vectors(n, args.data))
    growth = peak_growth(lambda: facility_location(distances, size))
    ours = facility_location(distances, size).indices
    one = on_threads(1, lambda: facility_location(distances, size), args.repeats)
    two = on_threads(2, lambda: facility_location(distances, size), args.repeats)
    plain, read = (rows * n * 4 / speed for rows in rows_touched(distances, size))
    similarity = (distances.max() - distances).numpy()
    peers = [peer(similarity, size) for peer in (submodlib, apricot)]
    if n <= 1000:  # small enough to repeat
        peers = [min(peer(similarity, size) for _ in range(3)) for peer in (submodlib, apricot)]
    best = objective(distances, ours)
    apart = max(abs(objective(distances, picks) / best - 1) for _, picks in peers)
    megabytes = f"{growth:.0f} of {distances.nbytes / 2**20:.0f}"
    return (
        f"| {n:,} -> {size:,} | {one:.4f} | {two:.4f} | {peers[0][0]:.3f} | {peers[1][0]:.3f} "
        f"| {peers[0][0] / one:.0f} / {peers[0][0] / two:.0f} | {apart:.0e} | {megabytes} "
        f"| {plain:.4f} | {one / plain:.2f} | {read:.4f} | {one / read:.2f} |"
    )


def compare_pools(pools: int, n: int, size: int, speed: float, args: argparse.Namespace) -> str:
    rows = vectors(10_000, args.data)
    generator = torch.Generator().manual_seed(0)
    some = torch.stack([torch.randperm(len(rows), generator=generator)[:n] for _ in range(pools)])
    distances = pairwise_distances(rows[some][:, None])
    growth = peak_growth(lambda: facility_location_pools(distances, size))
    indices, _ = facility_location_pools(distances, size)
    one = on_threads(1, lambda: facility_location_pools(distances, size), args.repeats)
    two = on_threads(2, lambda: facility_location_pools(distances, size), args.repeats)
    touched = np.sum([rows_touched(pool, size) for pool in distances], 0)
    plain, read = touched * n * 4 / speed
    similarity = [(pool.max() - pool).numpy() for pool in distances]
    found = [submodlib(pool, size) for pool in similarity]
    theirs = min(sum(took for took, _ in found), sum(submodlib(pool, size)[0] for pool in similarity))
    apart = max(
        abs(objective(pool, peer) / objective(pool, picks) - 1)
        for pool, picks, (_, peer) in zip(distances, indices, found, strict=True)
    )
    megabytes = f"{growth:.0f} of {distances.nbytes / 2**20:.0f}"
    return (
        f"| {pools} pools of {n} -> {size} | {one:.4f} | {two:.4f} | {theirs:.3f} | - "
        f"| {theirs / one:.0f} / {theirs / two:.0f} | {apart:.0e} | {megabytes} "
        f"| {plain:.4f} | {one / plain:.2f} | {read:.4f} | {one / read:.2f} |"
    )


def cover_alone(n: int, data: str | None) -> None:
    """The whole of a fresh process: memory is that of the process, interpreter and torch included."""
    points = vectors(n, data)
    cover(points[:3000], 10)
    before, start = status("VmHWM"), time.perf_counter()
    cover(points, n // 10)
    seconds, peak = time.perf_counter() - start, status("VmHWM")
    print(json.dumps({"seconds": seconds, "peak": peak, "growth": peak - before}))


def cover_row(n: int, data: str | None) -> str:
    command = [sys.executable, __file__, "--cover", str(n), *(["--data", data] if data else [])]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(run.stdout.splitlines()[-1])
    seconds, matrix = found["seconds"], n * n * 4 / 2**20
    return (
        f"| {n:,} x {DIMENSIONS} -> {n // 10:,} | {seconds:.2f} | {found['peak']:.0f} "
        f"| {found['growth']:.0f} | {matrix:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="leave out 10,000 -> 1,000 and cover above 10,000")
    parser.add_argument("--repeats", type=int, default=5, help="times are the least of so many (default 5)")
    parser.add_argument("--data", help="folder or name of an image data set that datasets.load_dataset reads")
    parser.add_argument("--cover", type=int, metavar="N", help="only run cover on N vectors and print JSON")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if args.cover:
        cover_alone(args.cover, args.data)
        return
    apricot(np.eye(64, dtype=np.float32), 4)  # compiles
    facility_location_pools(pairwise_distances(torch.rand(1, 2, 30, 3)), 2)
    facility_location(pairwise_distances(torch.rand(30, 3)), 2)
    speed = bandwidth(args.repeats)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, one thread reads {speed / 1e9:.1f} GB/s\n")
    print(
        "| | ours, 1 thread | 2 threads | submodlib lazy | apricot lazy | submodlib / ours (1, 2 threads) ",
        end="",
    )
    print("| objectives differ by | peak growth, MB of matrix | bound: lazy greedy | x | bound: rows read | x |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for n, size in [(1000, 100), (5000, 500), (10_000, 1000)][: 2 if args.quick else 3]:
        print(compare(n, size, speed, args), flush=True)
    print(compare_pools(64, 512, 64, speed, args), flush=True)
    print("\n| cover | seconds | peak MB of the process | growth MB | MB the matrix would take |")
    print("|---|---|---|---|---|")
    for n in [5000, 10_000, 20_000, 50_000][: 2 if args.quick else 4]:
        print(cover_row(n, args.data), flush=True)


if __name__ == "__main__":
    main()
