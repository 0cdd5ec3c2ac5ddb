"""Schedules read off the tables of the chain solvers: Algorithm 2."""

from __future__ import annotations

import numpy as np
from numba import njit

from fxremat.ir.schedule import ALL, BACKWARD, INPUT, KINDS, NONE
from fxremat.solvers.kernels import SAVED, Table, choice_needs, in_slots, row_of
from fxremat.solvers.numbers import Floats, Ints


def choose(table: Table, s: int, t: int, m: int) -> int:
    """The choice behind entry ``m`` of row ``(s, t)``, by comparing the same sums again.

    Returns:
        ``s`` for ``F_all s``, ``-1 - option`` for one of its save options, the cut
        ``s' > s`` for ``F_ck s``. For ``s == t``, ``s + 1`` means the forward alone first,
        then a rebuild. -1 if the entry is infinite.
    """
    n = table.numbers
    line = table.choice_s, n.gradient, n.sweep, n.prefix_s, n.leaf_bytes, n.leaf_s, table.quantum
    return int(_choose(*line, table.choice_bytes, table.step_slots, table.values, s, t, m))


def read_out(table: Table, outer: Table, slots: int) -> Ints:
    """The schedule behind an entry of the whole chain, as codes: Algorithm 2.

    Args:
        table: of all intervals.
        outer: of those that end with the last stage.
        slots: free beside boundary 0.

    Returns:
        codes as of ``ir.schedule``, with a stack of its own since chains are deeper than one's.
        Nothing if no choice explains the value of some interval.
    """
    n, count = table.numbers, table.numbers.backward_s.size
    line = table.choice_s, n.gradient, n.sweep, n.prefix_s, n.leaf_bytes, n.leaf_s, table.quantum
    inner = table.choice_bytes, table.step_slots, table.values
    last = outer.choice_bytes, outer.step_slots, outer.values
    room, found = 8 * count, -1
    while found < 0:
        codes = np.empty(room, dtype=np.int64)
        todo = np.empty((2 * count + 2, 3), dtype=np.int64)
        found = _read_out(*line, *inner, *last, slots, codes, todo)
        room *= 2
    return codes[:found]


@njit(cache=True, nogil=True)
def _choose(
    choice_s: Floats,
    gradient: Ints,
    sweep: Ints,
    prefix_s: Floats,
    leaf_bytes: Ints,
    leaf_s: Floats,
    quantum: int,
    choice_bytes: Ints,
    step_slots: Ints,
    values: Floats,
    s: int,
    t: int,
    m: int,
) -> int:
    """As ``choose``."""
    count = gradient.size
    want = values[row_of(s, t, count), m]
    if want == np.inf:
        return -1
    if s == t:
        for way in range(2):
            fits = m >= in_slots(leaf_bytes[s, way], quantum)
            if fits and leaf_s[s, way] + prefix_s[s] == want:
                return s + way
    for k in range(s == t, choice_s.shape[1]):
        shift = 0 if s == t else in_slots(choice_bytes[SAVED, s, k], quantum)
        needs = in_slots(choice_needs(gradient, choice_bytes, s, t, k), quantum)
        if m < max(shift, needs):
            continue
        if s == t:
            value = prefix_s[s + 1] - prefix_s[s] + choice_s[s, k] + prefix_s[s]
        else:
            inner = values[row_of(s + 1, t, count), m - shift]
            value = inner + choice_s[s, k] + prefix_s[s] - prefix_s[s]
        if value == want:
            return -1 - k if k else s
    for cut in range(s + 1, t + 1):
        shift = step_slots[s, cut]
        if m < max(shift, in_slots(gradient[t] + sweep[s, cut], quantum)):
            continue
        late = values[row_of(cut, t, count), m - shift]
        if late + values[row_of(s, cut - 1, count), m] - prefix_s[s] == want:
            return cut
    return -1


@njit(cache=True, nogil=True)
def _read_out(
    choice_s: Floats,
    gradient: Ints,
    sweep: Ints,
    prefix_s: Floats,
    leaf_bytes: Ints,
    leaf_s: Floats,
    quantum: int,
    inner_bytes: Ints,
    inner_step: Ints,
    inner_values: Floats,
    last_bytes: Ints,
    last_step: Ints,
    last_values: Floats,
    slots: int,
    codes: Ints,
    todo: Ints,
) -> int:
    """As ``read_out``; how many ``codes``, -1 if there is no room for them.

    Args:
        todo: room for intervals; one with ``t < s`` is a backward.
    """
    last = gradient.size - 1
    todo[0, 0], todo[0, 1], todo[0, 2] = 0, last, slots
    count, waiting = 0, 1
    while waiting:
        waiting -= 1
        s, t, m = todo[waiting, 0], todo[waiting, 1], todo[waiting, 2]
        if count + last + 4 > codes.size:
            return -1
        if t < s:
            codes[count] = s * KINDS + BACKWARD
            count += 1
            continue
        is_last = t == last
        nbytes = last_bytes if is_last else inner_bytes
        step = last_step if is_last else inner_step
        cut = _choose(
            choice_s, gradient, sweep, prefix_s, leaf_bytes, leaf_s, quantum,
            nbytes, step, last_values if is_last else inner_values, s, t, m,
        )  # fmt: skip
        if cut == -1:
            return 0
        if cut <= s:
            option = 0 if cut == s else -1 - cut
            codes[count] = s * KINDS + ALL + option
            count += 1
            todo[waiting, 0], todo[waiting, 1], todo[waiting, 2] = s, s - 1, 0
            waiting += 1
            if s < t:
                left = m - in_slots(nbytes[SAVED, s, option], quantum)
                todo[waiting, 0], todo[waiting, 1], todo[waiting, 2] = s + 1, t, left
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
        todo[waiting, 0], todo[waiting, 1], todo[waiting, 2] = s, cut - 1, m
        waiting += 1
        todo[waiting, 0], todo[waiting, 1], todo[waiting, 2] = cut, t, m - step[s, cut]
        waiting += 1
    return count
