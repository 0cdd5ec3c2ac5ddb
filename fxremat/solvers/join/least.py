"""Least memory of the join solver's states, compiled by numba; see ``general``."""

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
)
from fxremat.solvers.numbers import Floats, Ints


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
def _keep_needs(least: JoinLeast, state: tuple[int, int, int], p: Ints, b: int, k: int) -> int:
    n = least.numbers
    inside = n.saved[b, p[b], k] + least.memory[after_keep(n, state, b)]
    needs = max(n.turn_gradient[state[2]] + n.keep[b, p[b], k], inside)
    nbytes: int = max(needs, n.back[b, p[b], k] - given_back(n, p, state[1], b))
    return nbytes


@njit(inline="always")
def _keep_s(least: JoinLeast, state: tuple[int, int, int], p: Ints, b: int, k: int) -> float:
    n = least.numbers
    s = p[b]
    forward_s = n.prefix_s[b, s + 1] - n.prefix_s[b, s]
    inside_s = least.seconds[after_keep(n, state, b)]
    seconds: float = forward_s + inside_s + n.backward_s[b, s, k]
    return seconds


@njit(inline="always")
def _cut_needs(least: JoinLeast, state: tuple[int, int, int], p: Ints, b: int, cut: int) -> int:
    n = least.numbers
    s = p[b]
    inside = n.step[b, s, cut] + least.memory[after_cut(n, state, b, cut - s)]
    needs = max(n.turn_gradient[state[2]] + n.sweep[b, s, cut], inside)
    segment = least.branch_memory[b, s, cut - 1] - given_back(n, p, state[1], b)
    nbytes: int = max(needs, segment)
    return nbytes


@njit(inline="always")
def _cut_s(least: JoinLeast, state: tuple[int, int, int], p: Ints, b: int, cut: int) -> float:
    n = least.numbers
    s = p[b]
    forward_s = n.prefix_s[b, cut] - n.prefix_s[b, s]
    inside_s = least.seconds[after_cut(n, state, b, cut - s)]
    seconds: float = forward_s + inside_s + least.branch_s[b, s, cut - 1]
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
    turns = n.turn_gradient.size
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
    if t and can_turn(n, p, h):
        step = np.empty(turns + 1, dtype=np.int64)
        sweep = np.empty(turns + 1, dtype=np.int64)
        ends_s = turn_costs(n, p, step, sweep)
        for q in range(1, t + 1):
            early = state_row(n, number, h, q - 1)
            needs = max(step[q] + least.trunk_memory[q, t], least.memory[early])
            needs = max(needs, n.turn_gradient[t] + sweep[q])
            seconds = ends_s + n.turn_s[q] + least.trunk_s[q, t] + least.seconds[early]
            if (needs < limit and tightens) or (needs <= limit and seconds < best[4]):
                best = (TURN, 0, q, needs, seconds)
                limit = needs if tightens else limit
    return best


@njit(cache=True, nogil=True)
def fill_states(least: JoinLeast) -> None:
    """Least memory of every state, and the seconds of a schedule that needs no more."""
    n = least.numbers
    masks, turns = 1 << n.lengths.size, n.turn_gradient.size
    p = np.empty(n.lengths.size, dtype=np.int64)
    for number in range(n.heads - 1, -1, -1):
        heads_of(n, number, p)
        for h in range(masks):
            if not is_state(n, p, h):
                continue
            for t in range(turns):
                best = choose_least(least, (number, h, t), -1)
                row = state_row(n, number, h, t)
                least.memory[row] = best[3]
                least.seconds[row] = best[4]
