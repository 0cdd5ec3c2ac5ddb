"""The table of a chain in slots of bytes: how it is filled, and how a schedule is read from it.

``rotor`` has the recurrence. An interval ``(s, t)`` with ``s <= t`` is row ``row_of(s, t, L)`` of a
packed upper triangle, in the order ``(0, 0), (0, 1), … (0, L - 1), (1, 1), …``.

A choice for an interval is a number: the cut ``s' > s`` for ``F_ck s``, ``s`` for ``F_all s``, and
``-1 - option`` for one of its save options. For ``s == t``, the choice ``s + 1`` is a forward by
itself, followed by a rebuild later. -1 is no choice.

numba compiles the loops. They release the interpreter lock, and threads are left to callers.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from fxremat.ir.schedule import ALL, BACKWARD, INPUT, KINDS, NONE
from fxremat.jit import njit
from fxremat.solvers.numbers import Floats, Ints, Numbers
from fxremat.solvers.quantize import slots_up
from fxremat.solvers.threads import Crew

TILE = 16
"""Intervals of ``TILE`` starts and ``TILE`` ends are computed together, for the cache."""

BLOCK = 32
"""Number of entries of a row that are lowered, or skipped, at once."""

NO_CHOICE = -1
"""The choice of an interval that nothing fits."""

in_slots = njit(inline="always")(slots_up)


class Table(NamedTuple):
    """Least seconds ``C(s, t, m)`` of all intervals ``s … t`` of a chain (see ``rotor``).

    ``m`` is the number of free slots of ``quantum`` bytes.

    Attributes:
        numbers: the chain.
        quantum: bytes of a slot.
        values: ``(L (L + 1) / 2, slots + 1)``, ``C(s, t, m) + prefix_s[s]`` in seconds. Because the
            prefix is included, the sum of forwards in ``C_ck`` cancels, and a candidate is one
            addition of two rows. A row never increases with ``m``.
        first: ``(L (L + 1) / 2,)``, the first ``m`` with a finite entry.
    """

    numbers: Numbers
    quantum: int
    values: Floats
    first: Ints


def filled(numbers: Numbers, *, quantum: int, slots: int) -> Table:
    """Return the table of a chain, computed for up to ``slots`` free slots of ``quantum`` bytes.

    ``O(L³ slots)``, by as many threads as ``thread_count`` returns.
    """
    count = numbers.gradient.size
    rows = count * (count + 1) // 2
    values, first = np.empty((rows, slots + 1)), np.empty(rows, dtype=np.int64)
    table = Table(numbers, quantum, values, first)
    tiles = -(-count // TILE)
    with Crew(most=tiles) as crew:
        for distance in range(tiles):
            share = min(crew.size, tiles - distance)
            crew.run([partial(_fill_tiles, table, distance, k, share) for k in range(share)])
    return table


def last_filled(table: Table, numbers: Numbers) -> Table:
    """Return a copy of ``table`` with intervals up to the last stage refilled by ``numbers``."""
    copy = table._replace(numbers=numbers, values=table.values.copy(), first=table.first.copy())
    count, end = numbers.gradient.size, table.values.shape[1]
    for s in range(count - 2, -1, -1):
        row = row_of.py_func(s, count - 1, count)  # type: ignore[attr-defined]
        copy.values[row] = np.inf
        begin = _try_all(copy, s, count - 1, end)
        begin = _try_cuts(copy, s, count - 1, s + 1, count, begin)
        copy.values[row, begin:] -= numbers.prefix_s[s]
        copy.first[row] = min(begin, end)
    return copy


@njit(inline="always")
def row_of(s: int, t: int, count: int) -> int:
    """Return the index of the row of stages ``s … t`` in a table of a chain of ``count`` stages."""
    return s * count - s * (s - 1) // 2 + t - s


@njit(inline="always")
def all_bytes(n: Numbers, s: int, t: int, option: int) -> int:
    """Return the peak bytes of stage ``s`` if its forward keeps a saved set until its backward.

    They are in addition to boundary ``s``, for the forward and the backward, which enclose stages
    ``s + 1 … t``. ``m_all`` of Beaumont et al. (2019).

    Args:
        s, t: first and last stage.
        option: what the forward keeps, 0 for the whole saved set, else a save option.
    """
    nbytes: int = max(n.gradient[t] + n.keep[s, option], n.back[s, option])
    return nbytes


@njit(inline="always")
def ck_bytes(n: Numbers, s: int, cut: int, t: int) -> int:
    """Return the peak bytes of forwards of stages ``s … cut - 1`` that keep only boundary ``s``.

    They are in addition to boundary ``s``, and include the gradient after stage ``t``. ``m_none``
    of Beaumont et al. (2019).
    """
    nbytes: int = n.gradient[t] + n.sweep[s, cut]
    return nbytes


def added_bytes(n: Numbers, s: int, choice: int) -> int:
    """Return the bytes that a choice for stage ``s`` keeps beyond boundary ``s`` for later stages.

    ``choice`` is a cut after ``s``, or stands for ``F_all s`` with a save option; see the module.
    """
    if choice > s:
        return int(n.step[s, choice])
    return int(n.saved[s, 0 if choice == s else -1 - choice])


@njit(inline="always")
def leaf_ways(n: Numbers, s: int) -> int:
    """Return the number of ways to run stage ``s`` forward and backward without others between."""
    return 2 if s < n.gradient.size - 1 else 1 + n.backward_s.shape[1]


@njit(inline="always")
def leaf_way(n: Numbers, s: int, way: int) -> tuple[int, int, float]:
    """Return a way to run stage ``s`` forward and backward without others between.

    ``way`` is below ``leaf_ways``.

    Returns:
        The choice as numbered in the module, its bytes in addition to boundary ``s``, its seconds.
    """
    if way < 2:
        return s + way, n.leaf_bytes[s, way], n.leaf_s[s, way]
    takes = n.prefix_s[s + 1] - n.prefix_s[s] + n.backward_s[s, way - 1]
    return -way, all_bytes(n, s, s, way - 1), takes


@njit(inline="always")
def _fill_leaf(table: Table, s: int) -> None:
    """Fill the row of the single stage ``s`` with its seconds for every number of free slots.

    By Equation (1) of Beaumont et al. (2019).
    """
    n = table.numbers
    row = row_of(s, s, n.gradient.size)
    values = table.values[row]
    values[:] = np.inf
    begin = values.size
    for way in range(leaf_ways(n, s)):
        _, needs, takes = leaf_way(n, s, way)
        if takes < np.inf:
            start = in_slots(needs, table.quantum)
            begin = min(begin, start)
            for m in range(start, values.size):
                values[m] = min(values[m], takes + n.prefix_s[s])
    table.first[row] = begin


@njit(cache=True, nogil=True)
def _try_all(table: Table, s: int, t: int, begin: int) -> int:
    """Lower the entries of stages ``s … t`` to choices in which stage ``s`` keeps its saved set.

    Returns:
        The index of the row's first finite entry, which was ``begin`` before.
    """
    n, values = table.numbers, table.values
    row, inner = row_of(s, t, n.gradient.size), row_of(s + 1, t, n.gradient.size)
    for k in range(n.backward_s.shape[1]):
        if n.backward_s[s, k] == np.inf:
            continue
        shift = in_slots(n.saved[s, k], table.quantum)
        needs = in_slots(all_bytes(n, s, t, k), table.quantum)
        start = max(needs, shift + table.first[inner])
        for m in range(start, values.shape[1]):
            value = values[inner, m - shift] + n.backward_s[s, k] + n.prefix_s[s]
            values[row, m] = value if value < values[row, m] else values[row, m]
        begin = min(begin, start)
    return begin


@njit(inline="always")
def _lower_block(out: Floats, late: Floats, early: Floats, begin: int) -> None:
    """Lower ``BLOCK`` entries of ``out`` from ``begin`` on to ``late + early`` where that is less.

    Rows never increase, so the least sum is the last one, and the greatest entry the first. The
    block is skipped if that sum is not less than that entry.
    """
    last = begin + BLOCK - 1
    if late[last] + early[last] < out[begin]:
        for i in range(BLOCK):  # a constant trip count, so that the loop is vectorized
            k = begin + i
            value = late[k] + early[k]
            out[k] = value if value < out[k] else out[k]


@njit(inline="always")
def lower(out: Floats, late: Floats, early: Floats, bound: float) -> None:
    """Lower entries of ``out`` to ``late + early`` where that is less.

    Args:
        out, late, early: rows of equal length that never increase.
        bound: lower bound of all sums; entries that are no greater are skipped.
    """
    size = out.size
    blocks = size // BLOCK
    if not blocks:
        for k in range(size):
            value = late[k] + early[k]
            out[k] = value if value < out[k] else out[k]
        return
    # The last block covers the remainder and overlaps with the others. It comes first: once a
    # block has lowered some of its entries, the first of them need not be the greatest.
    _lower_block(out, late, early, size - BLOCK)
    for block in range(blocks):
        if out[block * BLOCK] <= bound:
            return
        _lower_block(out, late, early, block * BLOCK)


@njit(cache=True, nogil=True)
def _try_cuts(table: Table, s: int, t: int, from_cut: int, to_cut: int, begin: int) -> int:
    """Lower the entries of stages ``s … t`` to choices that keep boundary ``s`` and run to a cut.

    The cuts are ``from_cut … to_cut - 1``.

    Returns:
        The index of the row's first finite entry, which was ``begin`` before.
    """
    n, values, first = table.numbers, table.values, table.first
    count = n.gradient.size
    out = values[row_of(s, t, count)]
    end = out.size
    for cut in range(from_cut, to_cut):
        late = row_of(cut, t, count)
        early = row_of(s, cut - 1, count)
        shift = in_slots(n.step[s, cut], table.quantum)
        start = max(shift + first[late], first[early])
        if start >= end:
            continue
        bound = values[late, end - 1 - shift] + values[early, end - 1]
        if out[start] <= bound:
            continue
        start = max(start, in_slots(ck_bytes(n, s, cut, t), table.quantum))
        if start >= end:
            continue
        begin = min(begin, start)
        late_row = values[late, start - shift : end - shift]
        lower(out[start:], late_row, values[early, start:], bound)
    return begin


@njit(cache=True, nogil=True)
def _fill_tile(table: Table, s0: int, t0: int) -> None:
    """Fill the rows of intervals with first stage in the tile at ``s0`` and last in that at ``t0``.

    Cuts in tiles strictly between come first, one tile of cuts at a time: all rows of this tile
    then read the same rows from the cache. Cuts in the two tiles at the ends read rows of this tile
    itself, and are computed row by row.

    Requires:
        All tiles between are filled.
    """
    count, end = table.numbers.gradient.size, table.values.shape[1]
    s1 = min(s0 + TILE, count)
    t1 = min(t0 + TILE, count)
    begin = np.full((TILE, TILE), end)
    for s in range(s0, s1):
        for t in range(max(t0, s + 1), t1):
            for m in range(end):
                table.values[row_of(s, t, count), m] = np.inf
    for cut in range(s0 + TILE, t0, TILE):
        for t in range(t0, t1):
            for s in range(s0, s1):
                so_far = begin[s - s0, t - t0]
                begin[s - s0, t - t0] = _try_cuts(table, s, t, cut, cut + TILE, so_far)
    for s in range(s1 - 1, s0 - 1, -1):
        if s0 == t0:
            _fill_leaf(table, s)
        for t in range(max(t0, s + 1), t1):
            b = _try_all(table, s, t, begin[s - s0, t - t0])
            for first, last in ((s + 1, s1 - 1 if s0 < t0 else s), (max(t0, s + 1), t)):
                b = _try_cuts(table, s, t, first, last + 1, b)
            row = row_of(s, t, count)
            for m in range(b, end):
                table.values[row, m] -= table.numbers.prefix_s[s]
            table.first[row] = min(b, end)


def _fill_tiles(table: Table, distance: int, begin: int, stride: int) -> None:
    """Fill tiles ``begin, begin + stride, …`` of the diagonal of tiles at ``distance``.

    By Equation (2) of Beaumont et al. (2019), see ``rotor``.

    Requires:
        All diagonals of smaller ``distance`` are filled.
    """
    tiles = slots_up(table.numbers.gradient.size, TILE)
    for tile in range(begin, tiles - distance, stride):
        _fill_tile(table, tile * TILE, (tile + distance) * TILE)


@njit(cache=True, nogil=True)
def choose(table: Table, s: int, t: int, m: int) -> int:
    """Return the choice that takes as long as entry ``m`` of stages ``s … t`` says.

    The sums are computed again. Choices are numbered as in the module; ``NO_CHOICE`` is none.
    """
    n, values, quantum = table.numbers, table.values, table.quantum
    count = n.gradient.size
    want = values[row_of(s, t, count), m]
    if want == np.inf:
        return NO_CHOICE
    if s == t:
        for way in range(leaf_ways(n, s)):
            choice, nbytes, takes = leaf_way(n, s, way)
            if m >= in_slots(nbytes, quantum) and takes + n.prefix_s[s] == want:
                return choice
        return NO_CHOICE
    for k in range(n.backward_s.shape[1]):
        shift = in_slots(n.saved[s, k], quantum)
        if m < max(shift, in_slots(all_bytes(n, s, t, k), quantum)):
            continue
        inner = values[row_of(s + 1, t, count), m - shift]
        if inner + n.backward_s[s, k] + n.prefix_s[s] - n.prefix_s[s] == want:
            return -1 - k if k else s
    for cut in range(s + 1, t + 1):
        shift = in_slots(n.step[s, cut], quantum)
        if m < max(shift, in_slots(ck_bytes(n, s, cut, t), quantum)):
            continue
        late = values[row_of(cut, t, count), m - shift]
        if late + values[row_of(s, cut - 1, count), m] - n.prefix_s[s] == want:
            return cut
    return NO_CHOICE


@njit(cache=True, nogil=True)
def read_out(table: Table, outer: Table, slots: int) -> Ints:
    """Return the fastest schedule of the whole chain by Algorithm 2 of Beaumont et al. (2019).

    Args:
        table: the table of all intervals.
        outer: the table of the intervals that end with the last stage.
        slots: number of free slots, in addition to boundary 0.

    Returns:
        Codes as in ``ir.schedule``; empty if no choice gives the value of some interval.
    """
    last = table.numbers.gradient.size - 1
    codes = np.empty(8 * (last + 1), dtype=np.int64)
    todo = np.empty((2 * last + 4, 3), dtype=np.int64)  # intervals; with t < s a backward
    todo[0, 0], todo[0, 1], todo[0, 2] = 0, last, slots
    size, waiting = 0, 1
    while waiting:
        waiting -= 1
        s, t, m = todo[waiting, 0], todo[waiting, 1], todo[waiting, 2]
        if size + last + 4 > codes.size:
            codes = np.append(codes, np.empty_like(codes))
        if t < s:
            codes[size] = s * KINDS + BACKWARD
            size += 1
            continue
        source = outer if t == last else table
        n = source.numbers
        choice = choose(source, s, t, m)
        if choice == NO_CHOICE:
            return codes[:0]
        if choice <= s:
            option = 0 if choice == s else -1 - choice
            codes[size] = s * KINDS + ALL + option
            size += 1
            todo[waiting, 0], todo[waiting, 1], todo[waiting, 2] = s, s - 1, 0
            waiting += 1
            if s < t:
                left = m - in_slots(n.saved[s, option], source.quantum)
                todo[waiting, 0], todo[waiting, 1], todo[waiting, 2] = s + 1, t, left
                waiting += 1
            continue
        codes[size] = s * KINDS + INPUT
        size += 1
        if s == t:
            codes[size] = s * KINDS + ALL
            codes[size + 1] = s * KINDS + BACKWARD
            size += 2
            continue
        for stage in range(s + 1, choice):
            codes[size] = stage * KINDS + NONE
            size += 1
        todo[waiting, 0], todo[waiting, 1], todo[waiting, 2] = s, choice - 1, m
        waiting += 1
        left = m - in_slots(n.step[s, choice], source.quantum)
        todo[waiting, 0], todo[waiting, 1], todo[waiting, 2] = choice, t, left
        waiting += 1
    return codes[:size]
