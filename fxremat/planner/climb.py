"""Local search on the exact evaluation: keep single storages where that pays.

A solver of chains keeps whole boundaries and, of a saved set, what an option names. It
cannot keep a small tensor from inside a residual block and drop the large stream beside
it, nor know that two stages hold the same storage, and it rounds sizes up. Here single
storages are kept from their first computation on; recomputations that then are not needed
disappear, and with them what was kept for those alone.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from fxremat.planner.effects import find_effects, mark_results
from fxremat.planner.places import At, Flags, Floats, Ints, Packed
from fxremat.planner.replay import ENDED, MOST_HELD, OK, evaluate

MOST_STEPS = 150
"""Times that a climb takes something on at most."""

MOST_FAILURES = 10
"""Changes in a row that gain nothing before a climb ends."""

STEP_SHARE = 1 / 128
"""Of the start's peak: what a step may take on together if the first is not larger."""

ALIKE = 0.8
"""Changes are taken together that gain this part a byte of what the best one does."""


def climb(
    data: Ints,
    seconds: Floats,
    at: At,
    codes: Ints,
    start: Flags,
    limit_bytes: int,
    found: Flags,
    found_bytes: Ints,
    found_s: Floats,
) -> int:
    """Keep more and more of what is computed again, what gains most a byte first.

    What fits below the present peak goes before what raises it. Layers that are alike
    have changes that are alike: a few are taken at once.

    Args:
        data, seconds, at: the step.
        codes: the schedule.
        start: ``N``, what is held to begin with.
        limit_bytes: the climb ends with the first step whose peak is above.
        found: ``(MOST_STEPS, N)``, what is held after each step up, each faster than before.
        found_bytes, found_s: ``MOST_STEPS``, peaks and seconds of these.

    Returns how many there are. An evaluation that went wrong ends it, as ``At.total`` says then.
    """
    calls = np.zeros((5, codes.size), dtype=np.int64)
    call_s = np.zeros(codes.size)
    groups = np.zeros(at.forward_count, dtype=np.int64)
    nbytes = np.zeros(at.forward_count, dtype=np.int64)
    worth = np.zeros(at.forward_count)
    refused = np.zeros(at.forward_count, dtype=np.uint8)
    best, tried = start.copy(), start.copy()
    best_s = evaluate(data, seconds, at, codes, best, calls, call_s)
    step_bytes = int(data[at.total + MOST_HELD] * STEP_SHARE)
    count = find_effects(data, seconds, at, codes, calls, groups, nbytes, worth)
    steps = failures = first = 0
    while steps < MOST_STEPS and failures < MOST_FAILURES:
        while first < count and refused[groups[first]]:
            first += 1
        if first >= count:
            break
        tried_s = best_s
        effects = groups, nbytes, worth, refused, step_bytes
        tried[:] = best
        if _mark_alike(data, at.packed, *effects, first, count, tried) > 1:
            tried_s = evaluate(data, seconds, at, codes, tried, calls, call_s)
            if tried_s >= best_s and data[at.total + ENDED] == OK:
                tried[:] = best
                _mark_alike(data, at.packed, *effects, first, first + 1, tried)
        if tried_s >= best_s and data[at.total + ENDED] == OK:
            tried_s = evaluate(data, seconds, at, codes, tried, calls, call_s)
        if data[at.total + ENDED] != OK:
            return steps
        if tried_s >= best_s:
            refused[groups[first]] = 1
            failures += 1
            continue
        best[:] = tried
        best_s = tried_s
        found[steps] = best
        found_bytes[steps], found_s[steps] = data[at.total + MOST_HELD], best_s
        steps += 1
        if found_bytes[steps - 1] > limit_bytes:
            break
        failures = first = 0
        count = find_effects(data, seconds, at, codes, calls, groups, nbytes, worth)
    return steps


@njit(cache=True, nogil=True)
def _mark_alike(
    data: Ints,
    packed: Packed,
    groups: Ints,
    nbytes: Ints,
    worth: Floats,
    refused: Flags,
    step_bytes: int,
    first: int,
    count: int,
    tried: Flags,
) -> int:
    """Mark in ``tried`` effect ``first`` and those up to ``count`` that are alike; how many."""
    at: At = packed[0]
    left_bytes = step_bytes
    taken = 0
    for i in range(first, count):
        if i > first:
            if refused[groups[i]]:
                continue
            if worth[i] < ALIKE * worth[first] or nbytes[i] > left_bytes:
                break
        mark_results(data, at, groups[i], tried)
        left_bytes -= nbytes[i]
        taken += 1
    return taken
