"""``C_Δ``: what comes after the turn, without rounding what is still to be prefetched.

While an interval ``(s, t)`` is run, ``Δ`` bytes have to arrive by its end, at bandwidth
``β``, as late as possible. Follow one sequence of operations from its end: an operation
that begins ``before`` seconds of work after the interval did, takes ``u`` seconds and
needs ``n`` bytes beside boundary ``s`` may end when ``(Δ - (free - n)) / β`` seconds are
left. That is Lemma 1. Over all operations the sequence takes

    max(work, lag + (Δ - free) / β),    lag = max over operations of before + u + n / β

so two numbers say everything about it, for every ``Δ`` and every ``free`` into which it
fits. They compose: run one interval in another and both are a maximum of sums. ``C_Δ`` is
the lower envelope over the sequences that fit, and only those on the Pareto *front* of
``(work, lag)`` can be on it. The supplement has a table over ``Δ`` in slots instead, where
each stage's ``u β`` has to be rounded, to nothing if it is less than a slot.

A front holds at most ``width`` sequences; beyond, those are dropped that are missed least.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from fxremat.solvers.kernels import all_bytes, ck_bytes, in_slots, row_of
from fxremat.solvers.numbers import Floats, Ints, Numbers


class Fronts(NamedTuple):
    """The fronts of all intervals, at every number of free slots.

    Attributes:
        numbers: the chain.
        step_slots: ``numbers.step``, rounded up to slots.
        quantum: bytes of a slot.
        byte_s: seconds to prefetch a byte.
        sweep_lag: ``(L, L + 1)``, ``lag`` of the forwards ``s … s' - 1`` without gradient.
        most_s: ``(L,)``, seconds to prefetch all that may be missing while ``(s, ·)`` runs.
        work: ``(L (L + 1) / 2, slots + 1, width)`` seconds, ascending.
        lag: the same shape, seconds, descending.
        size: ``(L (L + 1) / 2, slots + 1)``, how many there are.
        lost: ``(L (L + 1) / 2,)``, how many were dropped for want of width.
    """

    numbers: Numbers
    step_slots: Ints
    quantum: int
    byte_s: float
    sweep_lag: Floats
    most_s: Floats
    work: Floats
    lag: Floats
    size: Ints
    lost: Ints


@njit(cache=True, nogil=True)
def _insert(work: Floats, lag: Floats, size: int, new_work: float, new_lag: float) -> int:
    """Put a sequence into a front with room for one more; returns the new size."""
    at = 0
    while at < size and work[at] < new_work:
        at += 1
    if at > 0 and lag[at - 1] <= new_lag:
        return size
    if at < size and work[at] == new_work and lag[at] <= new_lag:
        return size
    end = at
    while end < size and lag[end] >= new_lag:
        end += 1
    # Entries at … end - 1 are no better in either.
    if end == at:
        for k in range(size, at, -1):
            work[k] = work[k - 1]
            lag[k] = lag[k - 1]
    elif end > at + 1:
        for k in range(end, size):
            work[k - end + at + 1] = work[k]
            lag[k - end + at + 1] = lag[k]
    work[at] = new_work
    lag[at] = new_lag
    return size - (end - at) + 1


@njit(cache=True, nogil=True)
def _thin(work: Floats, lag: Floats, size: int) -> int:
    """Drop the sequence without which the envelope rises least; never the first or last."""
    best = 1
    best_s = np.inf
    for k in range(1, size - 1):
        rises_s = min(work[k + 1] - work[k], lag[k - 1] - lag[k])
        if rises_s < best_s:
            best = k
            best_s = rises_s
    for k in range(best, size - 1):
        work[k] = work[k + 1]
        lag[k] = lag[k + 1]
    return size - 1


@njit(cache=True, nogil=True)
def _is_beaten(work: Floats, lag: Floats, size: int, new_work: float, new_lag: float) -> bool:
    """Whether some sequence is no worse in either."""
    for k in range(size):
        if work[k] > new_work:
            return False
        if lag[k] <= new_lag:
            return True
    return False


@njit(cache=True, nogil=True)
def _fill(fronts: Fronts, s: int, t: int, work: Floats, lag: Floats) -> None:
    """The fronts of ``(s, t)``; the last two have room for ``width + 1``."""
    n = fronts.numbers
    count = n.backward_s.size
    row = row_of(s, t, count)
    byte_s = fronts.byte_s
    for m in range(fronts.size.shape[1]):
        size = 0
        # With less lag than this, the work is what counts for whatever can be missing.
        floor = m * fronts.quantum * byte_s - fronts.most_s[s]
        if s == t:
            if m >= in_slots(n.leaf_bytes[s, 0], fronts.quantum):
                takes = n.leaf_s[s, 0]
                size = _insert(work, lag, size, takes, takes + n.leaf_bytes[s, 0] * byte_s)
        else:
            size = _all_front(fronts, s, t, m, work, lag)
            for cut in range(s + 1, t + 1):
                size = _ck_front(fronts, s, cut, t, m, work, lag, size, floor)
        fronts.size[row, m] = size
        for k in range(size):
            fronts.work[row, m, k] = work[k]
            fronts.lag[row, m, k] = lag[k]


@njit(cache=True, nogil=True)
def _all_front(fronts: Fronts, s: int, t: int, m: int, work: Floats, lag: Floats) -> int:
    """``C_Δ^{F_all}``: the front it leaves in ``work`` and ``lag``, which were empty."""
    n = fronts.numbers
    inner = row_of(s + 1, t, n.backward_s.size)
    shift = in_slots(n.saved[s], fronts.quantum)
    size = 0
    if m < max(shift, in_slots(all_bytes(n, s, t), fronts.quantum)):
        return size
    for k in range(fronts.size[inner, m - shift]):
        takes, lags = _all_around(
            fronts, s, t, fronts.work[inner, m - shift, k], fronts.lag[inner, m - shift, k]
        )
        size = _insert(work, lag, size, takes, lags)
    return size


@njit(inline="always")
def _all_around(fronts: Fronts, s: int, t: int, work: float, lag: float) -> tuple[float, float]:
    """Work and lag of ``F_all s``, a sequence of ``(s + 1, t)``, ``B s``."""
    n = fronts.numbers
    byte_s = fronts.byte_s
    forward_s = n.prefix_s[s + 1] - n.prefix_s[s]
    before = forward_s + work
    takes = before + n.backward_s[s]
    lags = forward_s + (n.gradient[t] + n.keep[s]) * byte_s
    lags = max(lags, forward_s + lag + n.saved[s] * byte_s)
    return takes, max(lags, takes + n.back[s] * byte_s)


@njit(inline="always")
def _ck_front(
    fronts: Fronts,
    s: int,
    cut: int,
    t: int,
    m: int,
    work: Floats,
    lag: Floats,
    size: int,
    floor: float,
) -> int:
    """Add ``C_Δ^{F_ck}`` of one cut to a front; returns its new size."""
    n = fronts.numbers
    count = n.backward_s.size
    shift = fronts.step_slots[s, cut]
    if m < max(shift, in_slots(ck_bytes(n, s, cut, t), fronts.quantum)):
        return size
    late = row_of(cut, t, count)
    early = row_of(s, cut - 1, count)
    lates = fronts.size[late, m - shift]
    earlies = fronts.size[early, m]
    if lates == 0 or earlies == 0:
        return size
    width = fronts.work.shape[2]
    sweep_s = n.prefix_s[cut] - n.prefix_s[s]
    first = fronts.sweep_lag[s, cut] + n.gradient[t] * fronts.byte_s
    step_s = n.step[s, cut] * fronts.byte_s
    late_work = fronts.work[late, m - shift]
    late_lag = fronts.lag[late, m - shift]
    early_work = fronts.work[early, m]
    early_lag = fronts.lag[early, m]
    # No pair is better in either than the best of each alone.
    least_s = sweep_s + late_work[0] + early_work[0]
    least_lag = max(first, sweep_s + late_lag[lates - 1] + step_s)
    least_lag = max(least_lag, sweep_s + late_work[0] + early_lag[earlies - 1])
    if _is_beaten(work, lag, size, least_s, max(least_lag, least_s + floor)):
        return size
    for i in range(lates):
        before = sweep_s + late_work[i]
        lag_so_far = max(first, sweep_s + late_lag[i] + step_s)
        for j in range(earlies):
            takes = before + early_work[j]
            lags = max(lag_so_far, before + early_lag[j], takes + floor)
            size = _insert(work, lag, size, takes, lags)
            if size > width:
                size = _thin(work, lag, size)
                fronts.lost[row_of(s, t, count)] += 1
    return size


@njit(cache=True, nogil=True)
def fill_fronts(fronts: Fronts, distance: int, begin: int, stride: int) -> None:
    """The intervals ``(s, s + distance)`` with ``s = begin, begin + stride, …``.

    Requires: all shorter intervals are filled.
    """
    width = fronts.work.shape[2]
    work = np.empty(width + 1)
    lag = np.empty(width + 1)
    for s in range(begin, fronts.numbers.backward_s.size - distance, stride):
        _fill(fronts, s, s + distance, work, lag)


@njit(cache=True, nogil=True)
def explain(fronts: Fronts, s: int, t: int, m: int, k: int) -> tuple[int, int, int]:
    """What entry ``k`` of a front is made of, by making all of it again.

    Requires: ``s < t``.

    Returns:
        ``s``, the entry inside ``F_all s`` and -1; or the cut, the entry of the interval
        after it and of the one before it. All are -1 if nothing makes the entry.
    """
    n = fronts.numbers
    count = n.backward_s.size
    row = row_of(s, t, count)
    want = fronts.work[row, m, k]
    want_lag = fronts.lag[row, m, k]
    inner = row_of(s + 1, t, count)
    shift = in_slots(n.saved[s], fronts.quantum)
    if m >= max(shift, in_slots(all_bytes(n, s, t), fronts.quantum)):
        for i in range(fronts.size[inner, m - shift]):
            takes, lags = _all_around(
                fronts, s, t, fronts.work[inner, m - shift, i], fronts.lag[inner, m - shift, i]
            )
            if takes == want and lags == want_lag:
                return s, i, -1
    floor = m * fronts.quantum * fronts.byte_s - fronts.most_s[s]
    for cut in range(s + 1, t + 1):
        shift = fronts.step_slots[s, cut]
        if m < max(shift, in_slots(ck_bytes(n, s, cut, t), fronts.quantum)):
            continue
        late = row_of(cut, t, count)
        early = row_of(s, cut - 1, count)
        sweep_s = n.prefix_s[cut] - n.prefix_s[s]
        first = fronts.sweep_lag[s, cut] + n.gradient[t] * fronts.byte_s
        step_s = n.step[s, cut] * fronts.byte_s
        for i in range(fronts.size[late, m - shift]):
            before = sweep_s + fronts.work[late, m - shift, i]
            lag_so_far = max(first, sweep_s + fronts.lag[late, m - shift, i] + step_s)
            for j in range(fronts.size[early, m]):
                takes = before + fronts.work[early, m, j]
                lags = max(lag_so_far, before + fronts.lag[early, m, j], takes + floor)
                if takes == want and lags == want_lag:
                    return cut, i, j
    return -1, -1, -1
