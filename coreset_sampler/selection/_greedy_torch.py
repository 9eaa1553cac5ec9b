"""Greedy facility location in plain torch operations, for tensors on an accelerator.

The same picks as `_greedy.py`: distances by elementwise operations in the same order, sums in float64 over
the same lanes and segments, and `argmax`, which returns the first of equals.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LANES, SEGMENT = 32, 1024  # as in _greedy.py, which this must not import: it would bring numba along
BLOCK = 1 << 23  # numbers that one step holds at a time
BATCH = 64  # candidates evaluated together


def ordered_sum(terms: Tensor) -> Tensor:
    """The float64 sum over the last dimension, in the order of `_greedy.gain`."""
    width = min(SEGMENT, -(-terms.shape[-1] // LANES) * LANES)
    terms = torch.nn.functional.pad(terms.double(), (0, -terms.shape[-1] % width))
    steps = terms.unflatten(-1, (-1, width // LANES, LANES))
    part = steps[..., 0, :]
    for step in range(1, steps.shape[-2]):
        part = part + steps[..., step, :]
    lanes = part[..., 0, :]
    for segment in range(1, part.shape[-2]):
        lanes = lanes + part[..., segment, :]
    while lanes.shape[-1] > 1:
        lanes = lanes[..., : lanes.shape[-1] // 2] + lanes[..., lanes.shape[-1] // 2 :]
    return lanes[..., 0]


def gain(rows: Tensor, least: Tensor) -> Tensor:
    """How much the covering cost falls by each of the candidates with these rows `(..., n)`."""
    return ordered_sum((least.double() - rows.double()).clamp_(min=0))


def distances_to(vectors: Tensor, some: Tensor, rms: bool) -> Tensor:
    """The distances `(k, n)` of vectors `(draws, n, d)` to those at `some` `(k,)`."""
    draws = torch.tensor(len(vectors), dtype=vectors.dtype, device=vectors.device)
    squares = vectors.new_zeros(len(some), vectors.shape[1])
    norms = torch.zeros_like(squares)
    for draw in vectors:
        if not rms:
            squares.zero_()
        for coordinate in draw.unbind(-1):
            difference = coordinate - coordinate[some, None]
            squares += difference.mul_(difference)
        if not rms:
            norms += _root(squares)
    return _root(squares / draws) if rms else norms / draws


def _root(values: Tensor) -> Tensor:
    """Rounded as IEEE asks, which torch's own float32 root is not on every device."""
    return values.double().sqrt().to(values.dtype)


def lazy(rows: Callable[[Tensor], Tensor], n: int, size: int, device: torch.device) -> tuple[Tensor, Tensor, float]:
    """Indices, weights `(size,)` and covering cost; `rows` gives the rows `(k, n)` at some indices `(k,)`.

    Raises ArithmeticError if an entry is negative or not finite.
    """
    blocks = torch.arange(n, device=device).split(max(1, BLOCK // n))
    first = torch.cat([_totals(rows(block)) for block in blocks]).argmin()
    least = rows(first[None])[0]
    bounds = torch.cat([gain(rows(block), least) for block in blocks])
    fresh = torch.ones(n, dtype=torch.bool, device=device)
    chosen, nearest = torch.zeros_like(fresh), torch.zeros(n, dtype=torch.int64, device=device)
    chosen[first], bounds[first] = True, -torch.inf
    picks = [first]
    for count in range(1, size):
        best = bounds.argmax()
        while not bool(fresh[best] | (bounds[best] == 0)):
            stale = bounds.masked_fill(fresh, -torch.inf).topk(min(BATCH, n)).indices
            batch = torch.cat([best[None], stale])
            bounds[batch] = gain(rows(batch), least).masked_fill(chosen[batch], -torch.inf)
            fresh[batch] = True
            best = bounds.argmax()
        row = rows(best[None])[0]
        nearest[row < least] = count
        least = torch.minimum(least, row)
        chosen[best], bounds[best] = True, -torch.inf
        fresh.fill_(False)
        picks.append(best)
    weights = nearest.bincount(minlength=size).double()
    return torch.stack(picks).cpu(), weights.cpu(), ordered_sum(least).item()


def naive_pools(distances: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Indices and weights `(P, size)` of pools `(P, R, R)`, every candidate evaluated at each pick."""
    n = distances.shape[-1]
    if n * n > BLOCK:
        found = [lazy(pool.__getitem__, n, size, distances.device)[:2] for pool in distances]
        return torch.stack([picks for picks, _ in found]), torch.stack([weights for _, weights in found])
    parts = [_naive(some, size) for some in distances.split(max(1, BLOCK // (n * n)))]
    return torch.cat([picks for picks, _ in parts]).cpu(), torch.cat([weights for _, weights in parts]).cpu()


def _naive(distances: Tensor, size: int) -> tuple[Tensor, Tensor]:
    every = torch.arange(len(distances), device=distances.device)
    best = _totals(distances).argmin(-1)
    least = distances[every, best]
    nearest, picks = torch.zeros(least.shape, dtype=torch.int64, device=distances.device), [best]
    for count in range(1, size):
        gains = gain(distances, least[:, None])
        gains.scatter_(1, torch.stack(picks, 1), -torch.inf)
        picks.append(gains.argmax(-1))
        row = distances[every, picks[-1]]
        nearest[row < least] = count
        least = torch.minimum(least, row)
    weights = torch.nn.functional.one_hot(nearest, size).sum(1).double()
    return torch.stack(picks, 1), weights


def _totals(rows: Tensor) -> Tensor:
    if not bool((rows >= 0).all()) or bool(torch.isinf(rows).any()):
        raise ArithmeticError("not distances")
    return ordered_sum(rows)
