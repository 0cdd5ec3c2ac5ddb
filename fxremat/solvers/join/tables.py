"""The tables of a join, in slots and in bytes, compiled by numba; the recurrence is in ``general``.

A state is a vector of heads ``p`` by its number, a mask ``h`` of the branches whose head a
saved set holds, and the trunk's end ``t``. All that can be done in it is listed in one place
(``list_choices``), for the table in slots, for the way back through it and for the least memory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fxremat.jit import njit
from fxremat.solvers.join.numbers import JoinNumbers
from fxremat.solvers.kernels import in_slots, lower, row_of
from fxremat.solvers.least import ANY_BYTES, is_better
from fxremat.solvers.numbers import Floats, Ints

KEEP, CUT, TURN, TRUNK = range(4)
"""Kinds of choices: ``F_all`` of a branch's stage; ``F_ck`` and a cut of a branch; ``F_ck`` of
every head and a cut of the trunk; leaving the rest to the trunk alone."""

KIND, BRANCH, CUT_AT, NEEDS, STATE, STATE_BYTES, SEGMENT, SEGMENT_BYTES = range(8)
"""Integers of a choice: kind; branch; cut or save option; peak of its own operations; the row of
the state that follows, -1 for none, and by how much less it has; the interval of a line that runs
beside (see ``JoinNumbers.line_row``), -1 for none, and by how much less that has (or more)."""

AHEAD_S, BEHIND_S = range(2)
"""Seconds of a choice: of its own forwards, and of its own backward."""

State = tuple[int, int, int]


class Choices(NamedTuple):
    """Room for the choices of a state: ``(most, 8)`` integers and ``(most, 2)`` seconds."""

    sizes: Ints
    seconds: Floats

    @staticmethod
    def room(n: JoinNumbers) -> Choices:
        """As much as a state can want."""
        most = n.lengths.size * (n.saved.shape[2] + n.step.shape[2]) + n.turn_born.size
        return Choices(np.empty((most, 8), dtype=np.int64), np.empty((most, 2)))


class JoinTable(NamedTuple):
    """All ``J(p, h, t, m)``, with ``m`` in slots.

    Attributes:
        numbers: the join.
        quantum: bytes of a slot.
        values: ``(states, slots + 1)``. A row never increases with ``m``.
        segments: ``(rows, slots' + 1)``, rotor's values of the intervals of all lines. Those of
            branches have the time of running the interval forward before, too.
    """

    numbers: JoinNumbers
    quantum: int
    values: Floats
    segments: Floats


class JoinLeast(NamedTuple):
    """Least memory of every state, in bytes beside the heads and what was held before.

    Attributes:
        numbers: the join.
        memory, seconds: ``(states,)``, and the time of a schedule that needs no more.
        segment_memory, segment_s: ``(rows,)``, of the intervals of all lines.
    """

    numbers: JoinNumbers
    memory: Ints
    seconds: Floats
    segment_memory: Ints
    segment_s: Floats


@njit(inline="always")
def _heads_of(n: JoinNumbers, number: int, p: Ints) -> bool:
    """Write the heads with this number into ``p``; returns whether all are at their ends."""
    at_ends = True
    for b in range(n.lengths.size):
        p[b] = number // n.strides[b] % (n.lengths[b] + 1)
        at_ends = at_ends and p[b] == n.lengths[b]
    return at_ends


@njit(inline="always")
def _state_row(n: JoinNumbers, state: State) -> int:
    """Which row of the tables is a state's."""
    number, h, t = state
    row: int = (number * (1 << n.lengths.size) + h) * n.turn_gradient.size + t
    return row


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


@njit(inline="always")
def _set(
    into: Choices,
    i: int,
    what: tuple[int, int, int],
    needs: int,
    then: tuple[int, int],
    beside: tuple[int, int],
    takes: tuple[float, float],
) -> int:
    """Write choice ``i``; the next one's index."""
    sizes = into.sizes[i]
    sizes[KIND], sizes[BRANCH], sizes[CUT_AT] = what
    sizes[NEEDS] = needs
    sizes[STATE], sizes[STATE_BYTES] = then
    sizes[SEGMENT], sizes[SEGMENT_BYTES] = beside
    into.seconds[i, AHEAD_S], into.seconds[i, BEHIND_S] = takes
    return i + 1


@njit(cache=True, nogil=True)
def list_choices(n: JoinNumbers, state: State, into: Choices) -> int:
    """Write all choices of a state; returns how many there are."""
    number, h, t = state
    p = np.empty(n.lengths.size, dtype=np.int64)
    gradient, trunk = n.turn_gradient[t], n.line_row[n.lengths.size]
    if _heads_of(n, number, p):
        beside = trunk + row_of(0, t, n.turn_gradient.size), 0
        return _set(into, 0, (TRUNK, 0, 0), 0, (-1, 0), beside, (0.0, 0.0))
    count = 0
    for b in range(n.lengths.size):
        s, length = p[b], n.lengths[b]
        if s == length:
            continue
        more = _given_back(n, p, h, b)
        after = _state_row(n, (number + n.strides[b], h | 1 << b, t))
        forward_s = n.prefix_s[b, s + 1] - n.prefix_s[b, s]
        for k in range(n.saved.shape[2]):
            if n.backward_s[b, s, k] < np.inf:
                needs = max(gradient + n.keep[b, s, k], n.back[b, s, k] - more)
                takes = forward_s, n.backward_s[b, s, k]
                then = after, n.saved[b, s, k]
                count = _set(into, count, (KEEP, b, k), needs, then, (-1, 0), takes)
        for cut in range(s + 1, length + 1):
            after = _state_row(n, (number + (cut - s) * n.strides[b], h & ~(1 << b), t))
            beside = n.line_row[b] + row_of(s, cut - 1, length), -more
            takes = n.prefix_s[b, cut] - n.prefix_s[b, s], 0.0
            then, needs = (after, n.step[b, s, cut]), gradient + n.sweep[b, s, cut]
            count = _set(into, count, (CUT, b, cut), needs, then, beside, takes)
    return _list_turns(n, state, p, into, count) if t and _can_turn(n, p, h) else count


@njit(cache=True, nogil=True)
def _list_turns(n: JoinNumbers, state: State, p: Ints, into: Choices, count: int) -> int:
    """Add the choices that keep all heads and cut the trunk."""
    number, h, t = state
    ends_s, added, peak = 0.0, 0, 0
    for b in turn_order(n, p):
        end = n.lengths[b]
        if p[b] < end:
            peak = max(peak, added + n.sweep[b, p[b], end])
            added += n.step[b, p[b], end]
            ends_s += n.prefix_s[b, end] - n.prefix_s[b, p[b]]
    step = 0
    for q in range(t + 1):
        if q:
            peak = max(peak, step + n.turn_peak[q - 1])
        step = n.turn_born[q]
        for b in range(n.lengths.size):
            step += n.turn_crossed[b, p[b], q]
        if q:
            row = n.line_row[n.lengths.size] + row_of(q, t, n.turn_gradient.size)
            needs, takes = n.turn_gradient[t] + peak, (ends_s + n.turn_s[q], 0.0)
            then = _state_row(n, (number, h, q - 1)), 0
            count = _set(into, count, (TURN, 0, q), needs, then, (row, step), takes)
    return count


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
def _fill_state(table: JoinTable, state: State, choices: Choices) -> None:
    """The row of a state, from those of the states that follow."""
    n, quantum = table.numbers, table.quantum
    out = table.values[_state_row(n, state)]
    for i in range(list_choices(n, state, choices)):
        c = choices.sizes[i]
        ahead_s = choices.seconds[i, AHEAD_S]
        row, inner = table.segments[c[SEGMENT]], table.values[c[STATE]]
        begin, shift = in_slots(c[NEEDS], quantum), in_slots(c[STATE_BYTES], quantum)
        if c[KIND] == TRUNK:
            out[:] = row[: out.size]
        elif c[KIND] == KEEP:
            takes = ahead_s + choices.seconds[i, BEHIND_S]
            for m in range(max(begin, shift), out.size):
                value = inner[m - shift] + takes
                out[m] = value if value < out[m] else out[m]
        else:
            if c[KIND] == TURN:
                row = row - n.turn_s[c[CUT_AT]] + ahead_s
            _lower(out, inner, row, begin, shift, -in_slots(c[SEGMENT_BYTES], quantum))


@njit(cache=True, nogil=True)
def fill(table: JoinTable, choices: Choices) -> None:
    """All ``J(p, h, t, m)``, from the ends of the branches back to their inputs."""
    n = table.numbers
    p = np.empty(n.lengths.size, dtype=np.int64)
    table.values[:] = np.inf
    for number in range(n.heads - 1, -1, -1):
        _heads_of(n, number, p)
        for h in range(1 << n.lengths.size):
            if _is_state(n, p, h):
                for t in range(n.turn_gradient.size):
                    _fill_state(table, (number, h, t), choices)


@njit(cache=True, nogil=True)
def choose(table: JoinTable, state: State, m: int, choices: Choices) -> int:
    """The choice behind entry ``m`` of a state's row, by comparing the same sums again.

    Returns:
        Its index among ``choices``, -1 if none explains the entry.
    """
    n, quantum = table.numbers, table.quantum
    want = table.values[_state_row(n, state), m]
    last = table.segments.shape[1] - 1
    for i in range(list_choices(n, state, choices) if want < np.inf else 0):
        c = choices.sizes[i]
        if c[KIND] == TRUNK:
            return i
        left = m - in_slots(c[STATE_BYTES], quantum)
        at = min(last, m - in_slots(c[SEGMENT_BYTES], quantum))
        if m < in_slots(c[NEEDS], quantum) or min(left, at) < 0:
            continue
        beside_s = choices.seconds[i, AHEAD_S] + choices.seconds[i, BEHIND_S]
        if c[KIND] == TURN:
            beside_s = table.segments[c[SEGMENT], at] - n.turn_s[c[CUT_AT]] + beside_s
        elif c[KIND] == CUT:
            beside_s = table.segments[c[SEGMENT], at]
        if table.values[c[STATE], left] + beside_s == want:
            return i
    return -1


@njit(cache=True, nogil=True)
def choose_least(
    least: JoinLeast, state: State, available: int, choices: Choices
) -> tuple[int, int, float]:
    """As ``solvers.least.choose_least``: a choice by its index, bytes and seconds."""
    tightens = available == ANY_BYTES
    limit = 1 << 62 if tightens else available
    best, best_s = -1, np.inf
    for i in range(list_choices(least.numbers, state, choices)):
        c = choices.sizes[i]
        takes, needs = choices.seconds[i, AHEAD_S], c[NEEDS]
        first, second = 0.0, choices.seconds[i, BEHIND_S]
        if c[STATE] >= 0:
            needs = max(needs, c[STATE_BYTES] + least.memory[c[STATE]])
            first = least.seconds[c[STATE]]
        if c[SEGMENT] >= 0:
            needs = max(needs, c[SEGMENT_BYTES] + least.segment_memory[c[SEGMENT]])
            second = least.segment_s[c[SEGMENT]]
        if c[KIND] == TURN:  # sums are made in the order in which things run
            first, second = second, first
        takes = takes + first + second
        if is_better(needs, takes, limit, best_s, tightens):
            best, best_s = i, takes
            limit = needs if tightens else limit
    return best, limit, best_s


@njit(cache=True, nogil=True)
def fill_least(least: JoinLeast, choices: Choices) -> None:
    """Least memory of every state, and the seconds of a schedule that needs no more."""
    n = least.numbers
    p = np.empty(n.lengths.size, dtype=np.int64)
    for number in range(n.heads - 1, -1, -1):
        _heads_of(n, number, p)
        for h in range(1 << n.lengths.size):
            if _is_state(n, p, h):
                for t in range(n.turn_gradient.size):
                    _, needs, takes = choose_least(least, (number, h, t), ANY_BYTES, choices)
                    row = _state_row(n, (number, h, t))
                    least.memory[row] = needs
                    least.seconds[row] = takes
