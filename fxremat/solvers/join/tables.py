"""The tables of a join, in slots and in bytes, compiled by numba. ``general`` has the recurrence.

A state is the number of a vector of heads ``p``, a mask ``h`` of the branches whose head is in a
saved set, and the trunk's end ``t``. The choices of a state are listed in one place
(``list_choices``), for the table in slots, for reading a schedule from it, and for the least
memory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fxremat.jit import entry, helper, pointer
from fxremat.solvers.join.numbers import JoinNumbers
from fxremat.solvers.kernels import in_slots, lower, row_of
from fxremat.solvers.least import ANY_BYTES, is_better
from fxremat.solvers.numbers import Floats, Ints

KEEP, CUT, TRUNK_CUT, TRUNK = range(4)
"""Kinds of choices: ``F_all`` of a branch's stage; ``F_ck`` of a branch up to a cut; ``F_ck`` of
every head up to a cut of the trunk; running only the trunk."""

KIND, BRANCH, CUT_AT, NEEDS, STATE, STATE_BYTES, SEGMENT, SEGMENT_BYTES = range(8)
"""Integers of a choice: its kind; the branch; the cut or save option; the peak of its own
operations; the row of the next state (-1 for none), and by how much less is free in it; the
interval of a line that runs as well (see ``JoinNumbers.line_row``, -1 for none), and by how much
less is free for it (negative for more)."""

AHEAD_S, BEHIND_S = range(2)
"""Seconds of a choice: of its own forwards, and of its own backward."""

State = tuple[int, int, int]


class Choices(NamedTuple):
    """Buffers for the choices of a state, one row each; ``list_choices`` writes them.

    Attributes:
        sizes: ``(most, 8)`` integers, in the order of ``KIND, BRANCH, …``.
        seconds: ``(most, 2)``, of the choice's forwards (``AHEAD_S``) and backward (``BEHIND_S``).
    """

    sizes: Ints
    seconds: Floats

    @staticmethod
    def room(n: JoinNumbers) -> Choices:
        """Allocate buffers with as many rows as any state of the join has choices."""
        most = n.lengths.size * (n.saved.shape[2] + n.step.shape[2]) + n.trunk_born.size
        return Choices(np.empty((most, 8), dtype=np.int64), np.empty((most, 2)))


class JoinTable(NamedTuple):
    """Least seconds ``J(p, h, t, m)`` of all states of a join (see ``general``), ``m`` in slots.

    Attributes:
        numbers: the join.
        quantum: bytes of a slot.
        values: ``(states, slots + 1)`` seconds. A row never increases with ``m``.
        segments: ``(rows, slots' + 1)``, rotor's values of the intervals of all lines. Those of
            branches include the time of the interval's forwards.
    """

    numbers: JoinNumbers
    quantum: int
    values: Floats
    segments: Floats


class JoinLeast(NamedTuple):
    """Least memory of every state of a join in bytes, beyond what is held when the state begins.

    Attributes:
        numbers: the join.
        memory, seconds: ``(states,)``, least memory, and the time of a schedule with that memory.
        segment_memory, segment_s: ``(rows,)``, least memory and time of the intervals of all lines.
    """

    numbers: JoinNumbers
    memory: Ints
    seconds: Floats
    segment_memory: Ints
    segment_s: Floats


@helper
def _heads_of(n: JoinNumbers, number: int, p: Ints) -> bool:
    """Write the heads with a number into ``p``, and return whether all are ends of branches.

    A head is the held boundary of a branch. Heads ``p`` have the number ``Σ p[b] n.strides[b]``.
    """
    at_ends = True
    for b in range(n.lengths.size):
        p[b] = number // n.strides[b] % (n.lengths[b] + 1)
        at_ends = at_ends and p[b] == n.lengths[b]
    return at_ends


@helper
def _state_row(n: JoinNumbers, state: State) -> int:
    """Return the row of a state in the tables.

    A state is the number of the heads (held boundaries of branches), the mask of branches whose
    head is in a saved set, and the last trunk stage.
    """
    number, h, t = state
    row: int = (number * (1 << n.lengths.size) + h) * n.trunk_gradient.size + t
    return row


@helper
def _is_state(n: JoinNumbers, p: Ints, h: int) -> bool:
    """Return whether heads ``p`` (held boundaries of branches) and mask ``h`` are consistent.

    ``h`` has a bit for each branch whose head is in a saved set, which no branch's input is.
    """
    possible = True
    for b in range(n.lengths.size):
        possible = possible and not (p[b] == 0 and h >> b & 1)
    return possible


@helper
def _more_in_backward(n: JoinNumbers, p: Ints, h: int, b: int) -> int:
    """Return how many more bytes are free in a backward of branch ``b`` than in its forward.

    By then the other branches' heads have been freed, unless saved sets hold them; their gradients
    and the trunk's are held instead.
    """
    nbytes = -n.done
    for other in range(n.lengths.size):
        if other != b:
            nbytes -= n.held[other, p[other]]
            if not h >> other & 1:
                nbytes += n.freed[other, p[other]]
    return nbytes


@helper
def _can_cut_trunk(n: JoinNumbers, p: Ints, h: int) -> bool:
    """Return whether the trunk may free the last boundaries of the branches.

    It may unless one is a head (held boundary ``p[b]``) that is in no saved set by mask ``h``.
    """
    possible = True
    for b in range(n.lengths.size):
        possible = possible and (p[b] < n.lengths[b] or (h >> b & 1) == 1)
    return possible


@entry
def sweep_order(n: JoinNumbers, p: Ints) -> Ints:
    """Return the order in which to run the branches to their ends with the least peak.

    Those come first that free most after their peak. ``p`` are the boundaries they start from.
    """
    gain = np.empty(n.lengths.size, dtype=np.int64)
    for b in range(n.lengths.size):
        end = n.lengths[b]
        # A head at its end needs no sweep, so its peak is 0 at any place in the order.
        gain[b] = -(n.sweep[b, p[b], end] - n.step[b, p[b], end]) if p[b] < end else 0
    return np.argsort(gain, kind="mergesort")


@helper
def _set(
    into: Choices,
    i: int,
    choice: tuple[int, int, int],
    needs: int,
    next_state: tuple[int, int],
    segment: tuple[int, int],
    takes: tuple[float, float],
) -> int:
    """Write a choice into row ``i`` of the buffers, and return the index of the next row."""
    sizes = into.sizes[i]
    sizes[KIND], sizes[BRANCH], sizes[CUT_AT] = choice
    sizes[NEEDS] = needs
    sizes[STATE], sizes[STATE_BYTES] = next_state
    sizes[SEGMENT], sizes[SEGMENT_BYTES] = segment
    into.seconds[i, AHEAD_S], into.seconds[i, BEHIND_S] = takes
    return i + 1


@helper
def list_choices(n: JoinNumbers, state: State, into: Choices) -> int:
    """Write all choices of a state into the buffers ``into``, and return their number."""
    number, h, t = state
    p = np.empty(n.lengths.size, dtype=np.int64)
    gradient, trunk = n.trunk_gradient[t], n.line_row[n.lengths.size]
    if _heads_of(n, number, p):
        segment = trunk + row_of(0, t, n.trunk_gradient.size), 0
        return _set(into, 0, (TRUNK, 0, 0), 0, (-1, 0), segment, (0.0, 0.0))
    count = 0
    for b in range(n.lengths.size):
        s, length = p[b], n.lengths[b]
        if s == length:
            continue
        more = _more_in_backward(n, p, h, b)
        after = _state_row(n, (number + n.strides[b], h | 1 << b, t))
        forward_s = n.prefix_s[b, s + 1] - n.prefix_s[b, s]
        for k in range(n.saved.shape[2]):
            if n.backward_s[b, s, k] < np.inf:
                needs = max(gradient + n.keep[b, s, k], n.back[b, s, k] - more)
                takes = forward_s, n.backward_s[b, s, k]
                next_state = after, n.saved[b, s, k]
                count = _set(into, count, (KEEP, b, k), needs, next_state, (-1, 0), takes)
        for cut in range(s + 1, length + 1):
            after = _state_row(n, (number + (cut - s) * n.strides[b], h & ~(1 << b), t))
            segment = n.line_row[b] + row_of(s, cut - 1, length), -more
            takes = n.prefix_s[b, cut] - n.prefix_s[b, s], 0.0
            next_state, needs = (after, n.step[b, s, cut]), gradient + n.sweep[b, s, cut]
            count = _set(into, count, (CUT, b, cut), needs, next_state, segment, takes)
    return _list_trunk_cuts(n, state, p, into, count) if t and _can_cut_trunk(n, p, h) else count


@helper
def _list_trunk_cuts(n: JoinNumbers, state: State, p: Ints, into: Choices, count: int) -> int:
    """Add the choices that keep the held boundaries of all branches and cut the trunk.

    Args:
        state: number of heads, mask and trunk stage.
        p: heads, the held boundary of each branch.
        into: buffers to add choices to.
        count: number of choices in the buffers.

    Returns:
        The new number of choices in the buffers.
    """
    number, h, t = state
    ends_s, added, peak = 0.0, 0, 0
    for b in sweep_order(n, p):
        end = n.lengths[b]
        if p[b] < end:
            peak = max(peak, added + n.sweep[b, p[b], end])
            added += n.step[b, p[b], end]
            ends_s += n.prefix_s[b, end] - n.prefix_s[b, p[b]]
    step = 0
    for q in range(t + 1):
        if q:
            peak = max(peak, step + n.trunk_peak[q - 1])
        step = n.trunk_born[q]
        for b in range(n.lengths.size):
            step += n.trunk_crossed[b, p[b], q]
        if q:
            row = n.line_row[n.lengths.size] + row_of(q, t, n.trunk_gradient.size)
            needs, takes = n.trunk_gradient[t] + peak, (ends_s + n.trunk_s[q], 0.0)
            next_state = _state_row(n, (number, h, q - 1)), 0
            count = _set(into, count, (TRUNK_CUT, 0, q), needs, next_state, (row, step), takes)
    return count


@helper
def _lower(out: Floats, inner: Floats, row: Floats, begin: int, shift: int, more: int) -> None:
    """Lower ``out[m]`` to ``inner[m - shift] + row[m + more]`` for ``m >= begin``, if that is less.

    Beyond its end, ``row`` continues with its last entry.
    """
    size = out.size
    begin = max(begin, shift, -more)
    if begin >= size:
        return
    last = row.size - 1
    if out[begin] <= inner[size - 1 - shift] + row[min(last, size - 1 + more)]:
        return  # rows never increase, so no entry would be lower
    middle = max(begin, min(size, row.size - more))
    if begin < middle:
        late, early = pointer(inner, begin - shift), pointer(row, begin + more)
        bound = inner[middle - 1 - shift] + row[middle - 1 + more]
        lower(pointer(out, begin), late, early, middle - begin, bound)
    for m in range(middle, size):
        value = inner[m - shift] + row[last]
        out[m] = value if value < out[m] else out[m]


@helper
def _fill_state(table: JoinTable, state: State, choices: Choices) -> None:
    """Compute the row of a state from those of the following states; ``choices`` is a buffer."""
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
            if c[KIND] == TRUNK_CUT:
                row = row - n.trunk_s[c[CUT_AT]] + ahead_s
            _lower(out, inner, row, begin, shift, -in_slots(c[SEGMENT_BYTES], quantum))


@entry
def fill(table: JoinTable, choices: Choices) -> None:
    """Compute all rows of ``table``, from the ends of the branches to their inputs.

    ``choices`` is a buffer.
    """
    n = table.numbers
    p = np.empty(n.lengths.size, dtype=np.int64)
    table.values[:] = np.inf
    for number in range(n.heads - 1, -1, -1):
        _heads_of(n, number, p)
        for h in range(1 << n.lengths.size):
            if _is_state(n, p, h):
                for t in range(n.trunk_gradient.size):
                    _fill_state(table, (number, h, t), choices)


@entry
def choose(table: JoinTable, state: State, m: int, choices: Choices) -> int:
    """Return the choice whose seconds are entry ``m`` of a state's row, by adding them up again.

    Args:
        state: number of heads, mask and trunk stage.
        m: number of free slots.
        choices: buffers, to which the state's choices are written.

    Returns:
        Its index among ``choices``; -1 if there is none.
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
        other_s = choices.seconds[i, AHEAD_S] + choices.seconds[i, BEHIND_S]
        if c[KIND] == TRUNK_CUT:
            other_s = table.segments[c[SEGMENT], at] - n.trunk_s[c[CUT_AT]] + other_s
        elif c[KIND] == CUT:
            other_s = table.segments[c[SEGMENT], at]
        if table.values[c[STATE], left] + other_s == want:
            return i
    return -1


@entry
def choose_least(
    least: JoinLeast, state: State, available: int, choices: Choices
) -> tuple[int, int, float]:
    """Choose the fastest way to run a state within ``available`` bytes.

    For ``ANY_BYTES``, choose a way of least memory, and of these the fastest. ``choices`` are
    buffers, to which the state's choices are written.

    Returns:
        The index among ``choices``, -1 if none fits; the bytes, which are ``available`` unless that
        is ``ANY_BYTES``; and the seconds.
    """
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
        if c[KIND] == TRUNK_CUT:  # add in the order in which operations run
            first, second = second, first
        takes = takes + first + second
        if is_better(needs, takes, limit, best_s, tightens):
            best, best_s = i, takes
            limit = needs if tightens else limit
    return best, limit, best_s


@entry
def fill_least(least: JoinLeast, choices: Choices) -> None:
    """Fill ``memory`` and ``seconds`` of ``least`` for every state; ``choices`` is a buffer."""
    n = least.numbers
    p = np.empty(n.lengths.size, dtype=np.int64)
    for number in range(n.heads - 1, -1, -1):
        _heads_of(n, number, p)
        for h in range(1 << n.lengths.size):
            if _is_state(n, p, h):
                for t in range(n.trunk_gradient.size):
                    _, needs, takes = choose_least(least, (number, h, t), ANY_BYTES, choices)
                    row = _state_row(n, (number, h, t))
                    least.memory[row] = needs
                    least.seconds[row] = takes
