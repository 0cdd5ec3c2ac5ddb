"""Local search on the exact evaluation: keep single storages where that pays.

A solver of chains keeps whole boundaries and, of a saved set, what an option names. It
cannot keep a small tensor from inside a residual block and drop the large stream beside
it, nor know that two stages hold the same storage, and it rounds sizes up. Here single
storages are kept from their first computation on; recomputations that then are not needed
disappear, and with them what was kept for those alone.

Everything that is run again leads, step by step, to something that a backward reads. What
every such way out of an operation goes through post-dominates it: with that held, the
operation does not run, and what was kept for the operation alone is free. In the tree of
nearest post-dominators both are sums over all that lies below.

An effect frees at least what is said, and gains as much, as long as operations are charged
alike in forwards and rebuilds: one that runs again several times may vanish from some of its
calls only, which is not counted, nor is a forward that becomes a rebuild as what stands between
it and its backward vanishes.
"""

from __future__ import annotations

import numpy as np

from fxremat.ir.schedule import BACKWARD, KINDS
from fxremat.jit import njit
from fxremat.planner.extract import DIRECT, INPUTS, NODES, READS, REBUILDS
from fxremat.planner.places import COLUMNS, At, Flags, Floats, Ints, Packed
from fxremat.planner.replay import (
    AT_TURN,
    BLOCK,
    COUNT,
    ENDED,
    MOST_HELD,
    OK,
    OP,
    PEAK,
    REBUILT,
    TURN,
    evaluate,
)

_OUT, _UNSET = -1, -2
"""Stands for the backward, where all ways out end, and for no way looked at yet."""


def find_effects(
    data: Ints,
    seconds: Floats,
    at: At,
    codes: Ints,
    calls: Ints,
    groups: Ints,
    nbytes: Ints,
    worth: Floats,
) -> int:
    """The effect of holding the results of each operation that the last evaluation runs again.

    Args:
        data, seconds, at, codes, calls: of that evaluation.
        groups: ``F``, the operation of each effect, what is worth most first. It stands for all
            whose results are values or views of its own.
        nbytes: ``F``, the size of those that are not held over the turn in any case.
        worth: ``F``, seconds gained a byte more, below the peak as it is counted as none.

    Returns how many there are.
    """
    _clear(data, seconds, at)
    _note_runs(data, seconds, at.packed, calls)
    _build_tree(data, seconds, at.packed)
    _note_saved(data, at.packed)
    most = _highest(calls[PEAK, : data[at.total + COUNT]])
    count = _weigh(data, seconds, at.packed, codes, calls, most, groups, nbytes, worth)
    order = np.argsort(-worth[:count], kind="stable")
    for each in (groups, nbytes, worth):
        each[:count] = each[:count][order]
    return count


def _clear(data: Ints, seconds: Floats, at: At) -> None:
    """Nothing is noted yet."""
    forward, storages, stages = at.forward_count, at.storage_count, at.stages
    data[at.ran : at.ran + forward] = data[at.direct : at.direct + forward] = 0
    seconds[at.again_s : at.again_s + forward] = 0.0
    data[at.there : at.there + storages] = 0
    data[at.above : at.above + storages] = _UNSET
    data[at.stays : at.stays + storages] = data[at.settled : at.settled + storages]
    data[at.begin : at.begin + stages] = -1
    data[at.room : at.room + stages] = 0


@njit(cache=True, nogil=True)
def _weigh(
    data: Ints,
    seconds: Floats,
    packed: Packed,
    codes: Ints,
    calls: Ints,
    most: Ints,
    groups: Ints,
    nbytes: Ints,
    worth: Floats,
) -> int:
    """As ``find_effects``, in the order of the operations, of which all is noted."""
    at: At = packed[0]
    _add_up(data, seconds, at)
    _find_room(data, at, codes, calls, most)
    count = 0
    for group in range(at.forward_count - 1, -1, -1):
        if data[at.parent + group] == _UNSET or seconds[at.gained_s + group] <= 0.0:
            continue
        if _is_unheld(data, at, group):
            continue
        made, more = _results(data, at, group)
        if made:
            groups[count], nbytes[count] = group, more
            more -= data[at.freed + group] + data[at.room + data[at.stage + group]]
            worth[count] = seconds[at.gained_s + group] / max(more, 1)
            count += 1
    return count


@njit(inline="always")
def _is_unheld(data: Ints, at: At, group: int) -> bool:
    """Return whether a constraint forbids to hold results of ``group``."""
    found = False
    for i in range(data[at.members + group], data[at.members + group + 1]):
        found = found or data[at.unheld + data[i]] == 1
    return found


@njit(inline="always")
def mark_results(data: Ints, at: At, group: int, held: Flags) -> None:
    """Mark in ``held`` the tensors that lie in what holding the results of ``group`` holds."""
    _results(data, at, group)
    stage = data[at.stage + group]
    stamp = data[at.marks]
    for node in range(data[at.forward + stage], data[at.forward + stage + 1]):
        if not data[at.tensor + node]:
            continue
        inside = True
        for k in range(data[at.storages + node], data[at.storages + node + 1]):
            inside = inside and data[at.marked + data[k]] == stamp
        if inside:
            held[node] = 1


@njit(inline="always")
def _results(data: Ints, at: At, group: int) -> tuple[int, int]:
    """Mark the storages that ``group`` makes when it runs again.

    Returns how many they are, and the bytes of those that are not there at the turn.
    """
    data[at.marks] += 1
    stamp = data[at.marks]
    count = nbytes = 0
    for i in range(data[at.members + group], data[at.members + group + 1]):
        if not data[at.ran + data[i]]:
            continue
        for k in range(data[at.makes + data[i]], data[at.makes + data[i] + 1]):
            storage = data[k]
            if data[at.marked + storage] != stamp:
                data[at.marked + storage] = stamp
                count += 1
                if not data[at.there + storage]:
                    nbytes += data[at.nbytes + storage]
    return count, nbytes


@njit(cache=True, nogil=True)
def _note_runs(data: Ints, seconds: Floats, packed: Packed, calls: Ints) -> None:
    """What runs again, for how long, and what backwards read themselves."""
    at: At = packed[0]
    forward = at.forward_count
    for call in range(data[at.total + COUNT]):
        lists = at.block + COLUMNS * calls[BLOCK, call]
        rebuilds = calls[REBUILT, call] or data[lists + REBUILDS]
        once_s = at.once_s + rebuilds * at.nodes
        for i in range(data[lists + NODES], data[lists + INPUTS]):
            node, again = data[i] // 2, data[i] % 2
            if again and node < forward:
                data[at.ran + node] = 1
                seconds[at.again_s + node] += seconds[once_s + node]
        for i in range(data[lists + DIRECT], data[lists + READS]):
            data[at.direct + data[i]] = 1


@njit(inline="always")
def _common(data: Ints, at: At, one: int, two: int) -> int:
    """The nearest that all ways out of both go through; ``one`` may be unset."""
    if one == _UNSET:
        return two
    while one != two:
        if min(one, two) == _OUT:
            return _OUT
        if data[at.depth + one] >= data[at.depth + two]:
            one = data[at.parent + one]
        else:
            two = data[at.parent + two]
    return one


@njit(cache=True, nogil=True)
def _build_tree(data: Ints, seconds: Floats, packed: Packed) -> None:
    """Find for each group that runs again the nearest that all its ways out go through.

    What it gains alone is summed up, too. A group that runs nothing again has no parent.
    """
    at: At = packed[0]
    for group in range(at.forward_count - 1, -1, -1):
        data[at.parent + group] = _UNSET
        runs, out, parent, gained_s = False, False, _UNSET, 0.0
        for i in range(data[at.members + group], data[at.members + group + 1]):
            node = data[i]
            if not data[at.ran + node]:
                continue
            runs = True
            gained_s += seconds[at.again_s + node]
            out = out or data[at.direct + node] == 1
            for k in range(data[at.users + node], data[at.users + node + 1]):
                above = data[at.group + data[k]]
                if not data[at.ran + data[k]] or above == group:
                    continue
                if above < group:  # an operation before it reads a result of it: no tree has that
                    out = True
                elif not out:
                    parent = _common(data, at, parent, above)
        if runs:
            if out or parent == _UNSET:
                parent = _OUT
            data[at.parent + group] = parent
            data[at.depth + group] = 1 if parent == _OUT else data[at.depth + parent] + 1
            data[at.freed + group] = 0
            seconds[at.gained_s + group] = gained_s


@njit(cache=True, nogil=True)
def _note_saved(data: Ints, packed: Packed) -> None:
    """Charge what is held over the turn for operations that run again to what these lead to."""
    at: At = packed[0]
    storages = at.storage_count
    for node in range(at.nodes):
        if not data[at.saved + node]:
            continue
        for k in range(data[at.storages + node], data[at.storages + node + 1]):
            storage = data[k]
            data[at.there + storage] = 1
            if node >= at.forward_count or data[at.direct + node]:
                data[at.stays + storage] = 1
                continue
            for j in range(data[at.users + node], data[at.users + node + 1]):
                if data[at.ran + data[j]]:
                    above = data[at.group + data[j]]
                    data[at.above + storage] = _common(data, at, data[at.above + storage], above)
    for storage in range(storages):
        above = data[at.above + storage]
        if above >= 0 and not data[at.stays + storage]:
            data[at.freed + above] += data[at.nbytes + storage]


@njit(inline="always")
def _add_up(data: Ints, seconds: Floats, at: At) -> None:
    """Add to what each group gains and frees what lies below it, which comes before it."""
    for group in range(at.forward_count):
        parent = data[at.parent + group]
        if parent >= 0:
            data[at.freed + parent] += data[at.freed + group]
            seconds[at.gained_s + parent] += seconds[at.gained_s + group]


@njit(inline="always")
def _find_room(data: Ints, at: At, codes: Ints, calls: Ints, most: Ints) -> None:
    """For each stage: bytes below the peak at the worst moment until it is first run again."""
    count, turn = data[at.total + COUNT], data[at.total + TURN]
    for call in range(count):
        code = codes[calls[OP, call]]
        stage = code // KINDS
        begin = data[at.begin + stage]
        if begin == -1:
            data[at.begin + stage] = call
            continue
        again = data[at.block + COLUMNS * calls[BLOCK, call] + REBUILDS]
        if begin == -2 or (code % KINDS == BACKWARD and not again):
            continue
        level = 0
        while 2 << level <= call - begin:
            level += 1
        peak = max(most[level, begin], most[level, call - (1 << level)])
        if begin < turn <= call:
            peak = max(peak, data[at.total + AT_TURN])
        data[at.room + stage] = data[at.total + MOST_HELD] - peak
        data[at.begin + stage] = -2  # found


def _highest(values: Ints) -> Ints:
    """Row ``i``: the greatest of each ``2^i`` values in a row."""
    most = np.zeros((max(values.size.bit_length(), 1), values.size), dtype=np.int64)
    most[0] = values
    for level in range(1, len(most)):
        half = 1 << (level - 1)
        count = values.size - 2 * half + 1
        below = most[level - 1]
        np.maximum(below[:count], below[half : half + count], out=most[level, :count])
    return most


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
