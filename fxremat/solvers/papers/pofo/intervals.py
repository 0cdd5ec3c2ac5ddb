"""``C_Δ``: the time after the loss point, without rounding what is still to be prefetched.

While an interval ``(s, t)`` runs, ``Δ`` bytes have to arrive by its end, at bandwidth ``β``, as
late as possible. Consider one sequence of operations from its end: an operation that begins
``before`` seconds of work after the interval, takes ``u`` seconds and needs ``n`` bytes in addition
to boundary ``s`` may end when ``(Δ - (free - n)) / β`` seconds are left. That is Lemma 1. Over all
operations the sequence takes

    max(work, lag + (Δ - free) / β),    lag = max over operations of before + u + n / β

so two numbers describe it for every ``Δ`` and every ``free`` into which it fits. They compose: if
one interval runs within another, both are a maximum of sums. ``C_Δ`` is the lower envelope over the
sequences that fit, and only those on the Pareto *front* of ``(work, lag)`` can be on it. The
supplement has a table over ``Δ`` in slots instead, where each stage's ``u β`` has to be rounded, to
nothing if it is less than a slot.

A front has at most ``width`` sequences. Beyond that, those are dropped that matter least.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fxremat.jit import entry, helper
from fxremat.solvers.kernels import all_bytes, ck_bytes, in_slots, row_of
from fxremat.solvers.least import Least
from fxremat.solvers.numbers import Floats, Ints, Numbers

_NOTHING = (-1.0, -1.0)
"""Work and lag where no entry is to be explained."""


class Fronts(NamedTuple):
    """Pareto fronts of all intervals of stages, at every number of free slots.

    A front has the sequences of operations that no other beats in both ``work``, their seconds with
    recomputation, and ``lag``: with ``Δ`` bytes to prefetch by their end and ``free`` bytes free,
    they take ``max(work, lag + (Δ - free) * byte_s)`` seconds.

    Attributes:
        numbers: the chain.
        quantum: bytes of a slot.
        byte_s: seconds to prefetch a byte.
        sweep_lag: ``(L, L + 1)``, ``lag`` of the forwards ``s … s' - 1`` without gradient.
        most_s: ``(L,)``, seconds to prefetch all that may be missing while ``(s, ·)`` runs.
        work: ``(L (L + 1) / 2, slots + 1, width)`` seconds, ascending.
        lag: seconds, descending, of the same shape as ``work``.
        size: ``(L (L + 1) / 2, slots + 1)``, number of sequences of a front.
        lost: ``(L (L + 1) / 2,)``, number of sequences dropped because of ``width``.
        least: the sequences of least memory in bytes, for budgets that slots are too coarse for.
        least_lag: ``(L, L)``, lags of the sequences of least memory.
    """

    numbers: Numbers
    quantum: int
    byte_s: float
    sweep_lag: Floats
    most_s: Floats
    work: Floats
    lag: Floats
    size: Ints
    lost: Ints
    least: Least
    least_lag: Floats


@helper
def _insert(work: Floats, lag: Floats, size: int, new_work: float, new_lag: float) -> int:
    """Insert an entry into a Pareto front unless it is dominated, and return the front's new size.

    Entries that it dominates are dropped. ``work`` and ``lag`` have space for one more.
    """
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
    # The new sequence dominates the entries at … end - 1.
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


@helper
def _thin(work: Floats, lag: Floats, size: int) -> int:
    """Drop an entry of a Pareto front, and return the front's new size.

    It is the one without which the least time of the front rises least, never the first or last.
    """
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


@helper
def _is_dominated(work: Floats, lag: Floats, size: int, new_work: float, new_lag: float) -> bool:
    """Return whether an entry of the front has at most the work and the lag of the new one."""
    for k in range(size):
        if work[k] > new_work:
            return False
        if lag[k] <= new_lag:
            return True
    return False


@helper
def _of_all(fronts: Fronts, s: int, t: int, work: float, lag: float) -> tuple[float, float]:
    """Return work and lag of a sequence that runs stage ``s`` around one of stages ``s + 1 … t``.

    The forward of stage ``s`` keeps its saved set until its backward.

    Args:
        fronts: the fronts, with definitions of work and lag.
        s, t: the interval.
        work, lag: those of the sequence between.
    """
    n = fronts.numbers
    byte_s = fronts.byte_s
    forward_s = n.prefix_s[s + 1] - n.prefix_s[s]
    before = forward_s + work
    takes = before + n.backward_s[s, 0]
    lags = forward_s + (n.gradient[t] + n.keep[s, 0]) * byte_s
    lags = max(lags, forward_s + lag + n.saved[s, 0] * byte_s)
    return takes, max(lags, takes + n.back[s, 0] * byte_s)


@helper
def _front(
    fronts: Fronts, s: int, t: int, m: int, want: tuple[float, float], work: Floats, lag: Floats
) -> tuple[int, int, int, int]:
    """Compute the Pareto front of stages ``s … t``, or explain how an entry of it is composed.

    Args:
        fronts: fronts of all shorter intervals.
        s, t, m: the interval and its slots.
        want: work and lag of the entry to explain; ``_NOTHING`` to compute the front.
        work, lag: buffers for ``width + 1`` entries.

    Returns:
        The size of the front, and three numbers that explain the entry: ``s``, the entry inside
        ``F_all s`` and -1; or the cut, the entry of the interval after it and of the one before it.
        All three are -1 if nothing is explained.
    """
    n = fronts.numbers
    count, width = n.gradient.size, fronts.work.shape[2]
    fills = want[0] < 0.0
    # Whatever can be missing, only the work counts if the lag is less than this.
    floor = m * fronts.quantum * fronts.byte_s - fronts.most_s[s]
    size = 0
    left = m - in_slots(n.saved[s, 0], fronts.quantum)
    if min(left, m - in_slots(all_bytes(n, s, t, 0), fronts.quantum)) >= 0:
        inner = row_of(s + 1, t, count)
        for i in range(fronts.size[inner, left]):
            made = _of_all(fronts, s, t, fronts.work[inner, left, i], fronts.lag[inner, left, i])
            if made[0] == want[0] and made[1] == want[1]:
                return size, s, i, -1
            size = _insert(work, lag, size, made[0], made[1])
    for cut in range(s + 1, t + 1):
        left = m - in_slots(n.step[s, cut], fronts.quantum)
        if min(left, m - in_slots(ck_bytes(n, s, cut, t), fronts.quantum)) < 0:
            continue
        late, early = row_of(cut, t, count), row_of(s, cut - 1, count)
        lates, earlies = fronts.size[late, left], fronts.size[early, m]
        if lates == 0 or earlies == 0:
            continue
        sweep_s = n.prefix_s[cut] - n.prefix_s[s]
        first = fronts.sweep_lag[s, cut] + n.gradient[t] * fronts.byte_s
        step_s = n.step[s, cut] * fronts.byte_s
        late_work, late_lag = fronts.work[late, left], fronts.lag[late, left]
        early_work, early_lag = fronts.work[early, m], fronts.lag[early, m]
        # No pair is better than the best work of each with the best lag of each.
        least_s = sweep_s + late_work[0] + early_work[0]
        least_lag = max(first, sweep_s + late_lag[lates - 1] + step_s)
        least_lag = max(least_lag, sweep_s + late_work[0] + early_lag[earlies - 1])
        if fills and _is_dominated(work, lag, size, least_s, max(least_lag, least_s + floor)):
            continue
        for i in range(lates):
            before = sweep_s + late_work[i]
            lag_so_far = max(first, sweep_s + late_lag[i] + step_s)
            for j in range(earlies):
                takes = before + early_work[j]
                lags = max(lag_so_far, before + early_lag[j], takes + floor)
                if fills:
                    size = _insert(work, lag, size, takes, lags)
                    if size > width:
                        size = _thin(work, lag, size)
                        fronts.lost[row_of(s, t, count)] += 1
                elif takes == want[0] and lags == want[1]:
                    return size, cut, i, j
    return size, -1, -1, -1


@entry
def fill_fronts(fronts: Fronts, distance: int, begin: int, stride: int) -> None:
    """Fill the fronts of intervals ``(s, s + distance)`` with ``s = begin, begin + stride, …``.

    Requires:
        All shorter intervals are filled.
    """
    n, width = fronts.numbers, fronts.work.shape[2]
    work = np.empty(width + 1)
    lag = np.empty(width + 1)
    for s in range(begin, n.gradient.size - distance, stride):
        row = row_of(s, s + distance, n.gradient.size)
        for m in range(fronts.size.shape[1]):
            size = 0
            if distance:
                size, _, _, _ = _front(fronts, s, s + distance, m, _NOTHING, work, lag)
            elif m >= in_slots(n.leaf_bytes[s, 0], fronts.quantum):
                takes = n.leaf_s[s, 0]
                size = _insert(work, lag, size, takes, takes + n.leaf_bytes[s, 0] * fronts.byte_s)
            fronts.size[row, m] = size
            fronts.work[row, m, :size] = work[:size]
            fronts.lag[row, m, :size] = lag[:size]


@entry
def explain(fronts: Fronts, s: int, t: int, m: int, k: int) -> tuple[int, int, int]:
    """Return of which parts entry ``k`` of the front of ``(s, t)`` consists, for ``s < t``.

    The front is computed again.

    Args:
        s, t, m: the interval and its slots.
        k: index of the entry.

    Returns:
        ``s``, the entry inside ``F_all s``, and -1; or the cut, the entry of the interval after it,
        and the entry of the interval before it.
    """
    row, width = row_of(s, t, fronts.numbers.gradient.size), fronts.work.shape[2]
    want = fronts.work[row, m, k], fronts.lag[row, m, k]
    _, cut, late, early = _front(fronts, s, t, m, want, np.empty(width + 1), np.empty(width + 1))
    return cut, late, early


@entry
def fill_least_lags(fronts: Fronts) -> None:
    """Fill ``fronts.least_lag``, the lags of the sequences of least memory of all intervals."""
    n, least, lag, byte_s = fronts.numbers, fronts.least, fronts.least_lag, fronts.byte_s
    for s in range(n.gradient.size - 1, -1, -1):
        lag[s, s] = n.leaf_s[s, 0] + n.leaf_bytes[s, 0] * byte_s
        for t in range(s + 1, n.gradient.size):
            cut = least.choice[s, t]
            if cut == s:
                lag[s, t] = _of_all(fronts, s, t, least.seconds[s + 1, t], lag[s + 1, t])[1]
                continue
            sweep_s = n.prefix_s[cut] - n.prefix_s[s]
            first = fronts.sweep_lag[s, cut] + n.gradient[t] * byte_s
            late = sweep_s + lag[cut, t] + n.step[s, cut] * byte_s
            lag[s, t] = max(first, late, sweep_s + least.seconds[cut, t] + lag[s, cut - 1])
