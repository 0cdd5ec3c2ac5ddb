"""Local search on the exact evaluation: hold single storages where that saves the most time.

A solver of chains keeps whole boundaries, and of a saved set what a save option names. It cannot
keep a small tensor inside a residual block and drop the large stream next to it, and it rounds
sizes up. Local search holds single storages from their first computation on. Recomputations that
become unnecessary disappear, and with them the storages that were kept only for these.

Each recomputed operation leads, step by step, to a value that a backward reads. An operation on all
of these paths post-dominates it: if its results are held, neither runs again, and storages that are
held only for them are freed. In the tree of immediate post-dominators, the seconds gained and the
bytes freed are sums over a subtree.

The predicted effect is a lower bound if operations cost the same in forwards and in rebuilds. Not
counted are operations that disappear from some of their calls only, and forwards that become
rebuilds because nothing is left between them and their backward.
"""

from __future__ import annotations

import numpy as np

from fxremat.effort import Effort
from fxremat.ir.schedule import BACKWARD, KINDS
from fxremat.jit import entry, helper, pointer
from fxremat.planner.replay.extract import DIRECT, INPUTS, NODES, READS, REBUILDS
from fxremat.planner.replay.places import COLUMNS, At, Flags, Floats, Ints, Packed
from fxremat.planner.replay.replay import (
    AT_LOSS_POINT,
    BLOCK,
    COUNT,
    ENDED,
    LOSS_POINT,
    MOST_HELD,
    OK,
    OP,
    PEAK,
    REBUILT,
    evaluate,
)

_OUT, _UNSET = -1, -2
"""``_OUT`` stands for the backward, where all paths end; ``_UNSET`` for an operation without a path
yet."""


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
    """Find the seconds per byte gained by holding the results of each recomputed operation.

    The operations are those that the last evaluation recomputes.

    Args:
        data, seconds, at: the arrays of the step.
        codes, calls: the schedule that was evaluated last, and its calls.
        groups: shape ``(F,)``, filled with the operation of each effect, the most valuable first.
            It stands for all operations whose results are its values or views of them.
        nbytes: shape ``(F,)``, filled with the bytes to hold that are not held across the loss
            point anyway.
        worth: shape ``(F,)``, filled with seconds gained per byte added above the present peak.

    Returns:
        The number of effects.
    """
    _reset_working_arrays(data, seconds, at)
    _note_runs(data, seconds, at.packed, calls)
    _build_tree(data, seconds, at.packed)
    _note_saved(data, at.packed)
    most = _highest(calls[PEAK, : data[at.total + COUNT]])
    count = _weigh(data, seconds, at.packed, codes, calls, most, groups, nbytes, worth)
    order = np.argsort(-worth[:count], kind="stable")
    for each in (groups, nbytes, worth):
        each[:count] = each[:count][order]
    return count


def _reset_working_arrays(data: Ints, seconds: Floats, at: At) -> None:
    forward, storages, stages = at.forward_count, at.storage_count, at.stages
    data[at.ran : at.ran + forward] = data[at.direct : at.direct + forward] = 0
    seconds[at.again_s : at.again_s + forward] = 0.0
    data[at.crosses : at.crosses + storages] = 0
    data[at.dominator : at.dominator + storages] = _UNSET
    data[at.stays : at.stays + storages] = data[at.always_held : at.always_held + storages]
    data[at.begin : at.begin + stages] = -1
    data[at.room : at.room + stages] = 0


@entry
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
    """Fill ``groups``, ``nbytes`` and ``worth`` of :func:`find_effects`, unsorted; return how many.

    ``most`` is the table of :func:`_highest` of the peaks of calls.
    """
    at: At = packed[0]
    data, seconds = pointer(data, 0), pointer(seconds, 0)
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


@helper
def _is_unheld(data: Ints, at: At, group: int) -> bool:
    """Return whether plans are forbidden to hold some result of the operations in ``group``."""
    is_unheld = False
    for i in range(data[at.members + group], data[at.members + group + 1]):
        is_unheld = is_unheld or data[at.unheld + data[i]] == 1
    return is_unheld


@entry
def mark_results(data: Ints, at: At, group: int, held: Flags) -> None:
    """Set ``held`` to 1 for the tensors in storages that a recomputation of ``group`` allocates.

    ``group`` is an operation with its values and views of them.
    """
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


@helper
def _results(data: Ints, at: At, group: int) -> tuple[int, int]:
    """Mark, in ``at.marked``, the storages that a recomputation of ``group`` allocates.

    Returns:
        The number of storages, and the bytes of those that are not held across the loss point.
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
                if not data[at.crosses + storage]:
                    nbytes += data[at.nbytes + storage]
    return count, nbytes


@entry
def _note_runs(data: Ints, seconds: Floats, packed: Packed, calls: Ints) -> None:
    """Write to ``at.ran`` and ``at.again_s`` what the last evaluation recomputes, and its seconds.

    What operations of a backward read directly is written to ``at.direct``.
    """
    at: At = packed[0]
    data, seconds = pointer(data, 0), pointer(seconds, 0)
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


@helper
def _common(data: Ints, at: At, one: int, two: int) -> int:
    """Return the nearest common post-dominator of two groups; ``two`` if ``one`` is unset.

    A group is an operation with its values and views of them.
    """
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


@entry
def _build_tree(data: Ints, seconds: Floats, packed: Packed) -> None:
    """Write the immediate post-dominator of each rerun group of operations to ``at.parent``.

    The seconds of the group are written to ``at.gained_s``. A group that does not run again has no
    parent.
    """
    at: At = packed[0]
    data, seconds = pointer(data, 0), pointer(seconds, 0)
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
                if above < group:  # an earlier operation reads its result: not a tree
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


@entry
def _note_saved(data: Ints, packed: Packed) -> None:
    """Fill ``at.freed`` with the bytes that holding an operation's result would free.

    These are storages that are held only for recomputations. The bytes of each are added to the
    entry of the common post-dominator of these recomputations: if that result is held, none of them
    runs.
    """
    at: At = packed[0]
    data = pointer(data, 0)
    storages = at.storage_count
    for node in range(at.nodes):
        if not data[at.saved + node]:
            continue
        for k in range(data[at.storages + node], data[at.storages + node + 1]):
            storage = data[k]
            data[at.crosses + storage] = 1
            if node >= at.forward_count or data[at.direct + node]:
                data[at.stays + storage] = 1
                continue
            for j in range(data[at.users + node], data[at.users + node + 1]):
                if data[at.ran + data[j]]:
                    above = data[at.group + data[j]]
                    dominator = data[at.dominator + storage]
                    data[at.dominator + storage] = _common(data, at, dominator, above)
    for storage in range(storages):
        above = data[at.dominator + storage]
        if above >= 0 and not data[at.stays + storage]:
            data[at.freed + above] += data[at.nbytes + storage]


@helper
def _add_up(data: Ints, seconds: Floats, at: At) -> None:
    """Add ``at.gained_s`` and ``at.freed`` of each group to those of its parent.

    They then are sums over subtrees. A child comes before its parent.
    """
    for group in range(at.forward_count):
        parent = data[at.parent + group]
        if parent >= 0:
            data[at.freed + parent] += data[at.freed + group]
            seconds[at.gained_s + parent] += seconds[at.gained_s + group]


@helper
def _find_room(data: Ints, at: At, codes: Ints, calls: Ints, most: Ints) -> None:
    """Write to ``at.room`` the bytes that are free below the peak while a stage's values are held.

    They are held from the stage's first run until it first runs again.
    """
    count, loss_point = data[at.total + COUNT], data[at.total + LOSS_POINT]
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
        if begin < loss_point <= call:
            peak = max(peak, data[at.total + AT_LOSS_POINT])
        data[at.room + stage] = data[at.total + MOST_HELD] - peak
        data[at.begin + stage] = -2  # done


def _highest(values: Ints) -> Ints:
    """Return a table whose row ``i`` has the maximum of each window of ``2^i`` values."""
    most = np.zeros((max(values.size.bit_length(), 1), values.size), dtype=np.int64)
    most[0] = values
    for level in range(1, len(most)):
        half = 1 << (level - 1)
        count = values.size - 2 * half + 1
        below = most[level - 1]
        np.maximum(below[:count], below[half : half + count], out=most[level, :count])
    return most


def climb(
    data: Ints,
    seconds: Floats,
    at: At,
    codes: Ints,
    start: Flags,
    limit_bytes: int,
    effort: Effort,
    helds: Flags,
    found_bytes: Ints,
    found_s: Floats,
) -> int:
    """Local search: hold more and more of the storages that a schedule recomputes.

    Those that gain most seconds per byte come first, and changes that fit below the present peak
    before changes that raise it. Since similar layers have similar changes, a few of them are made
    at once.

    Args:
        data, seconds, at: the arrays of the step.
        codes: the schedule.
        start: shape ``(N,)``, the tensors that are held at the start.
        limit_bytes: the climb ends after the first step whose peak exceeds this.
        effort: limits the failures and the size of a step, and says which changes are similar.
        helds: shape ``(S, N)`` for at most S steps, filled with the tensors held after each step;
            each step is faster than the previous one.
        found_bytes, found_s: shape ``(S,)``, filled with their peaks and seconds.

    Returns:
        The number of steps. A failed evaluation ends the climb; ``At.total`` then says why.
    """
    calls = np.zeros((5, codes.size), dtype=np.int64)
    call_s = np.zeros(codes.size)
    groups = np.zeros(at.forward_count, dtype=np.int64)
    nbytes = np.zeros(at.forward_count, dtype=np.int64)
    worth = np.zeros(at.forward_count)
    refused = np.zeros(at.forward_count, dtype=np.uint8)
    best, tried = start.copy(), start.copy()
    best_s = evaluate(data, seconds, at, codes, best, calls, call_s)
    step_bytes = int(data[at.total + MOST_HELD] * effort.step_share)
    count = find_effects(data, seconds, at, codes, calls, groups, nbytes, worth)
    steps = failures = first = 0
    while steps < len(helds) and failures < effort.climb_failures:
        while first < count and refused[groups[first]]:
            first += 1
        if first >= count:
            break
        tried_s = best_s
        effects = groups, nbytes, worth, refused, step_bytes, effort.alike
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
        helds[steps] = best
        found_bytes[steps], found_s[steps] = data[at.total + MOST_HELD], best_s
        steps += 1
        if found_bytes[steps - 1] > limit_bytes:
            break
        failures = first = 0
        count = find_effects(data, seconds, at, codes, calls, groups, nbytes, worth)
    return steps


@entry
def _mark_alike(
    data: Ints,
    packed: Packed,
    groups: Ints,
    nbytes: Ints,
    worth: Floats,
    refused: Flags,
    step_bytes: int,
    alike: float,
    first: int,
    count: int,
    tried: Flags,
) -> int:
    """Mark in ``tried`` the tensors that effect ``first`` and similar ones hold.

    Args:
        data, packed: the arrays of the step.
        groups, nbytes, worth: the effects, as :func:`find_effects` gives them.
        refused: flags of groups that are not tried again.
        step_bytes: limit on the bytes of all effects together.
        alike: least worth of a similar effect, as a share of the first one's.
        first: index of the first effect.
        count: number of effects.
        tried: flags of tensors.

    Returns:
        The number of effects that were marked.
    """
    at: At = packed[0]
    data = pointer(data, 0)
    left_bytes = step_bytes
    taken = 0
    for i in range(first, count):
        if i > first:
            if refused[groups[i]]:
                continue
            if worth[i] < alike * worth[first] or nbytes[i] > left_bytes:
                break
        mark_results(data, at, groups[i], tried)
        left_bytes -= nbytes[i]
        taken += 1
    return taken
