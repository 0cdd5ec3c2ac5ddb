"""The loops of the join solver, compiled by numba; the recurrence is in ``general``.

A state is a vector of heads ``p``, a mask ``h`` of the branches whose head a saved set holds,
and the trunk's end ``t``: row ``(number of p * 2**k + h) * T + t`` of the tables.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from fxremat.solvers.join.numbers import JoinNumbers
from fxremat.solvers.kernels import row_of
from fxremat.solvers.numbers import Floats, Ints

KEEP, CUT, TURN, TRUNK = 0, 1, 2, 3
"""Choices: ``F_all`` of a branch's stage, ``F_ck`` and a cut of a branch, ``F_ck`` of every
head and a cut of the trunk, and leaving the rest to the trunk alone."""


class JoinTable(NamedTuple):
    """All ``J(p, h, t, m)``, with ``m`` in slots.

    Attributes:
        numbers: the join.
        quantum: bytes of a slot.
        values: ``(states, slots + 1)``. A row never increases with ``m``.
        branch: ``(rows, slots' + 1)``, rotor's values of every branch's intervals, one
            branch after the other, ``prefix_s`` of their start in it.
        branch_row: ``(k,)``, where those of each branch begin.
        trunk: ``(T (T + 1) / 2, slots' + 1)``, rotor's values of the trunk.
    """

    numbers: JoinNumbers
    quantum: int
    values: Floats
    branch: Floats
    branch_row: Ints
    trunk: Floats


class JoinLeast(NamedTuple):
    """Least memory of every state, in bytes beside the heads and what was held before.

    Attributes:
        numbers: the join.
        memory, seconds: ``(states,)``, and the time of a schedule that needs no more.
        branch_memory, branch_s: ``(k, n, n)``, of the branches' intervals.
        trunk_memory, trunk_s: ``(T, T)``, of the trunk's.
    """

    numbers: JoinNumbers
    memory: Ints
    seconds: Floats
    branch_memory: Ints
    branch_s: Floats
    trunk_memory: Ints
    trunk_s: Floats


@njit(inline="always")
def _up(nbytes: int, quantum: int) -> int:
    return -(-nbytes // quantum)


@njit(inline="always")
def heads_of(n: JoinNumbers, number: int, p: Ints) -> bool:
    """Write the heads with this number into ``p``; returns whether all are at their ends."""
    at_ends = True
    for b in range(n.lengths.size):
        p[b] = number // n.strides[b] % (n.lengths[b] + 1)
        at_ends = at_ends and p[b] == n.lengths[b]
    return at_ends


@njit(inline="always")
def _is_state(n: JoinNumbers, p: Ints, h: int) -> bool:
    """No saved set holds a branch's input."""
    possible = True
    for b in range(n.lengths.size):
        possible = possible and not (p[b] == 0 and h >> b & 1)
    return possible


@njit(inline="always")
def _given_back(n: JoinNumbers, p: Ints, h: int, b: int) -> int:
    """What a backward of branch ``b`` has more than its forward had, in bytes.

    The other branches' heads are gone, unless a saved set holds them; their gradients
    and the trunk's are there instead.
    """
    nbytes = -n.done
    for other in range(n.lengths.size):
        if other != b:
            nbytes -= n.held[other, p[other]]
            if not h >> other & 1:
                nbytes += n.freed[other, p[other]]
    return nbytes


@njit(inline="always")
def _can_turn(n: JoinNumbers, p: Ints, h: int) -> bool:
    """Whether the trunk may consume the ends: none of them is a head that it would take."""
    can = True
    for b in range(n.lengths.size):
        can = can and (p[b] < n.lengths[b] or (h >> b & 1) == 1)
    return can


@njit(cache=True, nogil=True)
def turn_order(n: JoinNumbers, p: Ints) -> Ints:
    """The order of sweeps to the ends with the least peak: most given back first."""
    gain = np.empty(n.lengths.size, dtype=np.int64)
    for b in range(n.lengths.size):
        end = n.lengths[b]
        # At its end nothing is swept; a peak of 0 needs no room at any place.
        gain[b] = -(n.sweep[b, p[b], end] - n.step[b, p[b], end]) if p[b] < end else 0
    return np.argsort(gain, kind="mergesort")


@njit(cache=True, nogil=True)
def _turns(n: JoinNumbers, p: Ints, step: Ints, sweep: Ints) -> float:
    """For every cut ``q`` of the trunk: what it adds to the heads, and the peak until there.

    Returns:
        Seconds of the branches' forwards from the heads to the ends.
    """
    seconds = 0.0
    added = 0
    peak = 0
    for b in turn_order(n, p):
        end = n.lengths[b]
        if p[b] < end:
            peak = max(peak, added + n.sweep[b, p[b], end])
            added += n.step[b, p[b], end]
            seconds += n.prefix_s[b, end] - n.prefix_s[b, p[b]]
    for q in range(n.turn_born.size):
        step[q] = n.turn_born[q]
        for b in range(n.lengths.size):
            step[q] += n.turn_crossed[b, p[b], q]
        if q:
            peak = max(peak, step[q - 1] + n.turn_peak[q - 1])
        sweep[q] = peak
    return seconds


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
    for m in range(begin, middle):
        value = inner[m - shift] + row[m + more]
        out[m] = value if value < out[m] else out[m]
    for m in range(middle, size):
        value = inner[m - shift] + row[last]
        out[m] = value if value < out[m] else out[m]


@njit(cache=True, nogil=True)
def _fill_branch(table: JoinTable, state: tuple[int, int, int], p: Ints, b: int) -> None:
    """Lower the row of a state to the choices that move branch ``b``."""
    n = table.numbers
    number, h, t = state
    masks, turns = 1 << n.lengths.size, n.turn_gradient.size
    values, quantum = table.values, table.quantum
    out = values[(number * masks + h) * turns + t]
    s = p[b]
    more = _given_back(n, p, h, b)
    more_slots = more // quantum
    count = n.lengths[b]

    inner = values[((number + n.strides[b]) * masks + (h | 1 << b)) * turns + t]
    for option in range(n.saved.shape[2]):
        if n.backward_s[b, s, option] == np.inf:
            continue
        shift = _up(n.saved[b, s, option], quantum)
        begin = max(n.turn_gradient[t] + n.keep[b, s, option], n.back[b, s, option] - more)
        takes = n.prefix_s[b, s + 1] - n.prefix_s[b, s] + n.backward_s[b, s, option]
        for m in range(max(shift, _up(begin, quantum)), out.size):
            value = inner[m - shift] + takes
            out[m] = value if value < out[m] else out[m]

    bare = np.empty(table.branch.shape[1])
    for cut in range(s + 1, count + 1):
        inner_number = number + (cut - s) * n.strides[b]
        inner = values[(inner_number * masks + (h & ~(1 << b))) * turns + t]
        takes = n.prefix_s[b, cut] - n.prefix_s[b, s]
        row = table.branch[table.branch_row[b] + row_of(s, cut - 1, count)]
        for m in range(bare.size):
            bare[m] = row[m] - n.prefix_s[b, s] + takes
        begin = _up(n.turn_gradient[t] + n.sweep[b, s, cut], quantum)
        _lower(out, inner, bare, begin, _up(n.step[b, s, cut], quantum), more_slots)


@njit(cache=True, nogil=True)
def _fill_turns(
    table: JoinTable, state: tuple[int, int, int], step: Ints, sweep: Ints, ends_s: float
) -> None:
    """Lower the row of a state to the choices that keep all heads and cut the trunk."""
    n = table.numbers
    number, h, t = state
    turns, quantum = n.turn_gradient.size, table.quantum
    first = (number * (1 << n.lengths.size) + h) * turns
    out = table.values[first + t]
    bare = np.empty(table.trunk.shape[1])
    for q in range(1, t + 1):
        row = table.trunk[row_of(q, t, turns)]
        for m in range(bare.size):
            bare[m] = row[m] - n.turn_s[q] + (n.turn_s[q] + ends_s)
        begin = max(_up(n.turn_gradient[t] + sweep[q], quantum), _up(step[q], quantum))
        early = table.values[first + q - 1]
        shift = _up(step[q], quantum)
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
        ends_s = _turns(n, p, step, sweep)
        for h in range(masks):
            if not _is_state(n, p, h):
                continue
            for t in range(turns):
                if at_ends:
                    row = table.trunk[row_of(0, t, turns)]
                    out = table.values[(number * masks + h) * turns + t]
                    out[:] = row[: out.size]
                    continue
                for b in range(n.lengths.size):
                    if p[b] < n.lengths[b]:
                        _fill_branch(table, (number, h, t), p, b)
                if t and _can_turn(n, p, h):
                    _fill_turns(table, (number, h, t), step, sweep, ends_s)


@njit(inline="always")
def _keep_needs(least: JoinLeast, state: tuple[int, int, int], p: Ints, b: int, k: int) -> int:
    n = least.numbers
    number, h, t = state
    masks, turns = 1 << n.lengths.size, n.turn_gradient.size
    s = p[b]
    inner = ((number + n.strides[b]) * masks + (h | 1 << b)) * turns + t
    needs = max(n.turn_gradient[t] + n.keep[b, s, k], n.saved[b, s, k] + least.memory[inner])
    nbytes: int = max(needs, n.back[b, s, k] - _given_back(n, p, h, b))
    return nbytes


@njit(inline="always")
def _keep_s(least: JoinLeast, state: tuple[int, int, int], p: Ints, b: int, k: int) -> float:
    n = least.numbers
    number, h, t = state
    masks, turns = 1 << n.lengths.size, n.turn_gradient.size
    s = p[b]
    inner = ((number + n.strides[b]) * masks + (h | 1 << b)) * turns + t
    forward_s = n.prefix_s[b, s + 1] - n.prefix_s[b, s]
    seconds: float = forward_s + least.seconds[inner] + n.backward_s[b, s, k]
    return seconds


@njit(inline="always")
def _cut_needs(least: JoinLeast, state: tuple[int, int, int], p: Ints, b: int, cut: int) -> int:
    n = least.numbers
    number, h, t = state
    masks, turns = 1 << n.lengths.size, n.turn_gradient.size
    s = p[b]
    inner = ((number + (cut - s) * n.strides[b]) * masks + (h & ~(1 << b))) * turns + t
    needs = max(n.turn_gradient[t] + n.sweep[b, s, cut], n.step[b, s, cut] + least.memory[inner])
    segment = least.branch_memory[b, s, cut - 1] - _given_back(n, p, h, b)
    nbytes: int = max(needs, segment)
    return nbytes


@njit(inline="always")
def _cut_s(least: JoinLeast, state: tuple[int, int, int], p: Ints, b: int, cut: int) -> float:
    n = least.numbers
    number, h, t = state
    masks, turns = 1 << n.lengths.size, n.turn_gradient.size
    s = p[b]
    inner = ((number + (cut - s) * n.strides[b]) * masks + (h & ~(1 << b))) * turns + t
    forward_s = n.prefix_s[b, cut] - n.prefix_s[b, s]
    seconds: float = forward_s + least.seconds[inner] + least.branch_s[b, s, cut - 1]
    return seconds


@njit(cache=True, nogil=True)
def choose_least(
    least: JoinLeast, state: tuple[int, int, int], available: int
) -> tuple[int, int, int, int, float]:
    """Of the choices that need at most ``available`` bytes, the one with the least seconds.

    With ``available < 0``: the one that needs least, and among these the fastest.

    Returns:
        Choice, branch, cut or save option, bytes, seconds; choice -1 if there is none.
    """
    n = least.numbers
    number, h, t = state
    masks, turns = 1 << n.lengths.size, n.turn_gradient.size
    p = np.empty(n.lengths.size, dtype=np.int64)
    best = (-1, 0, 0, available, np.inf)
    limit = available if available >= 0 else 1 << 62
    tightens = available < 0
    if heads_of(n, number, p):
        needs = least.trunk_memory[0, t]
        seconds = least.trunk_s[0, t]
        return (TRUNK, 0, 0, needs, seconds) if needs <= limit else best
    for b in range(n.lengths.size):
        if p[b] == n.lengths[b]:
            continue
        for option in range(n.saved.shape[2]):
            needs = _keep_needs(least, state, p, b, option)
            seconds = _keep_s(least, state, p, b, option)
            if seconds == np.inf:
                continue
            if (needs < limit and tightens) or (needs <= limit and seconds < best[4]):
                best = (KEEP, b, option, needs, seconds)
                limit = needs if tightens else limit
        for cut in range(p[b] + 1, n.lengths[b] + 1):
            needs = _cut_needs(least, state, p, b, cut)
            seconds = _cut_s(least, state, p, b, cut)
            if (needs < limit and tightens) or (needs <= limit and seconds < best[4]):
                best = (CUT, b, cut, needs, seconds)
                limit = needs if tightens else limit
    if t and _can_turn(n, p, h):
        step = np.empty(turns + 1, dtype=np.int64)
        sweep = np.empty(turns + 1, dtype=np.int64)
        ends_s = _turns(n, p, step, sweep)
        for q in range(1, t + 1):
            early = (number * masks + h) * turns + q - 1
            needs = max(step[q] + least.trunk_memory[q, t], least.memory[early])
            needs = max(needs, n.turn_gradient[t] + sweep[q])
            seconds = ends_s + n.turn_s[q] + least.trunk_s[q, t] + least.seconds[early]
            if (needs < limit and tightens) or (needs <= limit and seconds < best[4]):
                best = (TURN, 0, q, needs, seconds)
                limit = needs if tightens else limit
    return best


@njit(cache=True, nogil=True)
def fill_least(least: JoinLeast) -> None:
    """Least memory of every state, and the seconds of a schedule that needs no more."""
    n = least.numbers
    masks, turns = 1 << n.lengths.size, n.turn_gradient.size
    p = np.empty(n.lengths.size, dtype=np.int64)
    for number in range(n.heads - 1, -1, -1):
        heads_of(n, number, p)
        for h in range(masks):
            if not _is_state(n, p, h):
                continue
            for t in range(turns):
                best = choose_least(least, (number, h, t), -1)
                least.memory[(number * masks + h) * turns + t] = best[3]
                least.seconds[(number * masks + h) * turns + t] = best[4]


@njit(cache=True, nogil=True)
def choose(table: JoinTable, state: tuple[int, int, int], m: int) -> tuple[int, int, int]:
    """The choice behind entry ``m`` of a state's row, by comparing the same sums again.

    Returns:
        Choice, branch, cut or save option; choice -1 if the entry is infinite.
    """
    n = table.numbers
    number, h, t = state
    masks, turns = 1 << n.lengths.size, n.turn_gradient.size
    values, quantum = table.values, table.quantum
    want = values[(number * masks + h) * turns + t, m]
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
        more = _given_back(n, p, h, b)
        for option in range(n.saved.shape[2]):
            shift = _up(n.saved[b, s, option], quantum)
            begin = max(n.turn_gradient[t] + n.keep[b, s, option], n.back[b, s, option] - more)
            if m < max(shift, _up(begin, quantum)):
                continue
            inner = ((number + n.strides[b]) * masks + (h | 1 << b)) * turns + t
            takes = n.prefix_s[b, s + 1] - n.prefix_s[b, s] + n.backward_s[b, s, option]
            if values[inner, m - shift] + takes == want:
                return KEEP, b, option
        for cut in range(s + 1, n.lengths[b] + 1):
            shift = _up(n.step[b, s, cut], quantum)
            at = min(last, m + more // quantum)
            begin = _up(n.turn_gradient[t] + n.sweep[b, s, cut], quantum)
            if m < max(shift, begin) or at < 0:
                continue
            inner_number = number + (cut - s) * n.strides[b]
            inner = (inner_number * masks + (h & ~(1 << b))) * turns + t
            takes = n.prefix_s[b, cut] - n.prefix_s[b, s]
            row = table.branch_row[b] + row_of(s, cut - 1, n.lengths[b])
            bare = table.branch[row, at] - n.prefix_s[b, s] + takes
            if values[inner, m - shift] + bare == want:
                return CUT, b, cut
    step = np.empty(turns + 1, dtype=np.int64)
    sweep = np.empty(turns + 1, dtype=np.int64)
    ends_s = _turns(n, p, step, sweep)
    first = (number * masks + h) * turns
    for q in range(1, t + 1):
        shift = _up(step[q], quantum)
        if m < max(_up(n.turn_gradient[t] + sweep[q], quantum), shift) or not _can_turn(n, p, h):
            continue
        row = row_of(q, t, turns)
        bare = table.trunk[row, m - shift] - n.turn_s[q] + (n.turn_s[q] + ends_s)
        if values[first + q - 1, m] + bare == want:
            return TURN, 0, q
    return -1, 0, 0
