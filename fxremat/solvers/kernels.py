"""The loops of the chain solvers, compiled by numba.

An interval ``(s, t)`` with ``s <= t`` is row ``row_of(s, t, L)`` of a packed upper
triangle, in the order ``(0, 0), (0, 1), … (0, L - 1), (1, 1), …``.

Every kernel releases the interpreter lock. Threads of the caller, not numba's, share the
work: numba's may not be used after a fork, nor in some builds from two threads at once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from fxremat.solvers.numbers import Floats, Ints, Numbers, choices_of

TILE = 16
"""Intervals of ``TILE`` starts and ``TILE`` ends are computed together, for the cache."""

SAVED, KEEP, BACK = range(3)
"""Rows of ``Table.choice_bytes``."""

BLOCK = 32
"""Entries of a row that are lowered, or skipped, at once."""


class Table(NamedTuple):
    """All ``C(s, t, m)``, with ``m`` in slots of ``quantum`` bytes.

    Attributes:
        numbers: the chain.
        choice_s: ``(L, 1 + O)``, ``backward_s`` where the whole saved set and each option is kept.
        choice_bytes: ``(3, L, 1 + O)``, ``saved``, ``keep`` and ``back`` of these.
        step_slots: ``numbers.step``, rounded up to slots.
        quantum: bytes of a slot.
        values: ``(L (L + 1) / 2, slots + 1)``, ``C(s, t, m) + prefix_s[s]``. With the
            prefix in it, the sum of forwards in ``C_ck`` drops out, and a candidate is
            one addition of two rows. A row never increases with ``m``.
        first: ``(L (L + 1) / 2,)``, the first ``m`` with a finite entry.
    """

    numbers: Numbers
    choice_s: Floats
    choice_bytes: Ints
    step_slots: Ints
    quantum: int
    values: Floats
    first: Ints

    @staticmethod
    def of(numbers: Numbers, quantum: int, slots: int) -> Table:
        """One of which the intervals of one stage are filled: Eq. (1)."""
        count = len(numbers.backward_s)
        rows = count * (count + 1) // 2
        choice_s, choice_bytes = choices_of(numbers)
        table = Table(
            numbers,
            choice_s,
            choice_bytes,
            step_slots=-(-numbers.step // quantum),
            quantum=quantum,
            values=np.empty((rows, slots + 1)),
            first=np.empty(rows, dtype=np.int64),
        )
        for s in range(count):
            _fill_leaf(table, s)
        return table

    def at(self, numbers: Numbers) -> Table:
        """A copy for other sizes of the chain, of which intervals are yet to be filled anew."""
        choice_s, choice_bytes = choices_of(numbers)
        return Table(
            numbers,
            choice_s,
            choice_bytes,
            step_slots=-(-numbers.step // self.quantum),
            quantum=self.quantum,
            values=self.values.copy(),
            first=self.first.copy(),
        )


@njit(inline="always")
def row_of(s: int, t: int, count: int) -> int:
    """Row of interval ``(s, t)`` among those of ``count`` stages."""
    return s * count - s * (s - 1) // 2 + t - s


@njit(inline="always")
def in_slots(nbytes: int, quantum: int) -> int:
    """``nbytes`` in slots of ``quantum`` bytes, rounded up."""
    return -(-nbytes // quantum)


@njit(inline="always")
def all_bytes(n: Numbers, s: int, t: int) -> int:
    """Least memory of ``F_all s`` and ``B s`` around ``(s + 1, t)``: ``m_all``."""
    nbytes: int = max(n.gradient[t] + n.keep[s], n.back[s])
    return nbytes


@njit(inline="always")
def choice_needs(gradient: Ints, choice_bytes: Ints, s: int, t: int, k: int) -> int:
    """Least memory of ``F_all s``, keeping what choice ``k`` says, and ``B s`` around ``t``."""
    nbytes: int = max(gradient[t] + choice_bytes[KEEP, s, k], choice_bytes[BACK, s, k])
    return nbytes


@njit(inline="always")
def ck_bytes(n: Numbers, s: int, cut: int, t: int) -> int:
    """Least memory of ``F_ck s, F_none s + 1 … cut - 1``: ``m_none``, of these forwards only."""
    nbytes: int = n.gradient[t] + n.sweep[s, cut]
    return nbytes


def _fill_leaf(table: Table, s: int) -> None:
    """Row ``(s, s)``: Eq. (1)."""
    n = table.numbers
    row = row_of.py_func(s, s, n.backward_s.size)
    values, end = table.values[row], table.values.shape[1]
    values[:] = np.inf
    for way in (1, 0):
        start = min(-(-n.leaf_bytes[s, way] // table.quantum), end)
        values[start:] = n.leaf_s[s, way] + n.prefix_s[s]
    if s == n.backward_s.size - 1:
        for k in range(1, table.choice_s.shape[1]):
            needs = choice_needs.py_func(n.gradient, table.choice_bytes, s, s, k)
            start = min(-(-needs // table.quantum), end)
            at_once_s = n.prefix_s[s + 1] - n.prefix_s[s] + table.choice_s[s, k]
            np.minimum(values[start:], at_once_s + n.prefix_s[s], out=values[start:])
    table.first[row] = end - np.count_nonzero(values < np.inf)  # they never increase


@njit(cache=True, nogil=True)
def _try_all(
    choice_s: Floats,
    choice_bytes: Ints,
    gradient: Ints,
    prefix_s: Floats,
    values: Floats,
    first: Ints,
    quantum: int,
    s: int,
    t: int,
    begin: int,
) -> int:
    """Lower row ``(s, t)`` to ``C_all``; returns its first finite entry, ``begin`` so far."""
    row, inner = row_of(s, t, gradient.size), row_of(s + 1, t, gradient.size)
    for k in range(choice_s.shape[1]):
        if choice_s[s, k] == np.inf:
            continue
        shift = in_slots(choice_bytes[SAVED, s, k], quantum)
        needs = in_slots(choice_needs(gradient, choice_bytes, s, t, k), quantum)
        start = max(needs, shift + first[inner])
        for m in range(start, values.shape[1]):
            value = values[inner, m - shift] + choice_s[s, k] + prefix_s[s]
            values[row, m] = value if value < values[row, m] else values[row, m]
        begin = min(begin, start)
    return begin


@njit(inline="always")
def _lower_block(out: Floats, late: Floats, early: Floats, begin: int) -> None:
    """Lower ``BLOCK`` entries to the sum of two rows, unless none of them can be lower.

    Rows never increase: the least sum is the last one, the greatest entry the first.
    """
    last = begin + BLOCK - 1
    if late[last] + early[last] < out[begin]:
        for i in range(BLOCK):  # a constant, so that vectors are used
            k = begin + i
            value = late[k] + early[k]
            out[k] = value if value < out[k] else out[k]


@njit(inline="always")
def lower(out: Floats, late: Floats, early: Floats, bound: float) -> None:
    """Lower ``out`` to the sum of two rows, which is nowhere below ``bound``."""
    size = out.size
    blocks = size // BLOCK
    if not blocks:
        for k in range(size):
            value = late[k] + early[k]
            out[k] = value if value < out[k] else out[k]
        return
    # What the blocks leave over, with some entries twice. It comes first: once a block has
    # lowered those entries, the first of them is not the greatest any more.
    _lower_block(out, late, early, size - BLOCK)
    for block in range(blocks):
        if out[block * BLOCK] <= bound:
            return
        _lower_block(out, late, early, block * BLOCK)


@njit(cache=True, nogil=True)
def _try_cuts(
    gradient: Ints,
    sweep: Ints,
    step_slots: Ints,
    values: Floats,
    first: Ints,
    quantum: int,
    s: int,
    t: int,
    from_cut: int,
    to_cut: int,
    begin: int,
) -> int:
    """Lower row ``(s, t)`` to ``C_ck`` of a half-open range of cuts; see ``_try_all``."""
    count = gradient.size
    out = values[row_of(s, t, count)]
    end = out.size
    for cut in range(from_cut, to_cut):
        late = row_of(cut, t, count)
        early = row_of(s, cut - 1, count)
        shift = step_slots[s, cut]
        start = max(shift + first[late], first[early])
        if start >= end:
            continue
        bound = values[late, end - 1 - shift] + values[early, end - 1]
        if out[start] <= bound:
            continue
        start = max(start, in_slots(gradient[t] + sweep[s, cut], quantum))
        if start >= end:
            continue
        begin = min(begin, start)
        late_row = values[late, start - shift : end - shift]
        lower(out[start:], late_row, values[early, start:], bound)
    return begin


@njit(cache=True, nogil=True)
def _fill_tile(
    choice_s: Floats,
    choice_bytes: Ints,
    gradient: Ints,
    prefix_s: Floats,
    sweep: Ints,
    step_slots: Ints,
    values: Floats,
    first: Ints,
    quantum: int,
    s0: int,
    t0: int,
    begin: Ints,
) -> None:
    """Rows ``(s, t)`` with ``s`` in the tile at ``s0`` and ``t`` in the one at ``t0``.

    Requires: all tiles between are filled, and so are the rows of one stage.

    Cuts in tiles strictly between come first, one tile of cuts at a time: all rows of
    this tile read the same rows then, out of the cache. Cuts in the two tiles at the
    ends read rows of this very tile and follow row by row.
    """
    count, end = gradient.size, values.shape[1]
    s1 = min(s0 + TILE, count)
    t1 = min(t0 + TILE, count)
    for s in range(s0, s1):
        for t in range(max(t0, s + 1), t1):
            for m in range(end):
                values[row_of(s, t, count), m] = np.inf
    for cut in range(s0 + TILE, t0, TILE):
        for t in range(t0, t1):
            for s in range(s0, s1):
                begin[s - s0, t - t0] = _try_cuts(
                    gradient, sweep, step_slots, values, first, quantum,
                    s, t, cut, cut + TILE, begin[s - s0, t - t0],
                )  # fmt: skip
    for s in range(s1 - 1, s0 - 1, -1):
        for t in range(max(t0, s + 1), t1):
            b = _try_all(
                choice_s, choice_bytes, gradient, prefix_s, values, first, quantum,
                s, t, begin[s - s0, t - t0],
            )  # fmt: skip
            for half in range(2):
                near = half == 0
                if near and s0 == t0:
                    continue
                from_cut, to_cut = (s + 1, s1) if near else (max(t0, s + 1), t + 1)
                b = _try_cuts(
                    gradient, sweep, step_slots, values, first, quantum, s, t, from_cut, to_cut, b
                )
            row = row_of(s, t, count)
            for m in range(b, end):
                values[row, m] -= prefix_s[s]
            first[row] = min(b, end)


def fill_tiles(table: Table, distance: int, begin: int, stride: int) -> None:
    """Eq. (2) for the tiles ``begin, begin + stride, …`` of one diagonal of tiles.

    Requires: all diagonals of lesser ``distance`` are filled.
    """
    n, end = table.numbers, table.values.shape[1]
    tiles = -(-table.numbers.backward_s.size // TILE)
    for tile in range(begin, tiles - distance, stride):
        _fill_tile(
            table.choice_s,
            table.choice_bytes,
            n.gradient,
            n.prefix_s,
            n.sweep,
            table.step_slots,
            table.values,
            table.first,
            table.quantum,
            tile * TILE,
            (tile + distance) * TILE,
            np.full((TILE, TILE), end),
        )


def fill_last(table: Table) -> None:
    """Eq. (2) anew for the intervals that end with the last stage, of which sizes differ.

    Requires: all rows of other intervals, and that of the last stage alone, are filled.
    """
    n, values, first = table.numbers, table.values, table.first
    count, end = n.backward_s.size, values.shape[1]
    own = values, first, table.quantum
    for s in range(count - 2, -1, -1):
        row = row_of.py_func(s, count - 1, count)
        values[row] = np.inf
        kept = table.choice_s, table.choice_bytes, n.gradient, n.prefix_s
        begin = _try_all(*kept, *own, s, count - 1, end)
        cuts = n.gradient, n.sweep, table.step_slots
        begin = _try_cuts(*cuts, *own, s, count - 1, s + 1, count, begin)
        values[row, begin:] -= n.prefix_s[s]
        first[row] = min(begin, end)
