"""Facility location: the few rows that all others have one near to.

`facility_location` and `facility_location_pools` take distances, `cover` and `cover_groups` the vectors. All
of them pick as evaluating every candidate at every step would, equal gains going to the lowest index. The
loops are numba's (`_greedy.py`) and run on the CPU; tensors on an accelerator are copied once, at the door.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .coreset import Coreset

if TYPE_CHECKING:
    from ._greedy import Rows


def facility_location(distances: Tensor | np.ndarray, size: int) -> Coreset:
    r"""Keeps the rows whose neighbourhoods cover all others best.

    Greedily minimises $\sum_i \min_{j \in S} d_{ij}$ over a symmetric `(n, n)` matrix: first the row with
    the least sum, then always the one that lowers the objective most; within $1 - 1/e$ of the best decrease
    (Nemhauser et al., 1978). Weights count the rows that each pick is nearest to, the earliest pick among
    equals. Lazy evaluation (Minoux, 1978) reads about four times the matrix in all and never copies it.

    Example:
        >>> points = torch.tensor([[0.0], [0.1], [0.2], [5.0]])
        >>> coreset = facility_location(torch.cdist(points, points), size=2)
        >>> coreset.indices.tolist(), coreset.weights.tolist()
        ([1, 3], [3.0, 1.0])

    Args:
        distances: float32 or float64, symmetric, finite and non-negative.
        size: how many rows to keep.
    """
    matrix = _checked_distances(distances, size, ndim=2)
    matrix = _rows_contiguous(matrix)
    picks, weights = _greedy_rows(_rows_of(matrix), size, matrix, "distances")
    return Coreset(picks, weights)


def facility_location_pools(distances: Tensor | np.ndarray, size: int) -> tuple[Tensor, Tensor]:
    """Keeps `size` rows of each pool: `(P, R, R)` distances give indices and weights, both `(P, size)`.

    The same as `facility_location` pool by pool, in one call. Indices count within a pool.

    Args:
        distances: float32 or float64, each pool symmetric, finite and non-negative.
        size: how many rows of each pool to keep.
    """
    stack = _checked_distances(distances, size, ndim=3)
    from . import _greedy

    stack = _rows_contiguous(stack)
    pools, n, _ = stack.shape
    flat = _flat(stack)
    nothing = np.empty((0, 0, 0), flat.dtype)
    picks, weights, costs = np.empty((pools, size), np.int64), np.empty((pools, size)), np.empty(pools)
    strides = (n, stack.stride(1), stack.stride(0))
    _split(
        lambda begin, end: _greedy.greedy_pools(flat, begin, end, *strides, nothing, picks, weights, costs),
        np.full(pools, n * n),
    )
    if np.isnan(costs).any():
        raise _not_distances("distances", stack[int(np.isnan(costs).argmax())])
    return torch.from_numpy(picks), torch.from_numpy(weights)


def cover(vectors: Tensor | np.ndarray, size: int) -> Coreset:
    r"""Keeps the vectors that all others have one near to, without ever holding the `(n, n)` distances.

    The same picks as `facility_location(pairwise_distances(vectors), size)`. `vectors` are `(n, d)`, or
    `(draws, n, d)`: then the distance is the mean over draws of the Euclidean norms, $E_s \|v_{si} -
    v_{sj}\|$. Time grows with n² d draws, memory with n (d draws + 512).

    Args:
        vectors: float tensor or array.
        size: how many to keep.
    """
    draws = _checked_vectors(vectors)
    n = draws.shape[1]
    _check_size(size, n)
    from . import _greedy

    points = np.ascontiguousarray(draws.transpose(1, 2).numpy())
    if n <= _greedy.SCRATCH_ROWS:
        matrix = torch.from_numpy(_filled(points[None])[0])
        rows = _rows_of(matrix)
    else:
        rows = _greedy.Rows(n, np.empty(0, points.dtype), 0, points)
    picks, weights = _greedy_rows(rows, size, draws, "vectors")
    return Coreset(picks, weights)


def cover_groups(vectors: Tensor | np.ndarray, starts: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keeps some of each of many groups of vectors: `cover` within each group, in one call.

    Group `g` is rows `starts[g]:starts[g + 1]` of `vectors` and keeps `sizes[g]` of them. Returns the indices
    (positions in `n`) and the weights, both `(sizes.sum(),)` and group after group in the order picked, and each
    group's covering cost `(groups,)`: the sum of distances to the nearest kept row.

    Args:
        vectors: `(n, d)` or `(draws, n, d)`.
        starts: `(groups + 1,)`, rising.
        sizes: `(groups,)`, each at most the rows of its group.
    """
    draws = _checked_vectors(vectors)
    bounds, keep = _checked_groups(starts, sizes, draws.shape[1])
    offsets = np.concatenate([[0], np.cumsum(keep)])
    picks, weights, costs = np.empty(offsets[-1], np.int64), np.empty(offsets[-1]), np.empty(len(keep))
    from . import _greedy

    array = draws.contiguous().numpy()
    _split(
        lambda begin, end: _greedy.greedy_groups(array, bounds, offsets, begin, end, picks, weights, costs),
        np.diff(bounds) ** 2 * array.shape[0] * array.shape[2],
    )
    if np.isnan(costs).any():
        g = int(np.isnan(costs).argmax())
        raise _not_distances("vectors", draws[:, bounds[g] : bounds[g + 1]])
    return torch.from_numpy(picks), torch.from_numpy(weights), torch.from_numpy(costs)


def pairwise_distances(vectors: Tensor | np.ndarray) -> Tensor:
    """The distances that `cover` uses, as a matrix: `(n, d)` or `(draws, n, d)` give `(n, n)`.

    A stack of pools `(P, draws, R, d)` gives `(P, R, R)`. Computed by differences, not by products: equal
    vectors are at exactly 0 and the matrix is exactly symmetric.

    Args:
        vectors: float tensor or array.
    """
    draws = _checked_vectors(vectors, pools=True)
    pools = draws if draws.ndim == 4 else draws[None]
    points = np.ascontiguousarray(pools.transpose(2, 3).numpy())
    matrices = torch.from_numpy(_filled(points))
    return matrices if draws.ndim == 4 else matrices[0]


def _filled(points: np.ndarray) -> np.ndarray:
    """Distances `(P, n, n)` between points `(P, draws, d, n)`."""
    from . import _greedy

    pools, draws, dims, n = points.shape
    out = np.empty((pools, n, n), points.dtype)
    work = np.full(pools * n, n * draws * dims)
    _split(lambda begin, end: _greedy.fill(points, begin, end, out), work)
    return out


def _greedy_rows(rows: Rows, size: int, values: Tensor, argument: str) -> tuple[Tensor, Tensor]:
    """One selection, its two whole sweeps over the rows split between threads."""
    from . import _greedy

    n = rows.n
    sums, sound = np.empty(n), []
    work = np.full(n, n if rows.stride else n * rows.points.shape[0] * rows.points.shape[1])
    _split(lambda begin, end: sound.append(_greedy.row_totals(rows, begin, end, sums)), work)
    if not all(sound):
        raise _not_distances(argument, values)
    first = _greedy.first_pick(rows, sums)
    least = np.array(_greedy.row_of(rows, first, _greedy.buffer_for(rows)))
    if size > 1:
        _split(lambda begin, end: _greedy.row_bounds(rows, begin, end, least, sums), work)
    picks, weights = np.empty(size, np.int64), np.empty(size)
    _greedy.lazy(rows, first, least, sums, picks, weights)
    return torch.from_numpy(picks), torch.from_numpy(weights)


def _split(run: Callable[[int, int], Any], work: np.ndarray) -> None:
    """Calls `run(begin, end)` on stretches of about equal work, one for each of torch's threads."""
    threads = min(torch.get_num_threads(), len(work))
    if threads <= 1 or work.sum() < 1 << 20:  # a millisecond or less: not worth starting a thread
        run(0, len(work))
        return
    done = np.cumsum(work)
    cuts = [0, *np.searchsorted(done, done[-1] * np.arange(1, threads) / threads).tolist(), len(work)]
    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(run, a, b) for a, b in pairwise(cuts) if a < b]:
            future.result()


def _rows_contiguous(matrix: Tensor) -> Tensor:
    """The same symmetric matrices with each row in one stretch of memory: a view where possible."""
    n = matrix.shape[-1]
    for view in (matrix, matrix.mT):
        if view.stride(-1) == 1 and view.stride(-2) >= n:
            return view
    return matrix.contiguous()


def _flat(stack: Tensor) -> np.ndarray:
    """All memory that a tensor spans, as one array that shares it."""
    length = 1 + sum((size - 1) * stride for size, stride in zip(stack.shape, stack.stride(), strict=True))
    return stack.as_strided((length,), (1,)).numpy()


def _rows_of(matrix: Tensor) -> Rows:
    from . import _greedy

    flat = _flat(matrix)
    return _greedy.Rows(len(matrix), flat, max(1, matrix.stride(0)), np.empty((0, 0, 0), flat.dtype))


def _tensor(values: Any, argument: str) -> Tensor:
    if isinstance(values, np.ndarray):
        if any(stride < 0 for stride in values.strides):
            values = np.ascontiguousarray(values)
        with warnings.catch_warnings():  # torch warns of read-only arrays; nothing here writes
            warnings.simplefilter("ignore", UserWarning)
            values = torch.from_numpy(values)
    if not isinstance(values, Tensor):
        raise TypeError(f"{argument} must be a tensor or a numpy array, got {type(values).__name__}")
    if not values.is_floating_point():
        raise TypeError(f"{argument} must be float32 or float64, got {values.dtype}; convert with .float()")
    return values.detach().cpu()


def _check_size(size: int, n: int) -> None:
    if isinstance(size, bool) or not isinstance(size, (int, np.integer)):
        raise TypeError(f"size must be an integer, got {size!r}; for a share of the rows pass round(share * n)")
    if not 1 <= size <= n:
        raise ValueError(f"size must be between 1 and the {n} rows there are, got {size}")


def _checked_distances(distances: Any, size: int, ndim: int) -> Tensor:
    matrix = _tensor(distances, "distances")
    if matrix.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"distances must be float32 or float64, got {matrix.dtype}; convert with .float()")
    shape = "(n, n)" if ndim == 2 else "(P, R, R)"
    if matrix.ndim != ndim or matrix.shape[-1] != matrix.shape[-2] or 0 in matrix.shape:
        raise ValueError(
            f"distances must be {shape} and not empty, got shape {tuple(matrix.shape)}; "
            "for vectors rather than distances use cover"
        )
    n = matrix.shape[-1]
    _check_size(size, n)
    some = torch.linspace(0, n - 1, min(n, 64 if ndim == 2 else 16)).round().long()
    sample = matrix[..., some[:, None], some]
    if bool(((sample - sample.mT).abs() > 0.01 * sample.abs().amax()).any()):
        raise ValueError(
            "distances must be symmetric, got a matrix that differs from its transpose; "
            "use (distances + distances.mT) / 2"
        )
    return matrix


def _checked_vectors(vectors: Any, pools: bool = False) -> Tensor:
    """As `(draws, n, d)`, or `(P, draws, R, d)` where pools are welcome."""
    values = _tensor(vectors, "vectors")
    shapes = "(n, d), (draws, n, d)" + (" or (P, draws, R, d)" if pools else "")
    if not 2 <= values.ndim <= (4 if pools else 3) or 0 in values.shape:
        raise ValueError(f"vectors must be {shapes} and not empty, got shape {tuple(values.shape)}")
    if not bool(torch.isfinite(values).all()):
        bad = values[~torch.isfinite(values)]
        raise ValueError(f"vectors must be finite, got {len(bad)} entries that are not, the first {bad[0].item()}")
    if values.dtype not in (torch.float32, torch.float64):
        values = values.float()
    return values[None] if values.ndim == 2 else values


def _checked_groups(starts: Any, sizes: Any, n: int) -> tuple[np.ndarray, np.ndarray]:
    bounds = torch.as_tensor(starts).to("cpu", torch.int64).numpy()
    keep = torch.as_tensor(sizes).to("cpu", torch.int64).numpy()
    if bounds.ndim != 1 or keep.ndim != 1 or len(bounds) != len(keep) + 1 or len(keep) == 0:
        raise ValueError(f"starts must hold one entry more than sizes, got shapes {bounds.shape} and {keep.shape}")
    rows = np.diff(bounds)
    if bounds[0] < 0 or bounds[-1] > n or (rows < 0).any():
        raise ValueError(f"starts must rise from 0 to at most the {n} rows there are, got {bounds.tolist()}")
    if ((keep < 1) | (keep > rows)).any():
        g = int(((keep < 1) | (keep > rows)).argmax())
        raise ValueError(f"sizes must be between 1 and the rows of a group, got {keep[g]} of {rows[g]} in group {g}")
    return bounds, keep


def _not_distances(argument: str, values: Tensor) -> ValueError:
    """What to tell about values whose sum turned out negative in part or not finite."""
    if argument == "vectors":
        largest = values.abs().amax().item()
        return ValueError(
            f"vectors must be small enough for their squares to fit {values.dtype}, got entries up to "
            f"{largest:.3g}; scale them down or pass float64"
        )
    for some in values.flatten(0, -2).split(256):
        bad = some[~(torch.isfinite(some) & (some >= 0))]
        if len(bad):
            return ValueError(
                f"distances must be finite and non-negative, got {bad[0].item():.6g}; "
                "clamp rounding errors with .clamp(min=0), turn similarities s into distances s.max() - s"
            )
    return ValueError("distances must have finite sums, got entries too large to add up in float64; scale them down")
