"""The tables of the join solver, compiled by numba; the recurrence is in ``general``."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from fxremat.solvers.join.numbers import JoinNumbers
from fxremat.solvers.join.states import (
    CUT,
    KEEP,
    TRUNK,
    TURN,
    after_cut,
    after_keep,
    can_turn,
    given_back,
    heads_of,
    is_state,
    state_row,
    turn_costs,
    up,
)
from fxremat.solvers.kernels import lower, row_of
from fxremat.solvers.numbers import Floats, Ints


class JoinTable(NamedTuple):
    """All ``J(p, h, t, m)``, with ``m`` in slots.

    Attributes:
        numbers: the join.
        quantum: bytes of a slot.
        values: ``(states, slots + 1)``. A row never increases with ``m``.
        branch: ``(rows, slots' + 1)``, rotor's values of every branch's intervals, one
            branch after the other, and the time of running the interval forward before.
        branch_row: ``(k,)``, where those of each branch begin.
        trunk: ``(T (T + 1) / 2, slots' + 1)``, rotor's values of the trunk.
    """

    numbers: JoinNumbers
    quantum: int
    values: Floats
    branch: Floats
    branch_row: Ints
    trunk: Floats


@njit(inline="always")
def _lower(out: Floats, inner: Floats, row: Floats, begin: int, shift: int, more: int) -> None:
    """Lower ``out[m]`` to ``inner[m - shift] + row[m + more]`` for ``m >= begin``."""
    size = out.size
    begin = max(begin, shift, -more)
    if begin >= size:
        return
    last = row.size - 1
    if out[begin] <= inner[size - 1 - shift] + row[min(last, size - 1 + more)]:
        return  # rows never increase: no entry would be lower
    middle = max(begin, min(size, row.size - more))
    if begin < middle:
        late, early = inner[begin - shift : middle - shift], row[begin + more : middle + more]
        lower(out[begin:middle], late, early, late[-1] + early[-1])
    for m in range(middle, size):
        value = inner[m - shift] + row[last]
        out[m] = value if value < out[m] else out[m]


@njit(cache=True, nogil=True)
def _fill_branch(table: JoinTable, state: tuple[int, int, int], p: Ints, b: int) -> None:
    """Lower the row of a state to the choices that move branch ``b``."""
    n = table.numbers
    number, h, t = state
    values, quantum = table.values, table.quantum
    out = values[state_row(n, number, h, t)]
    s = p[b]
    more = given_back(n, p, h, b)
    more_slots = more // quantum
    count = n.lengths[b]

    inner = values[after_keep(n, state, b)]
    for option in range(n.saved.shape[2]):
        if n.backward_s[b, s, option] == np.inf:
            continue
        shift = up(n.saved[b, s, option], quantum)
        begin = max(n.turn_gradient[t] + n.keep[b, s, option], n.back[b, s, option] - more)
        takes = n.prefix_s[b, s + 1] - n.prefix_s[b, s] + n.backward_s[b, s, option]
        for m in range(max(shift, up(begin, quantum)), out.size):
            value = inner[m - shift] + takes
            out[m] = value if value < out[m] else out[m]

    for cut in range(s + 1, count + 1):
        inner = values[after_cut(n, state, b, cut - s)]
        row = table.branch[table.branch_row[b] + row_of(s, cut - 1, count)]
        begin = up(n.turn_gradient[t] + n.sweep[b, s, cut], quantum)
        _lower(out, inner, row, begin, up(n.step[b, s, cut], quantum), more_slots)


@njit(cache=True, nogil=True)
def _fill_turns(
    table: JoinTable, state: tuple[int, int, int], step: Ints, sweep: Ints, ends_s: float
) -> None:
    """Lower the row of a state to the choices that keep all heads and cut the trunk."""
    n = table.numbers
    number, h, t = state
    turns, quantum = n.turn_gradient.size, table.quantum
    first = state_row(n, number, h, 0)
    out = table.values[first + t]
    bare = np.empty(table.trunk.shape[1])
    for q in range(1, t + 1):
        row = table.trunk[row_of(q, t, turns)]
        for m in range(bare.size):
            bare[m] = row[m] - n.turn_s[q] + (n.turn_s[q] + ends_s)
        begin = max(up(n.turn_gradient[t] + sweep[q], quantum), up(step[q], quantum))
        early = table.values[first + q - 1]
        shift = up(step[q], quantum)
        for m in range(begin, out.size):
            value = early[m] + bare[m - shift]
            out[m] = value if value < out[m] else out[m]


@njit(cache=True, nogil=True)
def fill(table: JoinTable) -> None:
    """All ``J(p, h, t, m)``, from the ends of the branches back to their inputs."""
    n = table.numbers
    masks, turns = 1 << n.lengths.size, n.turn_gradient.size
    p = np.empty(n.lengths.size, dtype=np.int64)
    step = np.empty(turns + 1, dtype=np.int64)
    sweep = np.empty(turns + 1, dtype=np.int64)
    table.values[:] = np.inf
    for number in range(n.heads - 1, -1, -1):
        at_ends = heads_of(n, number, p)
        ends_s = turn_costs(n, p, step, sweep)
        for h in range(masks):
            if not is_state(n, p, h):
                continue
            for t in range(turns):
                if at_ends:
                    row = table.trunk[row_of(0, t, turns)]
                    out = table.values[state_row(n, number, h, t)]
                    out[:] = row[: out.size]
                    continue
                for b in range(n.lengths.size):
                    if p[b] < n.lengths[b]:
                        _fill_branch(table, (number, h, t), p, b)
                if t and can_turn(n, p, h):
                    _fill_turns(table, (number, h, t), step, sweep, ends_s)


@njit(cache=True, nogil=True)
def choose(table: JoinTable, state: tuple[int, int, int], m: int) -> tuple[int, int, int]:
    """The choice behind entry ``m`` of a state's row, by comparing the same sums again.

    Returns:
        Choice, branch, cut or save option; choice -1 if the entry is infinite.
    """
    n = table.numbers
    number, h, t = state
    turns = n.turn_gradient.size
    values, quantum = table.values, table.quantum
    want = values[state_row(n, number, h, t), m]
    p = np.empty(n.lengths.size, dtype=np.int64)
    if want == np.inf:
        return -1, 0, 0
    if heads_of(n, number, p):
        return TRUNK, 0, 0
    last = table.branch.shape[1] - 1
    for b in range(n.lengths.size):
        s = p[b]
        if s == n.lengths[b]:
            continue
        more = given_back(n, p, h, b)
        for option in range(n.saved.shape[2]):
            shift = up(n.saved[b, s, option], quantum)
            begin = max(n.turn_gradient[t] + n.keep[b, s, option], n.back[b, s, option] - more)
            if m < max(shift, up(begin, quantum)):
                continue
            inner = after_keep(n, state, b)
            takes = n.prefix_s[b, s + 1] - n.prefix_s[b, s] + n.backward_s[b, s, option]
            if values[inner, m - shift] + takes == want:
                return KEEP, b, option
        for cut in range(s + 1, n.lengths[b] + 1):
            shift = up(n.step[b, s, cut], quantum)
            at = min(last, m + more // quantum)
            begin = up(n.turn_gradient[t] + n.sweep[b, s, cut], quantum)
            if m < max(shift, begin) or at < 0:
                continue
            inner = after_cut(n, state, b, cut - s)
            row = table.branch_row[b] + row_of(s, cut - 1, n.lengths[b])
            if values[inner, m - shift] + table.branch[row, at] == want:
                return CUT, b, cut
    step = np.empty(turns + 1, dtype=np.int64)
    sweep = np.empty(turns + 1, dtype=np.int64)
    ends_s = turn_costs(n, p, step, sweep)
    first = state_row(n, number, h, 0)
    for q in range(1, t + 1):
        shift = up(step[q], quantum)
        if m < max(up(n.turn_gradient[t] + sweep[q], quantum), shift) or not can_turn(n, p, h):
            continue
        row = row_of(q, t, turns)
        bare = table.trunk[row, m - shift] - n.turn_s[q] + (n.turn_s[q] + ends_s)
        if values[first + q - 1, m] + bare == want:
            return TURN, 0, q
    return -1, 0, 0
