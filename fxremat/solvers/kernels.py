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
from fxremat.jit import entry, helper, pointer
from fxremat.solvers.numbers import Floats, Ints, Numbers
from fxremat.solvers.quantize import slots_up
from fxremat.solvers.threads import Crew

TILE = 16
"""Intervals of ``TILE`` starts and ``TILE`` ends are computed together, for the cache."""

BLOCK = 32
"""Number of entries of a row that are lowered, or skipped, at once."""

NO_CHOICE = -1
"""The choice of an interval that nothing fits."""

in_slots = helper(slots_up)


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
    values, first = np.full((rows, slots + 1), np.inf), np.full(rows, slots + 1)
    table = Table(numbers, quantum, values, first)
    for s in range(count):
        _fill_leaf(table, s)
    tiles = -(-count // TILE)
    with Crew(most=tiles) as crew:
        for distance in range(tiles):
            share = min(crew.size, tiles - distance)
            crew.run([partial(_fill_tiles, table, distance, k, share) for k in range(share)])
    return table


def last_filled(table: Table, numbers: Numbers) -> Table:
    """Return a copy of ``table`` with intervals up to the last stage refilled by ``numbers``."""
    copy = table._replace(numbers=numbers, values=table.values.copy(), first=table.first.copy())
    _refill_last(copy)
    return copy


def _fill_leaf(table: Table, s: int) -> None:
    """Fill the row of the single stage ``s`` with its seconds for every number of free slots.

    By Equation (1) of Beaumont et al. (2019).
    """
    n = table.numbers
    row = row_of.py_func(s, s, n.gradient.size)  # type: ignore[attr-defined]
    values = table.values[row]
    for needs, takes in zip(n.leaf_bytes[s].tolist(), n.leaf_s[s].tolist(), strict=True):
        if takes < np.inf:
            start = slots_up(needs, table.quantum)
            np.minimum(values[start:], takes + n.prefix_s[s], out=values[start:])
            table.first[row] = min(table.first[row], start)


@helper
def row_of(s: int, t: int, count: int) -> int:
    """Return the index of the row of stages ``s … t`` in a table of a chain of ``count`` stages."""
    return s * count - s * (s - 1) // 2 + t - s


@helper
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


@helper
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


@helper
def _try_all(table: Table, s: int, t: int) -> None:
    """Lower the entries of stages ``s … t`` to choices in which stage ``s`` keeps its saved set."""
    n, first, quantum = table.numbers, table.first, table.quantum
    count, end = n.gradient.size, table.values.shape[1]
    row, inner = row_of(s, t, count), row_of(s + 1, t, count)
    for k in range(n.backward_s.shape[1]):
        if n.backward_s[s, k] == np.inf:
            continue
        shift = in_slots(n.saved[s, k], quantum)
        start = max(in_slots(all_bytes(n, s, t, k), quantum), shift + first[inner])
        out, late = pointer(table.values, row * end), pointer(table.values, inner * end)
        backward_s, prefix_s = n.backward_s[s, k], n.prefix_s[s]
        for m in range(start, end):
            value = late[m - shift] + backward_s + prefix_s
            out[m] = value if value < out[m] else out[m]
        first[row] = min(first[row], start)


@helper
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


@helper
def lower(out: Floats, late: Floats, early: Floats, size: int, bound: float) -> None:
    """Lower entries of ``out`` to ``late + early`` where that is less.

    Args:
        out, late, early: pointers to rows of ``size`` entries that never increase.
        size: their number.
        bound: lower bound of all sums; entries that are no greater are skipped.
    """
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


@helper
def _try_cuts(table: Table, s: int, t: int, from_cut: int, to_cut: int) -> None:
    """Lower the entries of stages ``s … t`` to choices that keep boundary ``s`` and run to a cut.

    The cuts are ``from_cut … to_cut - 1``.
    """
    n, first, quantum = table.numbers, table.first, table.quantum
    count, end = n.gradient.size, table.values.shape[1]
    values, row = pointer(table.values, 0), row_of(s, t, count)
    for cut in range(from_cut, to_cut):
        late, early = row_of(cut, t, count), row_of(s, cut - 1, count)
        shift = in_slots(n.step[s, cut], quantum)
        start = max(shift + first[late], first[early])
        if start >= end:
            continue
        bound = values[late * end + end - 1 - shift] + values[early * end + end - 1]
        if values[row * end + start] <= bound:
            continue
        start = max(start, in_slots(ck_bytes(n, s, cut, t), quantum))
        if start >= end:
            continue
        first[row] = min(first[row], start)
        lower(
            pointer(table.values, row * end + start),
            pointer(table.values, late * end + start - shift),
            pointer(table.values, early * end + start),
            end - start,
            bound,
        )


@entry
def _fill_tile(table: Table, s0: int, t0: int) -> None:
    """Fill the rows of intervals with first stage in the tile at ``s0`` and last in that at ``t0``.

    Cuts in tiles strictly between come first, one tile of cuts at a time: all rows of this tile
    then read the same rows from the cache. Cuts in the two tiles at the ends read rows of this tile
    itself, and are computed row by row.

    Requires:
        All tiles between, and the rows of single stages, are filled.
    """
    count, end = table.numbers.gradient.size, table.values.shape[1]
    s1, t1 = min(s0 + TILE, count), min(t0 + TILE, count)
    for cut in range(s0 + TILE, t0, TILE):
        for t in range(t0, t1):
            for s in range(s0, s1):
                _try_cuts(table, s, t, cut, cut + TILE)
    for s in range(s1 - 1, s0 - 1, -1):
        for t in range(max(t0, s + 1), t1):
            _try_all(table, s, t)
            _try_cuts(table, s, t, s + 1, s1 if s0 < t0 else s + 1)
            _try_cuts(table, s, t, max(t0, s + 1), t + 1)
            row, prefix_s = row_of(s, t, count), table.numbers.prefix_s[s]
            values = pointer(table.values, row * end)
            for m in range(table.first[row], end):
                values[m] -= prefix_s


@entry
def _refill_last(table: Table) -> None:
    """Fill the rows of intervals up to the last stage, but for that of this stage."""
    count, end = table.numbers.gradient.size, table.values.shape[1]
    for s in range(count - 2, -1, -1):
        row = row_of(s, count - 1, count)
        values = pointer(table.values, row * end)
        table.first[row] = end
        for m in range(end):
            values[m] = np.inf
        _try_all(table, s, count - 1)
        _try_cuts(table, s, count - 1, s + 1, count)
        for m in range(table.first[row], end):
            values[m] -= table.numbers.prefix_s[s]


def _fill_tiles(table: Table, distance: int, begin: int, stride: int) -> None:
    """Fill tiles ``begin, begin + stride, …`` of the diagonal of tiles at ``distance``.

    By Equation (2) of Beaumont et al. (2019), see ``rotor``.

    Requires:
        All diagonals of smaller ``distance`` are filled.
    """
    tiles = slots_up(table.numbers.gradient.size, TILE)
    for tile in range(begin, tiles - distance, stride):
        _fill_tile(table, tile * TILE, (tile + distance) * TILE)


@entry
def choose(table: Table, s: int, t: int, m: int) -> int:
    """Return the choice that takes as long as entry ``m`` of stages ``s … t`` says.

    The sums are computed again. Choices are numbered as in the module; ``NO_CHOICE`` is none.
    """
    n, quantum = table.numbers, table.quantum
    count, end = n.gradient.size, table.values.shape[1]
    values, prefix_s = pointer(table.values, m), n.prefix_s[s]
    want = values[row_of(s, t, count) * end]
    if want == np.inf:
        return NO_CHOICE
    if s == t:
        for way in range(n.leaf_s.shape[1]):
            if m >= in_slots(n.leaf_bytes[s, way], quantum) and n.leaf_s[s, way] + prefix_s == want:
                return leaf_choice(s, way)
        return NO_CHOICE
    for k in range(n.backward_s.shape[1]):
        shift = in_slots(n.saved[s, k], quantum)
        if m < max(shift, in_slots(all_bytes(n, s, t, k), quantum)):
            continue
        inner = values[row_of(s + 1, t, count) * end - shift]
        if inner + n.backward_s[s, k] + prefix_s - prefix_s == want:
            return -1 - k if k else s
    for cut in range(s + 1, t + 1):
        shift = in_slots(n.step[s, cut], quantum)
        if m < max(shift, in_slots(ck_bytes(n, s, cut, t), quantum)):
            continue
        late = values[row_of(cut, t, count) * end - shift]
        if late + values[row_of(s, cut - 1, count) * end] - prefix_s == want:
            return cut
    return NO_CHOICE


@helper
def leaf_choice(s: int, way: int) -> int:
    """Return the choice, numbered as in the module, of a column of ``Numbers.leaf_s``."""
    return s + way if way < 2 else -way


def read_out(table: Table, outer: Table, slots: int) -> Ints:
    """Return the fastest schedule of the whole chain by Algorithm 2 of Beaumont et al. (2019).

    Args:
        table: the table of all intervals.
        outer: the table of the intervals that end with the last stage.
        slots: number of free slots, in addition to boundary 0.

    Returns:
        Codes as in ``ir.schedule``; empty if no choice gives the value of some interval.
    """
    count = table.numbers.gradient.size
    codes = np.empty(count * (count + 5) // 2, dtype=np.int64)  # most are never written to
    todo = np.empty(3 * (2 * count + 2), dtype=np.int64)
    return codes[: _read_out(table, outer, slots, codes, todo)].copy()


@entry
def _read_out(table: Table, outer: Table, slots: int, codes: Ints, todo: Ints) -> int:
    """Write the codes of :func:`read_out`, and return their number.

    ``todo`` is a buffer for intervals and their slots; an interval with ``t < s`` is a backward.
    """
    codes, todo = pointer(codes, 0), pointer(todo, 0)
    last = table.numbers.gradient.size - 1
    size, waiting = 0, _push(todo, 0, 0, last, slots)
    while waiting:
        waiting -= 3
        s, t, m = todo[waiting], todo[waiting + 1], todo[waiting + 2]
        if t < s:
            codes[size] = s * KINDS + BACKWARD
            size += 1
            continue
        choice, left = _take(outer, s, t, m) if t == last else _take(table, s, t, m)
        if choice == NO_CHOICE:
            return 0
        if choice <= s:
            codes[size] = s * KINDS + ALL + (0 if choice == s else -1 - choice)
            size += 1
            waiting = _push(todo, waiting, s, s - 1, 0)
            if s < t:
                waiting = _push(todo, waiting, s + 1, t, left)
            continue
        codes[size] = s * KINDS + INPUT
        size += 1
        if s == t:
            codes[size], codes[size + 1] = s * KINDS + ALL, s * KINDS + BACKWARD
            size += 2
            continue
        for stage in range(s + 1, choice):
            codes[size] = stage * KINDS + NONE
            size += 1
        waiting = _push(todo, waiting, s, choice - 1, m)
        waiting = _push(todo, waiting, choice, t, left)
    return size


@helper
def _push(todo: Ints, waiting: int, s: int, t: int, m: int) -> int:
    """Add an interval and its slots to ``todo``, and return the number of entries."""
    todo[waiting], todo[waiting + 1], todo[waiting + 2] = s, t, m
    return waiting + 3


@helper
def _take(table: Table, s: int, t: int, m: int) -> tuple[int, int]:
    """Return the choice for stages ``s … t``, and the slots that it leaves for later stages."""
    n, choice = table.numbers, choose(table, s, t, m)
    if s < choice <= t:
        return choice, m - in_slots(n.step[s, choice], table.quantum)
    if choice > t:
        return choice, m
    option = 0 if choice == s else -1 - choice
    return choice, m - in_slots(n.saved[s, option], table.quantum)
