"""Facility location against brute force, and every path against every other."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coreset_sampler.selection import _greedy
from coreset_sampler.selection.facility_location import (
    cover,
    cover_groups,
    facility_location,
    facility_location_pools,
    pairwise_distances,
)


def brute_force(distances: Tensor, size: int) -> tuple[list[int], list[int]]:
    """Naive greedy in float64: picks, and how many rows are nearest to each, the earliest among equals."""
    matrix = distances.double().numpy()
    picks = [int(matrix.sum(0).argmin())]
    while len(picks) < size:
        least = matrix[:, picks].min(1)
        gains = np.maximum(least[:, None] - matrix, 0).sum(0)
        gains[picks] = -1
        picks.append(int(gains.argmax()))
    return picks, np.bincount(matrix[:, picks].argmin(1), minlength=size).tolist()


def symmetric(values: Tensor) -> Tensor:
    upper = torch.triu(values, 1)
    return upper + upper.mT


def instances() -> list[tuple[str, Tensor]]:
    """Small matrices, the awkward ones first."""
    generator = torch.Generator().manual_seed(0)
    grid = torch.cartesian_prod(torch.arange(5.0), torch.arange(4.0))
    points = torch.rand(40, 3, generator=generator)
    cases = [
        ("one row", torch.zeros(1, 1)),
        ("all equal", symmetric(torch.ones(17, 17))),
        ("all zero", torch.zeros(9, 9)),
        ("constant with its diagonal", torch.ones(6, 6)),
        ("grid, city blocks", (grid[:, None] - grid).abs().sum(-1)),
        ("grid, roots", pairwise_distances(grid)),
        ("duplicates", pairwise_distances(torch.cat([points, points[:15], points[5:25]]))),
        ("one place, three times each", pairwise_distances(torch.arange(8.0).repeat(3)[:, None])),
        ("far and near", pairwise_distances(torch.tensor([[0.0], [1e-6], [1e6], [1e6 + 1], [3.0]]))),
    ]
    for k in range(12):
        n = int(torch.randint(2, 70, (), generator=generator))
        cases.append((f"few values {k}", symmetric(torch.randint(0, 4, (n, n), generator=generator).float())))
        cases.append((f"random {k}", symmetric(torch.rand(n, n, generator=generator))))
        cases.append((f"points {k}", pairwise_distances(torch.rand(n, 2, generator=generator).double())))
    cases.append(("two segments", pairwise_distances(torch.rand(1100, 2, generator=generator))))
    return cases


def sizes_for(n: int) -> list[int]:
    return sorted({1, 2, n // 3, n - 1, n} & set(range(1, n + 1))) if n < 100 else [1, 9]


@pytest.mark.parametrize(("name", "distances"), instances(), ids=[name for name, _ in instances()])
def test_picks_and_weights_match_brute_force_on_every_small_instance(name: str, distances: Tensor) -> None:
    for size in sizes_for(len(distances)):
        coreset = facility_location(distances, size)
        picks, weights = brute_force(distances, size)
        assert coreset.indices.tolist() == picks
        assert coreset.weights.tolist() == weights
        assert coreset.weights.sum() == len(distances)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_picks_match_brute_force_on_whatever_hypothesis_finds(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 12))
    size = data.draw(st.integers(1, n))
    entries = data.draw(st.lists(st.integers(0, 6), min_size=n * n, max_size=n * n))
    distances = symmetric(torch.tensor(entries, dtype=torch.float32).view(n, n))
    coreset = facility_location(distances, size)
    assert (coreset.indices.tolist(), coreset.weights.tolist()) == brute_force(distances, size)


def test_lists_of_near_entries_do_not_change_a_pick() -> None:
    vectors = torch.randn(1100, 3, generator=torch.Generator().manual_seed(1))
    distances = pairwise_distances(vectors)
    points = np.ascontiguousarray(vectors.mT.numpy())[None]
    rows = _greedy.Rows(1100, np.empty(0, np.float32), 0, points)
    sums, picks, weights = np.empty(1100), np.empty(100, np.int64), np.empty(100)
    _greedy.row_totals(rows, 0, 1100, sums)
    first = _greedy.first_pick(rows, sums)
    least = distances[first].numpy().copy()
    _greedy.row_bounds(rows, 0, 1100, least, sums)
    _, read, computed = _greedy.lazy(rows, first, least, sums, picks, weights)
    assert computed > 1.1 * read, "some gains should have come from lists"
    assert picks.tolist() == brute_force(distances, 100)[0]


def test_a_gain_from_a_list_equals_the_gain_from_the_row_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    row, least = rng.random(5000), rng.random(5000) * 0.1
    lanes, part, flags = np.empty(32), np.empty(32), np.empty(1024, np.uint8)
    where, what = np.empty(5000, np.int32), np.empty(5000)
    found = _greedy.near(row, 0, least, flags, where, what)
    assert where[:found].tolist() == np.flatnonzero(row < least).tolist()
    for shrink in (1.0, 0.5, 0.1):
        expected = _greedy.gain(row, least * shrink, lanes, part)
        again, found = _greedy.near_gain(where, what, found, least * shrink, lanes, part)
        assert again == expected
    assert _greedy.near(row, 0, least, flags, where[:10], what[:10]) == -1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [1, 31, 1024, 5000])
def test_a_rough_gain_is_above_the_exact_one_and_within_the_error_that_a_pick_relies_on(n: int, dtype: type) -> None:
    rng = np.random.default_rng(n)
    lanes, part = np.empty(32), np.empty(32)
    for scale in (1e-30, 1e-3, 1.0, 1e6):
        row = np.concatenate([np.zeros(7), rng.random(n) ** 4 * scale]).astype(dtype)
        least = (rng.random(n) * scale).astype(dtype)
        exact, rough = _greedy.gain(row[7:], least, lanes, part), _greedy.rough_gain(row, 7, least)
        assert exact <= rough
        assert rough * (1 - 2 * _greedy.ROUGH) <= exact
    assert _greedy.rough_gain(row, 7, np.zeros(n, dtype)) == 0


def test_gains_that_differ_by_less_than_a_rough_one_can_tell_are_compared_exactly() -> None:
    apart = 3e-6  # each candidate covers its own neighbour a little better than the one before: the last is the best
    n, far = 40, 100.0
    distances = symmetric(torch.full((2 * n + 1, 2 * n + 1), far, dtype=torch.float64))
    for k in range(n):
        distances[k, n + k] = distances[n + k, k] = 50 - k * apart
    distances[2 * n, :] = distances[:, 2 * n] = 90.0
    distances[2 * n, 2 * n] = 0
    picks = facility_location(distances, 6).indices.tolist()
    assert picks == brute_force(distances, 6)[0]
    assert picks[1:] == [n - 1, n - 2, n - 3, n - 4, n - 5]


def test_greedy_is_within_one_minus_one_over_e_of_the_best_decrease() -> None:
    rng = np.random.default_rng(2)
    for _ in range(20):
        matrix = pairwise_distances(rng.random((9, 2))).numpy()
        for size in (2, 3, 4):
            every = np.array(list(itertools.combinations(range(9), size)))
            best = 9 * matrix.max() - matrix[:, every].min(-1).sum(0).min()
            picks = facility_location(matrix, size).indices.numpy()
            found = 9 * matrix.max() - matrix[:, picks].min(-1).sum()
            assert found >= (1 - 1 / np.e) * best


def test_pools_equal_a_loop_over_single_pools() -> None:
    generator = torch.Generator().manual_seed(3)
    vectors = torch.randint(0, 3, (7, 2, 50, 3), generator=generator).float()
    distances = pairwise_distances(vectors)
    indices, weights = facility_location_pools(distances, 12)
    assert indices.shape == weights.shape == (7, 12)
    for pool in range(7):
        single = facility_location(distances[pool], 12)
        assert torch.equal(indices[pool], single.indices)
        assert torch.equal(weights[pool], single.weights)
        assert torch.equal(distances[pool], pairwise_distances(vectors[pool]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [40, 300, 2100])
def test_cover_picks_what_the_matrix_picks(n: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(n)
    vectors = torch.randn(3, n, 6, generator=generator, dtype=dtype)
    vectors[:, n // 2 : n // 2 + 15] = vectors[:, :15]
    vectors[:, -10:] = vectors[:, -10:].round()
    size = n // 10
    expected = facility_location(pairwise_distances(vectors), size)
    found = cover(vectors, size)
    assert torch.equal(found.indices, expected.indices)
    assert torch.equal(found.weights, expected.weights)


def test_cover_keeps_every_distinct_vector_before_a_duplicate() -> None:
    vectors = torch.arange(30.0).repeat(4)[:, None]
    coreset = cover(vectors, 40)
    assert sorted(coreset.indices[:30].tolist()) == list(range(30))
    assert coreset.indices[30:].tolist() == list(range(30, 40))
    assert coreset.weights.tolist() == [4] * 30 + [0] * 10


def test_groups_equal_a_loop_over_single_groups() -> None:
    generator = torch.Generator().manual_seed(4)
    rows = [1, 10, 37, 200, 64, 2, 2060]
    keep = torch.tensor([1, 3, 37, 20, 1, 2, 30])
    starts = torch.tensor([0, *itertools.accumulate(rows)])
    vectors = torch.randn(2, sum(rows), 5, generator=generator)
    indices, weights, cost = cover_groups(vectors, starts, keep)
    assert len(indices) == len(weights) == keep.sum()
    for group, (picks, counts) in enumerate(
        zip(indices.split(keep.tolist()), weights.split(keep.tolist()), strict=True)
    ):
        part = vectors[:, starts[group] : starts[group + 1]]
        single = cover(part, int(keep[group]))
        assert torch.equal(picks - starts[group], single.indices)
        assert torch.equal(counts, single.weights)
        near = pairwise_distances(part)[:, single.indices].double().min(1).values.sum()
        assert cost[group].item() == pytest.approx(near.item(), rel=1e-12)


def test_one_draw_is_the_plain_distance() -> None:
    vectors = torch.randn(60, 7, generator=torch.Generator().manual_seed(5))
    assert torch.equal(pairwise_distances(vectors[None]), pairwise_distances(vectors))
    assert torch.equal(cover(vectors[None], 9).indices, cover(vectors, 9).indices)


def test_distances_are_the_mean_norm() -> None:
    vectors = torch.randn(4, 50, 11, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    norms = (vectors[:, :, None] - vectors[:, None]).norm(dim=-1)
    torch.testing.assert_close(pairwise_distances(vectors), norms.mean(0))


def test_duplicates_are_at_exactly_zero_and_the_matrix_is_exactly_symmetric() -> None:
    vectors = 1e4 + torch.randn(2, 80, 9, generator=torch.Generator().manual_seed(7))
    vectors[:, 40:] = vectors[:, :40]
    distances = pairwise_distances(vectors)
    assert (distances.diagonal(40) == 0).all()
    assert torch.equal(distances, distances.mT)


def test_the_answer_does_not_depend_on_the_number_of_threads() -> None:
    vectors = torch.randn(2, 2500, 4, generator=torch.Generator().manual_seed(9)).round(decimals=1)
    distances = pairwise_distances(vectors)
    stack = torch.stack([distances[k : k + 400, k : k + 400] for k in range(0, 2000, 400)])
    starts, keep = torch.arange(0, 2501, 100), torch.full((25,), 10)
    before, answers = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            one, two = facility_location(distances, 100), cover(vectors, 100)
            groups = cover_groups(vectors, starts, keep)
            pools = facility_location_pools(stack, 20)
            answers.append([one.indices, one.weights, two.indices, two.weights, *groups, *pools])
    finally:
        torch.set_num_threads(before)
    for answer in answers[1:]:
        assert all(torch.equal(a, b) for a, b in zip(answer, answers[0], strict=True))


def test_callers_on_several_threads_do_not_disturb_each_other() -> None:
    distances = pairwise_distances(torch.randn(1200, 3, generator=torch.Generator().manual_seed(10)))
    expected, found = facility_location(distances, 50), []
    callers = [threading.Thread(target=lambda: found.append(facility_location(distances, 50))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(found) == 4
    assert all(torch.equal(each.indices, expected.indices) for each in found)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_it_still_works_in_a_forked_process() -> None:
    vectors = torch.randn(2500, 4, generator=torch.Generator().manual_seed(15))
    here = cover(vectors, 20).indices
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(cover(vectors, 20).indices, here) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_views_of_a_matrix_give_the_same_answer() -> None:
    vectors = torch.randn(90, 3, generator=torch.Generator().manual_seed(11))
    distances = pairwise_distances(vectors)
    expected = facility_location(distances, 8).indices
    room = torch.full((100, 120), -1.0)
    room[5:95, 7:97] = distances
    spread = torch.full((180, 180), -1.0)
    spread[::2, ::2] = distances
    read_only = distances.numpy().copy()
    read_only.flags.writeable = False
    for view in (
        distances.mT,
        room[5:95, 7:97],
        room.mT[7:97, 5:95],
        spread[::2, ::2],
        distances.numpy(),
        np.asfortranarray(distances.numpy()),
        read_only,
        read_only[::-1, ::-1][::-1, ::-1],
        distances.clone().requires_grad_(),
    ):
        assert torch.equal(facility_location(view, 8).indices, expected)


def test_no_path_writes_to_its_input() -> None:
    distances = pairwise_distances(torch.randn(2, 60, 3, generator=torch.Generator().manual_seed(12)))
    before = distances.clone()
    facility_location(distances, 10)
    facility_location_pools(distances[None], 10)
    assert torch.equal(distances, before)


@pytest.mark.integration
def test_the_matrix_is_not_copied_and_numba_waits_for_the_first_call() -> None:
    code = (
        "import resource, sys, torch\n"
        "from coreset_sampler.selection.facility_location import facility_location\n"
        "assert 'numba' not in sys.modules\n"
        "distances = torch.zeros(8000, 8000).fill_(1).fill_diagonal_(0)\n"
        "facility_location(distances[:900, :900], 3)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for view in (distances, distances.mT, distances[:-1, :-1], distances.numpy()):\n"
        "    facility_location(view, 20)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 25_000, "a copy would take 250,000 KiB"


SQUARE = symmetric(torch.rand(6, 6, generator=torch.Generator().manual_seed(13)))


def broken(value: float) -> Tensor:
    distances = SQUARE.clone()
    distances[1, 4] = distances[4, 1] = value
    return distances


@pytest.mark.parametrize(
    ("distances", "size", "error", "says"),
    [
        (broken(float("nan")), 2, ValueError, "finite and non-negative, got nan"),
        (broken(float("inf")), 2, ValueError, "finite and non-negative, got inf"),
        (broken(-1e-20), 2, ValueError, "finite and non-negative, got -1"),
        (SQUARE[:4], 2, ValueError, r"\(n, n\).*got shape \(4, 6\)"),
        (SQUARE[0], 2, ValueError, r"got shape \(6,\)"),
        (SQUARE[:0, :0], 1, ValueError, r"not empty, got shape \(0, 0\)"),
        (SQUARE, 0, ValueError, "size must be between 1 and the 6 rows there are, got 0"),
        (SQUARE, 7, ValueError, "got 7"),
        (SQUARE, 0.5, TypeError, "size must be an integer, got 0.5"),
        (SQUARE, True, TypeError, "size must be an integer, got True"),
        (SQUARE.tolist(), 2, TypeError, "tensor or a numpy array, got list"),
        (SQUARE.round().long(), 2, TypeError, "got torch.int64; convert with .float()"),
        (SQUARE.half(), 2, TypeError, "got torch.float16; convert with .float()"),
        (SQUARE.bfloat16(), 2, TypeError, "got torch.bfloat16"),
        (torch.arange(36.0).view(6, 6), 2, ValueError, "must be symmetric"),
    ],
)
def test_bad_distances_get_a_clear_error(distances: object, size: int, error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        facility_location(distances, size)  # type: ignore[arg-type]
    if isinstance(distances, Tensor) and distances.ndim == 2:
        with pytest.raises(error, match=says.replace(r"\(n, n\)", r"\(P, R, R\)").split("got shape")[0]):
            facility_location_pools(distances[None].expand(3, *distances.shape), size)


def test_a_bad_entry_far_down_a_large_matrix_is_found() -> None:
    distances = torch.ones(2200, 2200)
    distances[2150, 2199] = -1e-30
    with pytest.raises(ValueError, match="got -1"):
        facility_location(distances, 3)


@pytest.mark.parametrize(
    ("vectors", "size", "error", "says"),
    [
        (torch.tensor([[0.0], [float("nan")]]), 1, ValueError, "vectors must be finite, got 1 entries.*nan"),
        (torch.tensor([[0.0], [float("inf")]]), 1, ValueError, "first inf"),
        (torch.tensor([[0.0], [1e30]]), 1, ValueError, r"got entries up to 1e\+30; scale them down"),
        (torch.zeros(3), 1, ValueError, r"\(n, d\), \(draws, n, d\).*got shape \(3,\)"),
        (torch.zeros(0, 3), 1, ValueError, "not empty"),
        (torch.zeros(3, 2), 4, ValueError, "size must be between 1 and the 3 rows"),
        (torch.zeros(3, 2, dtype=torch.int32), 1, TypeError, "got torch.int32"),
        ([[0.0]], 1, TypeError, "got list"),
    ],
)
def test_bad_vectors_get_a_clear_error(vectors: object, size: int, error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        cover(vectors, size)  # type: ignore[arg-type]
    if size == 1:
        with pytest.raises(error, match=says):
            cover_groups(vectors, torch.tensor([0, 2]), torch.tensor([1]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("starts", "keep", "says"),
    [
        ([0, 5], [1, 1], "one entry more"),
        ([0, 11], [1], "at most the 10 rows"),
        ([0, 6, 4], [1, 1], "must rise"),
        ([0, 5, 10], [1, 6], "got 6 of 5 in group 1"),
        ([0, 5, 5], [1, 1], "got 1 of 0 in group 1"),
        ([0, 5, 10], [1, 0], "got 0 of 5 in group 1"),
    ],
)
def test_bad_groups_get_a_clear_error(starts: list[int], keep: list[int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        cover_groups(torch.rand(10, 2), torch.tensor(starts), torch.tensor(keep))


def test_half_precision_vectors_are_covered_in_float32() -> None:
    vectors = torch.randn(50, 4, generator=torch.Generator().manual_seed(14)).half().requires_grad_()
    assert torch.equal(cover(vectors, 6).indices, cover(vectors.detach().float(), 6).indices)
