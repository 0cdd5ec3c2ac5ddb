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

from fxremat.ir.coded import ALL, BACKWARD, INPUT, KINDS, NONE
from fxremat.solvers.numbers import Floats, Ints, Numbers

TILE = 16
"""Intervals of ``TILE`` starts and ``TILE`` ends are computed together, for the cache."""

BLOCK = 32
"""Entries of a row that are lowered, or skipped, at once."""


class Table(NamedTuple):
    """All ``C(s, t, m)``, with ``m`` in slots of ``quantum`` bytes.

    Attributes:
        numbers: the chain.
        step_slots: ``numbers.step``, rounded up to slots.
        quantum: bytes of a slot.
        values: ``(L (L + 1) / 2, slots + 1)``, ``C(s, t, m) + prefix_s[s]``. With the
            prefix in it, the sum of forwards in ``C_ck`` drops out, and a candidate is
            one addition of two rows. A row never increases with ``m``.
        first: ``(L (L + 1) / 2,)``, the first ``m`` with a finite entry.
    """

    numbers: Numbers
    step_slots: Ints
    quantum: int
    values: Floats
    first: Ints


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
def option_bytes(n: Numbers, s: int, t: int, k: int) -> int:
    """The same with save option ``k + 1``."""
    nbytes: int = max(n.gradient[t] + n.option_keep[s, k], n.option_back[s, k])
    return nbytes


@njit(inline="always")
def at_once_s(n: Numbers, s: int, k: int) -> float:
    """Seconds of ``F_all s`` with save option ``k + 1`` and ``B s``, ``s`` being the last."""
    seconds: float = n.prefix_s[s + 1] - n.prefix_s[s] + n.option_s[s, k]
    return seconds


@njit(inline="always")
def ck_bytes(n: Numbers, s: int, cut: int, t: int) -> int:
    """Least memory of ``F_ck s, F_none s + 1 … cut - 1``: ``m_none``, of these forwards only."""
    nbytes: int = n.gradient[t] + n.sweep[s, cut]
    return nbytes


@njit(cache=True, nogil=True)
def _fill_leaf(table: Table, s: int) -> None:
    """Row ``(s, s)``: Eq. (1)."""
    n = table.numbers
    row = row_of(s, s, n.backward_s.size)
    end = table.values.shape[1]
    table.values[row] = np.inf
    table.first[row] = end
    for way in (1, 0):
        start = min(in_slots(n.leaf_bytes[s, way], table.quantum), end)
        table.values[row, start:] = n.leaf_s[s, way] + n.prefix_s[s]
        table.first[row] = min(table.first[row], start)
    if s < n.backward_s.size - 1:
        return
    for k in range(n.option_s.shape[1]):
        start = min(in_slots(option_bytes(n, s, s, k), table.quantum), end)
        value = at_once_s(n, s, k) + n.prefix_s[s]
        for m in range(start, end):
            table.values[row, m] = min(table.values[row, m], value)
        if value < np.inf:
            table.first[row] = min(table.first[row], start)


@njit(cache=True, nogil=True)
def _try_all(table: Table, s: int, t: int, begin: int) -> int:
    """Lower row ``(s, t)`` to ``C_all``; returns its first finite entry, ``begin`` so far."""
    n = table.numbers
    count = n.backward_s.size
    out = table.values[row_of(s, t, count)]
    inner = row_of(s + 1, t, count)
    shift = in_slots(n.saved[s], table.quantum)
    start = max(in_slots(all_bytes(n, s, t), table.quantum), shift + table.first[inner])
    for m in range(start, out.size):
        value = table.values[inner, m - shift] + n.backward_s[s] + n.prefix_s[s]
        out[m] = value if value < out[m] else out[m]
    first: int = min(begin, start)
    for k in range(n.option_s.shape[1]):
        if n.option_s[s, k] == np.inf:
            continue
        shift = in_slots(n.option_saved[s, k], table.quantum)
        needs = in_slots(option_bytes(n, s, t, k), table.quantum)
        start = max(needs, shift + table.first[inner])
        for m in range(start, out.size):
            value = table.values[inner, m - shift] + n.option_s[s, k] + n.prefix_s[s]
            out[m] = value if value < out[m] else out[m]
        first = min(first, start)
    return first


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
def _try_cuts(table: Table, s: int, t: int, cuts: tuple[int, int], begin: int) -> int:
    """Lower row ``(s, t)`` to ``C_ck`` of the half-open range ``cuts``; see ``_try_all``."""
    n = table.numbers
    values = table.values
    count = n.backward_s.size
    out = values[row_of(s, t, count)]
    end = out.size
    for cut in range(cuts[0], cuts[1]):
        late = row_of(cut, t, count)
        early = row_of(s, cut - 1, count)
        shift = table.step_slots[s, cut]
        start = max(shift + table.first[late], table.first[early])
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
def _close(table: Table, s: int, t: int, begin: int) -> None:
    """Turn the sums of row ``(s, t)`` into its values."""
    n = table.numbers
    row = row_of(s, t, n.backward_s.size)
    for m in range(begin, table.values.shape[1]):
        table.values[row, m] -= n.prefix_s[s]
    table.first[row] = min(begin, table.values.shape[1])


@njit(cache=True, nogil=True)
def _fill_tile(table: Table, s0: int, t0: int) -> None:
    """Rows ``(s, t)`` with ``s`` in the tile at ``s0`` and ``t`` in the one at ``t0``.

    Requires: all tiles between are filled.

    Cuts in tiles strictly between come first, one tile of cuts at a time: all rows of
    this tile read the same rows then, out of the cache. Cuts in the two tiles at the
    ends read rows of this very tile and follow row by row.
    """
    count = table.numbers.backward_s.size
    s1 = min(s0 + TILE, count)
    t1 = min(t0 + TILE, count)
    begin = np.full((TILE, TILE), table.values.shape[1])
    for s in range(s0, s1):
        for t in range(max(t0, s + 1), t1):
            table.values[row_of(s, t, count)] = np.inf
    for cut in range(s0 + TILE, t0, TILE):
        cuts = (cut, cut + TILE)
        for t in range(t0, t1):
            for s in range(s0, s1):
                begin[s - s0, t - t0] = _try_cuts(table, s, t, cuts, begin[s - s0, t - t0])
    for s in range(s1 - 1, s0 - 1, -1):
        if s0 == t0:
            _fill_leaf(table, s)
        for t in range(max(t0, s + 1), t1):
            b = _try_all(table, s, t, begin[s - s0, t - t0])
            if s0 < t0:
                b = _try_cuts(table, s, t, (s + 1, s1), b)
            b = _try_cuts(table, s, t, (max(t0, s + 1), t + 1), b)
            _close(table, s, t, b)


@njit(cache=True, nogil=True)
def fill_tiles(table: Table, distance: int, begin: int, stride: int) -> None:
    """Eq. (2) for the tiles ``begin, begin + stride, …`` of one diagonal of tiles.

    Requires: all diagonals of lesser ``distance`` are filled.
    """
    tiles = -(-table.numbers.backward_s.size // TILE)
    for tile in range(begin, tiles - distance, stride):
        _fill_tile(table, tile * TILE, (tile + distance) * TILE)


@njit(cache=True, nogil=True)
def fill_last(table: Table) -> None:
    """Eq. (2) anew for the intervals that end with the last stage, of which sizes differ.

    Requires: all rows of other intervals, and that of the last stage alone, are filled.
    """
    count = table.numbers.backward_s.size
    t = count - 1
    for s in range(t - 1, -1, -1):
        table.values[row_of(s, t, count)] = np.inf
        begin = _try_all(table, s, t, table.values.shape[1])
        begin = _try_cuts(table, s, t, (s + 1, count), begin)
        _close(table, s, t, begin)


@njit(cache=True, nogil=True)
def choose(table: Table, s: int, t: int, m: int) -> int:
    """The choice behind entry ``m`` of row ``(s, t)``, by comparing the same sums again.

    Returns:
        ``s`` for ``F_all s``, ``-1 - option`` for one of its save options, the cut
        ``s' > s`` for ``F_ck s``. For ``s == t``, ``s + 1`` means the forward alone first,
        then a rebuild. -1 if the entry is infinite.
    """
    n = table.numbers
    values = table.values
    count = n.backward_s.size
    want = values[row_of(s, t, count), m]
    if want == np.inf:
        return -1
    if s == t:
        return _choose_leaf(table, s, m)
    shift = in_slots(n.saved[s], table.quantum)
    if m >= max(shift, in_slots(all_bytes(n, s, t), table.quantum)):
        inner = values[row_of(s + 1, t, count), m - shift]
        if inner + n.backward_s[s] + n.prefix_s[s] - n.prefix_s[s] == want:
            return s
    for k in range(n.option_s.shape[1]):
        shift = in_slots(n.option_saved[s, k], table.quantum)
        if m < max(shift, in_slots(option_bytes(n, s, t, k), table.quantum)):
            continue
        inner = values[row_of(s + 1, t, count), m - shift]
        if inner + n.option_s[s, k] + n.prefix_s[s] - n.prefix_s[s] == want:
            return -2 - k
    for cut in range(s + 1, t + 1):
        shift = table.step_slots[s, cut]
        if m < max(shift, in_slots(ck_bytes(n, s, cut, t), table.quantum)):
            continue
        late = values[row_of(cut, t, count), m - shift]
        if late + values[row_of(s, cut - 1, count), m] - n.prefix_s[s] == want:
            return cut
    return -1


@njit(cache=True, nogil=True)
def _choose_leaf(table: Table, s: int, m: int) -> int:
    n = table.numbers
    want = table.values[row_of(s, s, n.backward_s.size), m]
    for way in range(2):
        fits = m >= in_slots(n.leaf_bytes[s, way], table.quantum)
        if fits and n.leaf_s[s, way] + n.prefix_s[s] == want:
            return s + way
    for k in range(n.option_s.shape[1]):
        fits = m >= in_slots(option_bytes(n, s, s, k), table.quantum)
        if fits and at_once_s(n, s, k) + n.prefix_s[s] == want:
            return -2 - k
    return -1


@njit(cache=True, nogil=True)
def read_out(table: Table, outer: Table, slots: int) -> Ints:
    """The schedule behind an entry of the whole chain, as codes: Algorithm 2.

    Args:
        table: of all intervals.
        outer: of those that end with the last stage.
        slots: free beside boundary 0.

    Returns:
        codes as of ``ir.coded``, with a stack of its own since chains are deeper than one's.
        Nothing if no choice explains the value of some interval.
    """
    last = table.numbers.backward_s.size - 1
    codes = np.empty(8 * last + 8, dtype=np.int64)
    todo = np.empty((2 * last + 4, 3), dtype=np.int64)  # intervals; ``t < s`` is a backward
    todo[0] = np.array([0, last, slots])
    count, waiting = 0, 1
    while waiting:
        waiting -= 1
        s, t, m = todo[waiting]
        if count + last + 4 > codes.size:
            codes = np.append(codes, np.empty(codes.size, dtype=np.int64))
        if t < s:
            codes[count] = s * KINDS + BACKWARD
            count += 1
            continue
        own = outer if t == last else table
        cut = choose(own, s, t, m)
        if cut == -1:
            return codes[:0]
        if cut <= s:
            option = 0 if cut == s else -1 - cut
            codes[count] = s * KINDS + ALL + option
            count += 1
            todo[waiting] = np.array([s, s - 1, 0])
            waiting += 1
            if s < t:
                n = own.numbers
                saved = n.saved[s] if option == 0 else n.option_saved[s, option - 1]
                todo[waiting] = np.array([s + 1, t, m - in_slots(saved, own.quantum)])
                waiting += 1
            continue
        codes[count] = s * KINDS + INPUT
        count += 1
        if s == t:
            codes[count] = s * KINDS + ALL
            codes[count + 1] = s * KINDS + BACKWARD
            count += 2
            continue
        for stage in range(s + 1, cut):
            codes[count] = stage * KINDS + NONE
            count += 1
        todo[waiting] = np.array([s, cut - 1, m])
        todo[waiting + 1] = np.array([cut, t, m - own.step_slots[s, cut]])
        waiting += 2
    return codes[:count]
