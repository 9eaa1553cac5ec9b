"""Greedy facility location in numba: the loops behind `facility_location.py`.

Every path sums in float64 and in one order, so that all of them see the same numbers: element `i` goes to
lane `i % LANES` of segment `i // SEGMENT`; lanes add up step by step within a segment, segments one after the
other, and the lanes by halving. A sum in a fixed order never grows when one of its terms shrinks, rounding
included. So a gain computed earlier bounds today's exactly, and lazy evaluation picks what evaluating every
candidate would, ties and all. Most candidates need no exact gain: a rough one in the matrix's own precision is
right to a part in `1 / ROUGH`, in whatever order it is summed, which sends them down the heap or makes them the pick.

The kernels release the GIL and start no threads of their own: callers split rows or groups over plain Python
threads, which survives `fork` and concurrent callers, as numba's thread pools do not. They share one file because
numba's cache notices a change of the file that a kernel is in, and not of one that it calls into.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

LANES = 32
SEGMENT = 1024
SCRATCH_ROWS = 2048  # a group up to this size holds its own matrix: 16 MiB in float32

ROUGH = 2.0**-13  # relative error of a rough gain: a segment of float32 terms, at 2**-24 each, and as much to spare

NEAR = 256  # a candidate with at most this many entries left that count keeps them in a list


class Rows(NamedTuple):
    """Where row `j` of an `(n, n)` distance matrix comes from.

    Either it lies in memory at `flat[j * stride : j * stride + n]`, or `stride` is 0 and it is computed from
    `points` `(draws, d, n)`: the mean over draws of Euclidean norms.
    """

    n: int
    flat: np.ndarray
    stride: int
    points: np.ndarray


@njit(nogil=True, cache=True)
def distances_to(points, j, out):
    """Fills `out` `(n,)` with the distances to point `j`, by differences: duplicates are at exactly 0."""
    draws, dims, n = points.shape
    squares = np.empty(SEGMENT, points.dtype)
    for start in range(0, n, SEGMENT):  # a segment stays in the first-level cache
        part = out[start : start + SEGMENT]
        width = part.shape[0]
        part[:] = 0
        for s in range(draws):
            squares[:width] = 0
            k = 0
            while k + 4 <= dims:  # four at a time spares loads and stores; the order of the sum stays the same
                a, b = points[s, k, start : start + width], points[s, k + 1, start : start + width]
                c, d = points[s, k + 2, start : start + width], points[s, k + 3, start : start + width]
                at, bt, ct, dt = (
                    points[s, k, j],
                    points[s, k + 1, j],
                    points[s, k + 2, j],
                    points[s, k + 3, j],
                )
                for i in range(width):
                    p, q, r, t = a[i] - at, b[i] - bt, c[i] - ct, d[i] - dt
                    squares[i] = (((squares[i] + p * p) + q * q) + r * r) + t * t
                k += 4
            while k < dims:
                a, at = points[s, k, start : start + width], points[s, k, j]
                for i in range(width):
                    p = a[i] - at
                    squares[i] += p * p
                k += 1
            for i in range(width):
                part[i] += np.sqrt(squares[i])
        for i in range(width):
            part[i] = part[i] / part.dtype.type(draws)


@njit(nogil=True, cache=True)
def row_of(rows, j, buffer):
    """Row `j`: a view where the matrix is in memory, else computed into `buffer`."""
    if rows.stride > 0:
        return rows.flat[j * rows.stride : j * rows.stride + rows.n]
    distances_to(rows.points, j, buffer)
    return buffer


@njit(nogil=True, cache=True)
def buffer_for(rows):
    """Room for one computed row; none where the matrix is in memory."""
    return np.empty(0 if rows.stride > 0 else rows.n, rows.flat.dtype)


@njit(nogil=True, cache=True)
def halve(lanes):
    """The sum of the lanes, by halving."""
    width = LANES // 2
    while width:
        for k in range(width):
            lanes[k] += lanes[k + width]
        width //= 2
    return lanes[0]


@njit(nogil=True, cache=True)
def gain(row, least, lanes, part):
    """How much the covering cost falls when the candidate with this row joins: sum of max(0, least - row)."""
    lanes[:] = 0
    for start in range(0, row.shape[0], SEGMENT):
        new, old = row[start : start + SEGMENT], least[start : start + SEGMENT]
        full = new.shape[0] // LANES * LANES
        part[:] = 0
        for step in range(new.shape[0] // LANES):
            for k in range(LANES):
                i = np.uint64(step) * np.uint64(LANES) + np.uint64(k)  # unsigned: no wrap-around, so it vectorises
                less = np.float64(old[i]) - np.float64(new[i])
                part[k] += less if less > 0 else 0.0
        for i in range(full, new.shape[0]):
            less = np.float64(old[i]) - np.float64(new[i])
            part[i - full] += less if less > 0 else 0.0
        for k in range(LANES):
            lanes[k] += part[k]
    return halve(lanes)


@njit(nogil=True, cache=True)
def total(row, lanes, part):
    """The sum of a row, as the gain of a candidate at distance 0 from everything."""
    return gain(np.zeros_like(row), row, lanes, part)


@njit(nogil=True, cache=True, fastmath={"reassoc", "nsz"})
def rough_total(row):
    """The sum of a row in any fast order, and that of its negative entries."""
    every, below = 0.0, 0.0
    for i in range(row.shape[0]):
        value = np.float64(row[i])
        every += value
        below += value if value < 0 else 0.0
    return every, below


@njit(nogil=True, cache=True)
def row_totals(rows, begin, end, out):
    """Rough sums of rows `begin:end` into `out`; false if an entry is negative or not finite."""
    buffer, sound = buffer_for(rows), True
    for j in range(begin, end):
        out[j], below = rough_total(row_of(rows, j, buffer))
        sound = sound and np.isfinite(out[j]) and below == 0
    return sound


@njit(nogil=True, cache=True)
def first_pick(rows, sums):
    """The row with the least sum, the first among equals; rough `sums` say which ones to sum exactly."""
    lanes, part, buffer = np.empty(LANES), np.empty(LANES), buffer_for(rows)
    best, lowest = -1, np.inf
    enough = sums.min() * (1 + rows.n * 2.0**-50)
    for j in range(rows.n):
        if sums[j] <= enough:
            exact = total(row_of(rows, j, buffer), lanes, part)
            if exact < lowest:
                best, lowest = j, exact
    return best


@njit(nogil=True, cache=True, fastmath={"reassoc", "nsz"})
def rough_gain(flat, begin, least):
    """`gain` of the candidate whose row begins there, from above: between the exact one and `1 + 2 * ROUGH` times that."""
    n = np.uint64(least.shape[0])
    every, begin = 0.0, np.uint64(begin)
    for start in range(np.uint64(0), n, np.uint64(SEGMENT)):
        part = least.dtype.type(0)
        for i in range(start, min(n, start + np.uint64(SEGMENT))):
            less = least[i] - flat[begin + i]
            part += less if less > 0 else least.dtype.type(0)
        every += np.float64(part)
    return every * (1 + ROUGH)


@njit(nogil=True, cache=True)
def placed(rows, j, buffer):
    """Row `j` as an array and where in it the row begins; computed into `buffer` where the matrix is not in memory."""
    if rows.stride > 0:
        return rows.flat, j * rows.stride
    distances_to(rows.points, j, buffer)
    return buffer, 0


@njit(nogil=True, cache=True)
def row_bounds(rows, begin, end, least, out):
    """Upper bounds on the gains of candidates `begin:end`, tight up to rounding, into `out`."""
    buffer = buffer_for(rows)
    for j in range(begin, end):
        flat, at = placed(rows, j, buffer)
        out[j] = rough_gain(flat, at, least)


@njit(nogil=True, cache=True)
def sift(keys, heap, length, top):
    """Restores the heap below `top`: the highest key first, among equals the lowest index."""
    key, item = keys[top], heap[top]
    while True:
        child = 2 * top + 1
        if child >= length:
            break
        if child + 1 < length and (
            keys[child + 1] > keys[child] or (keys[child + 1] == keys[child] and heap[child + 1] < heap[child])
        ):
            child += 1
        if key > keys[child] or (key == keys[child] and item < heap[child]):
            break
        keys[top], heap[top] = keys[child], heap[child]
        top = child
    keys[top], heap[top] = key, item


@njit(nogil=True, cache=True)
def near(flat, begin, least, flags, where, what):
    """Lists the entries with row < least in `where` and `what`; their number, or -1 if they do not fit."""
    found, n = 0, least.shape[0]
    eights = flags.view(np.uint64)
    for start in range(0, n, SEGMENT):
        width = min(SEGMENT, n - start)
        new, old = flat[begin + start : begin + start + width], least[start : start + width]
        flags[width:] = 0
        for k in range(width):  # vectorises, unlike the copying below; most flags are 0
            flags[k] = np.uint8(new[k] < old[k])
        for block in range((width + 7) // 8):
            left = eights[block]
            while left != 0:
                lowest = left & (~left + np.uint64(1))
                k = 8 * block + np.int64((lowest * np.uint64(0x0001020304050607)) >> np.uint64(56))
                if found == where.shape[0]:
                    return -1
                where[found], what[found] = start + k, new[k]
                found += 1
                left ^= lowest
    return found


@njit(nogil=True, cache=True)
def near_gain(where, what, found, least, lanes, part):
    """`gain` from the list that `near` wrote, bit for bit; entries that no longer count leave the list."""
    lanes[:] = 0
    part[:] = 0
    segment, kept = 0, 0
    for e in range(found):
        i, value = where[e], what[e]
        if i // SEGMENT != segment:
            segment = i // SEGMENT
            for k in range(LANES):
                lanes[k] += part[k]
            part[:] = 0
        less = np.float64(least[i]) - np.float64(value)
        if less > 0:
            part[i % LANES] += less
            where[kept], what[kept] = i, value
            kept += 1
    for k in range(LANES):
        lanes[k] += part[k]
    return halve(lanes), kept


@njit(nogil=True, cache=True)
def heap_without(first, bounds):
    """All candidates but the first pick as a heap by `bounds`: keys, and whose they are."""
    n = bounds.shape[0]
    keys, heap = np.empty(n), np.empty(n, np.int64)
    length = 0
    for j in range(n):
        if j != first:
            keys[length], heap[length] = bounds[j], j
            length += 1
    for top in range(length // 2 - 1, -1, -1):
        sift(keys, heap, length, top)
    return keys, heap


@njit(nogil=True, cache=True)
def certain(keys, length):
    """Whether the first of the heap, whose key is a rough gain of today, gains more than any other can."""
    second = keys[1] if length > 1 else -1.0
    third = keys[2] if length > 2 else -1.0
    return keys[0] * (1 - 2 * ROUGH) > max(second, third)


@njit(nogil=True, cache=True)
def join(flat, begin, count, least, nearest):
    """Makes a candidate pick number `count`; how many rows are nearer to it than to any pick before."""
    moved, begin = 0, np.uint64(begin)
    for i in range(np.uint64(least.shape[0])):
        new, old = flat[begin + i], least[i]
        nearer = new < old
        least[i] = new if nearer else old
        nearest[i] = count if nearer else nearest[i]
        moved += nearer
    return moved


@njit(nogil=True, cache=True)
def join_listed(where, what, found, count, least, nearest):
    """`join` from the list that `near` wrote."""
    for e in range(found):
        if what[e] < least[where[e]]:
            least[where[e]] = what[e]
            nearest[where[e]] = count
    return found


@njit(nogil=True, cache=True)
def lazy(rows, first, least, bounds, picks, weights):
    """Fills `picks` and `weights` `(size,)`, given the first pick, its row and bounds on every gain over it.

    The candidate with the highest bound is looked at again until it is the pick for certain: by a rough gain of
    today, which mostly sends it down or puts it ahead of all other bounds, else by the exact one. An entry that
    adds nothing to a gain never will again, so a candidate with few that do keeps a list of them, and its row is
    not read any more. An example belongs to the earliest of its nearest picks. Returns the covering cost, how
    many rows were read and how many gains were brought up to date.
    """
    n, size, roughly, exactly = rows.n, picks.shape[0], 0, 1
    lanes, part, buffer = np.empty(LANES), np.empty(LANES), buffer_for(rows)
    nearest, found = np.zeros(n, np.int32), np.full(n, -1, np.int64)
    known = np.full(n, 2, np.int64)  # bound j is that of pick known[j] // 2, rough or exact
    room = min(NEAR, n // 32) if rows.stride == 0 or n > SCRATCH_ROWS else 0  # short rows are as fast as lists
    where, what, flags = np.empty((n, room), np.int32), np.empty((n, room), least.dtype), np.empty(SEGMENT, np.uint8)
    keys, heap = heap_without(first, bounds)
    length, read, computed, moved = n - 1, 0, 0, n
    picks[0] = first
    for count in range(1, size):
        while keys[0] > 0:
            j = heap[0]
            if known[j] == 2 * count + exactly or (known[j] == 2 * count + roughly and certain(keys, length)):
                break
            if found[j] >= 0:
                keys[0], found[j] = near_gain(where[j], what[j], found[j], least, lanes, part)
                known[j] = 2 * count + exactly
                computed += 1
            elif known[j] == 2 * count + roughly:
                keys[0] = gain(row_of(rows, j, buffer), least, lanes, part)
                known[j] = 2 * count + exactly
            else:
                flat, at = placed(rows, j, buffer)
                keys[0] = min(keys[0], rough_gain(flat, at, least))
                known[j] = 2 * count + roughly
                if moved <= 2 * room:  # candidates near the top have about as many entries as the last pick
                    found[j] = near(flat, at, least, flags, where[j], what[j])
                computed += 1
                read += 1
            sift(keys, heap, length, 0)
        j = picks[count] = heap[0]
        if found[j] < 0:
            flat, at = placed(rows, j, buffer)
            moved = join(flat, at, np.int32(count), least, nearest)
            read += 1
        else:
            moved = join_listed(where[j], what[j], found[j], count, least, nearest)
        length -= 1
        keys[0], heap[0] = keys[length], heap[length]
        sift(keys, heap, length, 0)
    weights[:] = 0
    for i in range(n):
        weights[nearest[i]] += 1
    return total(least, lanes, part), read, computed


@njit(nogil=True, cache=True)
def greedy(rows, picks, weights):
    """One whole selection on this thread; returns the covering cost, or NaN if an entry is not a distance."""
    sums = np.empty(rows.n)
    if not row_totals(rows, 0, rows.n, sums):
        return np.nan
    first = first_pick(rows, sums)
    least = row_of(rows, first, buffer_for(rows)).copy()
    if picks.shape[0] > 1:
        row_bounds(rows, 0, rows.n, least, sums)
    return lazy(rows, first, least, sums, picks, weights)[0]


@njit(nogil=True, cache=True)
def greedy_pools(flat, begin, end, n, stride, pool_stride, nothing, picks, weights, costs):
    """Selects in pools `begin:end` of a `(pools, n, n)` stack."""
    for p in range(begin, end):
        rows = Rows(n, flat[p * pool_stride :], stride, nothing)
        costs[p] = greedy(rows, picks[p], weights[p])


@njit(nogil=True, cache=True)
def fill(points, begin, end, out):
    """Distances `(P, n, n)` of `points` `(P, draws, d, n)`: rows `begin:end`, counted through all pools."""
    n = out.shape[1]
    for row in range(begin, end):
        distances_to(points[row // n], row % n, out[row // n, row % n])


@njit(nogil=True, cache=True)
def greedy_groups(vectors, starts, offsets, begin, end, picks, weights, costs):
    """Selects in groups `begin:end`: rows `starts[g]:starts[g + 1]` of `vectors` `(draws, n, d)`.

    Group `g` fills `picks[offsets[g]:offsets[g + 1]]`. One scratch matrix serves all groups that fit it.
    """
    draws, _, dims = vectors.shape
    widest, largest = 0, 0
    for g in range(begin, end):
        n = starts[g + 1] - starts[g]
        largest = max(largest, n)
        if n <= SCRATCH_ROWS:
            widest = max(widest, n)
    matrix = np.empty(widest * widest, vectors.dtype)
    room = np.empty(draws * dims * largest, vectors.dtype)
    for g in range(begin, end):
        n = starts[g + 1] - starts[g]
        points = room[: draws * dims * n].reshape(draws, dims, n)
        for s in range(draws):
            for i in range(n):
                for k in range(dims):
                    points[s, k, i] = vectors[s, starts[g] + i, k]
        stride = n if n <= SCRATCH_ROWS else 0
        if stride > 0:
            for j in range(n):
                distances_to(points, j, matrix[j * n : (j + 1) * n])
        rows = Rows(n, matrix, stride, points)
        here = picks[offsets[g] : offsets[g + 1]]
        costs[g] = greedy(rows, here, weights[offsets[g] : offsets[g + 1]])
        here += starts[g]
