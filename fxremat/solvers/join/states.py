"""States of the join solver and the choices in them, compiled by numba.

A state is a vector of heads ``p`` by its number, a mask ``h`` of the branches whose head a
saved set holds, and the trunk's end ``t``.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from fxremat.solvers.join.numbers import JoinNumbers
from fxremat.solvers.numbers import Ints

KEEP, CUT, TURN, TRUNK = 0, 1, 2, 3
"""Choices: ``F_all`` of a branch's stage, ``F_ck`` and a cut of a branch, ``F_ck`` of every
head and a cut of the trunk, and leaving the rest to the trunk alone."""


@njit(inline="always")
def up(nbytes: int, quantum: int) -> int:
    """``nbytes`` in slots, rounded up."""
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
def state_row(n: JoinNumbers, number: int, h: int, t: int) -> int:
    """Which row of the tables is a state's."""
    row: int = (number * (1 << n.lengths.size) + h) * n.turn_gradient.size + t
    return row


@njit(inline="always")
def after_keep(n: JoinNumbers, state: tuple[int, int, int], b: int) -> int:
    """The state in which branch ``b`` has kept all of its next stage."""
    number, h, t = state
    row: int = state_row(n, number + n.strides[b], h | 1 << b, t)
    return row


@njit(inline="always")
def after_cut(n: JoinNumbers, state: tuple[int, int, int], b: int, stages: int) -> int:
    """The state in which branch ``b`` has gone over ``stages`` more and kept none whole."""
    number, h, t = state
    row: int = state_row(n, number + stages * n.strides[b], h & ~(1 << b), t)
    return row


@njit(inline="always")
def is_state(n: JoinNumbers, p: Ints, h: int) -> bool:
    """No saved set holds a branch's input."""
    possible = True
    for b in range(n.lengths.size):
        possible = possible and not (p[b] == 0 and h >> b & 1)
    return possible


@njit(inline="always")
def given_back(n: JoinNumbers, p: Ints, h: int, b: int) -> int:
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
def can_turn(n: JoinNumbers, p: Ints, h: int) -> bool:
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
def turn_costs(n: JoinNumbers, p: Ints, step: Ints, sweep: Ints) -> float:
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
