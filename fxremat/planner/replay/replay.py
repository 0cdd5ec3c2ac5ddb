"""Compiled loops that find what a decision does to memory and time, operation by operation.

A schedule is read backwards. Every tensor is taken from the last earlier call that can return it;
every call returns only what is read later, and frees what nobody reads again. These calls are then
emitted (``planner.search.evaluator.program_of``).
"""

from __future__ import annotations

import numpy as np

from fxremat.ir.schedule import ALL, BACKWARD, KINDS
from fxremat.jit import entry, helper, pointer
from fxremat.planner.replay.extract import (
    ASKED,
    DIRECT,
    END,
    EVALUATIONS,
    FAILED,
    HANDED_BYTES,
    INPUTS,
    MISSED,
    NO_ROOM,
    NODES,
    NOTHING_ASKED,
    READS,
    STAMP,
    block_of,
    can_give,
    extract,
    list_operations,
    make_room,
    place_sums,
)
from fxremat.planner.replay.memory import footprint
from fxremat.planner.replay.places import (
    AGAIN,
    BACK,
    COLUMNS,
    FIRST,
    TABLE,
    At,
    Flags,
    Floats,
    Ints,
    Packed,
)

OK, UNMEASURED, UNTIMED, NEVER_COMPUTED, TOO_LONG = range(5)
"""How an evaluation ended. All but the first and the last come with a node."""

LATER, RETURNED, HANDED = 1, 2, 4
"""Why a tensor is needed: a later call reads it, or it is held at the end; the forward returns it;
it is a gradient that is handed over and released as soon as it is computed."""

STAYS = LATER | RETURNED
"""Reasons for which a tensor is held after the call that returns it."""

ROWS = 5
"""Number of rows of the array of calls."""
OP, PEAK, HELD, BLOCK, REBUILT = range(ROWS)
"""Rows of the array of calls: index of the operation in the schedule, peak during the call, bytes
held after it, its block, and whether it recomputes a stage whose backward comes next."""

COUNT, LOSS_POINT, MOST_HELD, AT_LOSS_POINT, AT_END, ENDED, NODE, LEFT = range(8)
"""Places in ``At.total``: number of calls, index of the first call of the backward, peak bytes,
bytes at the loss point and at the end, how the evaluation ended, the node it ended with, and the
number of codes that are left."""


def evaluate(
    data: Ints, seconds: Floats, at: At, codes: Ints, held: Flags, calls: Ints, call_s: Floats
) -> float:
    """Compute the memory and time of a schedule, and return the seconds of the step.

    Args:
        data, seconds, at: the arrays of the step.
        codes: the schedule.
        held: shape ``(N,)``, the forward tensors that are held from their first computation on.
        calls: shape ``(ROWS, C)``, where ``C`` is at least the number of ``codes``; filled with the
            calls.
        call_s: shape ``(C,)``, filled with the seconds of each call.

    Totals are written to ``At.total``, and what crosses the loss point to ``At.saved``. The seconds
    are infinite if there is no room for all blocks. Other results are invalid unless the evaluation
    ended with ``OK``.
    """
    make_room(data, at, codes.size)
    if codes.size > TABLE // 2:
        data[at.total + ENDED] = TOO_LONG
        return float(np.inf)
    data[at.counts + EVALUATIONS] += 1
    _begin(data, at.packed, codes, held)
    total_s = _walk(data, seconds, at, codes, held, calls, call_s)
    if total_s < np.inf:
        _write_outcome(data, at)
    return total_s


def _walk(
    data: Ints, seconds: Floats, at: At, codes: Ints, held: Flags, calls: Ints, call_s: Floats
) -> float:
    """Evaluate the calls of a schedule from the last to the first; return the seconds of the step.

    They are infinite if there is no room for its blocks.
    """
    data[at.counts + FAILED] = data[at.total + COUNT] = data[at.total + LOSS_POINT] = 0
    data[at.total + LEFT] = codes.size
    while (
        total_s := float(_go_on(data, seconds, at.packed, codes, held, calls, call_s))
    ) == MISSED:
        extract(data, seconds, at, held)
    return total_s


@entry
def _go_on(
    data: Ints,
    seconds: Floats,
    packed: Packed,
    codes: Ints,
    held: Flags,
    calls: Ints,
    call_s: Floats,
) -> float:
    """Go on with :func:`_walk` until its end or a missing block.

    Blocks are made by other kernels, so that these are compiled once, not once for each caller.

    Returns:
        The seconds of the step, infinity if there is no room, or ``MISSED`` if a block must be
        made.
    """
    at: At = packed[0]
    data, seconds, held = pointer(data, 0), pointer(seconds, 0), pointer(held, 0)
    last = (at.stages - 1) * KINDS + BACKWARD
    count, loss_point = data[at.total + COUNT], data[at.total + LOSS_POINT]
    following = codes[calls[OP, count - 1]] if count else -1
    for i in range(data[at.total + LEFT] - 1, -1, -1):
        stage, kind = codes[i] // KINDS, codes[i] % KINDS
        mode = BACK
        if kind != BACKWARD:
            mode = AGAIN if data[at.runs + stage] > 1 else FIRST
        block = block_of(data, at, held, stage, mode, data[at.keeps + stage])
        if block == MISSED:
            data[at.total + LEFT], data[at.total + COUNT], data[at.total + LOSS_POINT] = (
                i + 1,
                count,
                loss_point,
            )
            return MISSED
        if kind != BACKWARD:
            data[at.runs + stage] -= 1
        if block == NO_ROOM:
            data[at.total + ENDED] = TOO_LONG
            return np.inf
        if block != NOTHING_ASKED:
            outputs = _give(data, at, held, stage, mode)
            handed_bytes = data[at.counts + HANDED_BYTES]
            if data[at.block + COLUMNS * block + INPUTS] > data[at.block + COLUMNS * block + NODES]:
                rebuilds = mode == AGAIN and following == stage * KINDS + BACKWARD
                place = footprint(data, at, block, mode, outputs)
                calls[OP, count], calls[BLOCK, count] = i, block
                calls[PEAK, count] = data[place]
                calls[HELD, count] = data[place + 1] - handed_bytes
                calls[REBUILT, count] = rebuilds
                call_s[count] = _call_seconds(data, seconds, at, block, stage, mode, rebuilds)
                following = codes[i]
                count += 1
            lists = at.block + COLUMNS * block
            for k in range(data[lists + INPUTS], data[lists + DIRECT]):
                _ask(data, at, data[k], LATER)
            if codes[i] == last:
                loss_point = count
                for node in range(at.nodes):
                    data[at.saved + node] = data[at.needed + node] & (LATER | HANDED)
    return _end(data, at, calls, call_s, count, loss_point)


@helper
def _ask(data: Ints, at: At, node: int, why: int) -> None:
    """Note in ``at.needed`` that an earlier call has to return the tensor ``node``, and why."""
    if data[at.needed + node] & STAYS == 0 and why & STAYS:
        for i in range(data[at.storages + node], data[at.storages + node + 1]):
            data[at.alive + data[i]] += 1
    data[at.needed + node] |= why


@helper
def _give(data: Ints, at: At, held: Flags, stage: int, mode: int) -> int:
    """Write the tensors that a call returns to ``at.listed``, and return how many they are.

    They are no longer asked for. The bytes of gradients that are handed over right after the call
    are written to ``HANDED_BYTES``.
    """
    outputs = handed = 0
    data[at.counts + STAMP] += 1
    stamp = data[at.counts + STAMP]
    for i in range(list_operations(data, at, stage, mode)):
        node = data[at.listed + i]
        why = data[at.needed + node]
        if why != 0 and can_give(data, at, mode, held, node):
            handed += why == HANDED
            if why != HANDED:
                data[at.needed + node] = 0
                for k in range(data[at.storages + node], data[at.storages + node + 1]):
                    data[at.alive + data[k]] -= 1
                    data[at.read + data[k]] = stamp
            data[at.listed + outputs] = node
            outputs += 1
    data[at.counts + HANDED_BYTES] = 0
    if handed:
        _hand_over(data, at, outputs, stamp)
    return outputs


@helper
def _hand_over(data: Ints, at: At, outputs: int, stamp: int) -> None:
    """Add the bytes of gradients that are freed right after a call to ``HANDED_BYTES``.

    Left out are storages that anything else lies in.

    Requires: storages of the other outputs are marked in ``at.read`` with ``stamp``.
    """
    for i in range(outputs):
        node = data[at.listed + i]
        if data[at.needed + node] != HANDED:
            continue
        data[at.needed + node] = 0
        for k in range(data[at.storages + node], data[at.storages + node + 1]):
            storage = data[k]
            others = data[at.never_freed + storage] or data[at.alive + storage] > 0
            if not others and data[at.read + storage] != stamp:
                data[at.read + storage] = stamp
                data[at.counts + HANDED_BYTES] += data[at.nbytes + storage]


@entry
def _begin(data: Ints, packed: Packed, codes: Ints, held: Flags) -> None:
    """Reset the arrays for an evaluation of ``codes``, and ask for what the step returns."""
    at: At = packed[0]
    data, held = pointer(data, 0), pointer(held, 0)
    for node in range(at.nodes):
        data[at.needed + node] = data[at.saved + node] = 0
    for storage in range(at.storage_count):
        data[at.alive + storage] = 0
    for k in range(data[at.later], data[at.later + 1]):
        _ask(data, at, data[k], HANDED if data[at.handed + data[k]] else LATER)
        data[at.saved + data[k]] = 1
    for k in range(data[at.returned], data[at.returned + 1]):
        _ask(data, at, data[k], RETURNED)
    for stage in range(at.stages):
        data[at.keeps + stage] = data[at.runs + stage] = 0
        data[at.back + stage] = -1
    for i in range(codes.size):
        stage, kind = codes[i] // KINDS, codes[i] % KINDS
        if kind == BACKWARD:
            data[at.back + stage] = i
            continue
        data[at.runs + stage] += 1
        if kind >= ALL:
            data[at.keeps + stage] = kind - ALL
    for stage in range(at.stages):
        one = two = 0
        for node in range(data[at.forward + stage], data[at.forward + stage + 1]):
            if held[node]:
                one ^= data[at.random + 2 * at.width + node]
                two ^= data[at.random + 3 * at.width + node]
        data[at.held_hash + 2 * stage], data[at.held_hash + 2 * stage + 1] = one, two
    place_sums(data, at)


@helper
def _call_seconds(
    data: Ints, seconds: Floats, at: At, block: int, stage: int, mode: int, rebuilds: bool
) -> float:
    if mode == AGAIN:
        return float(seconds[at.block_s + 2 * block + rebuilds])
    if mode == BACK:
        return float(seconds[at.backward_s + stage] + seconds[at.block_s + 2 * block + 1])
    # The measurement includes all that a backward may read, such as rebuilt inputs of norms.
    total_s = float(seconds[at.forward_s + stage])
    lists = at.block + COLUMNS * block
    for k in range(data[at.inverses + stage], data[at.inverses + stage + 1]):
        runs = False
        for i in range(data[lists + NODES], data[lists + INPUTS]):
            runs = runs or data[i] // 2 == data[k]
        if not runs:
            if seconds[at.once_s + data[k]] < 0:
                data[at.counts + FAILED] = 1 + data[k]
            total_s -= seconds[at.once_s + data[k]]
    return total_s


@helper
def _end(data: Ints, at: At, calls: Ints, call_s: Floats, count: int, loss_point: int) -> float:
    """Reverse the calls, add up their memory into ``At.total``, and return the seconds of the step.

    ``count`` is the number of calls, ``loss_point`` the number of those in the backward.
    """
    for i in range(count // 2):
        j = count - 1 - i
        for row in range(ROWS):
            calls[row, i], calls[row, j] = calls[row, j], calls[row, i]
        call_s[i], call_s[j] = call_s[j], call_s[i]
    first = count - loss_point
    now = at_loss = data[at.context]
    peak, total_s = 0, 0.0
    for i in range(count):
        if i == first:
            at_loss = now + data[at.context + 1]
            now += data[at.context + 2]
        calls[PEAK, i] += now
        now += calls[HELD, i]
        calls[HELD, i] = now
        peak = max(peak, calls[PEAK, i])
        total_s += call_s[i]
    if first == count:  # the backward computes nothing: the loss point comes after all calls
        at_loss = now + data[at.context + 1]
        now += data[at.context + 2]
    at_end = now + data[at.context + 3]
    data[at.total + COUNT], data[at.total + LOSS_POINT] = count, first
    data[at.total + MOST_HELD] = max(peak, at_loss, at_end)
    data[at.total + AT_LOSS_POINT], data[at.total + AT_END] = at_loss, at_end
    return total_s


def _write_outcome(data: Ints, at: At) -> None:
    data[at.total + ENDED], data[at.total + NODE] = OK, 0
    needed, given = data[at.needed : at.needed + at.nodes], data[at.given : at.given + at.nodes]
    never = np.flatnonzero((needed != 0) & (given == 0))
    if never.size:
        data[at.total + ENDED], data[at.total + NODE] = NEVER_COMPUTED, never[-1]
    failed = data[at.counts + FAILED]
    if failed:
        data[at.total + ENDED] = UNTIMED if failed > 0 else UNMEASURED
        data[at.total + NODE] = abs(failed) - 1
        make_room(data, at, TABLE)  # drops all blocks: one has no bytes or seconds


def run_single_call(
    data: Ints,
    seconds: Floats,
    at: At,
    stage: int,
    mode: int,
    option: int,
    asked: Ints,
    kept: bool,
    inputs: Ints,
) -> tuple[int, int, int]:
    """Compute the memory of a single call of a stage, with nothing else held.

    Args:
        data, seconds, at: the arrays of the step.
        stage, mode, option: the stage, how it runs (``FIRST``, ``AGAIN`` or ``BACK``), and its save
            option.
        asked: the nodes that the call returns.
        kept: whether its inputs are held; otherwise each is freed after its last reader, even if it
            is given.
        inputs: shape ``(N,)``, filled with what the call reads.

    Returns:
        The peak and the bytes held after the call, less those at its start, and the number of
        inputs.
    """
    make_room(data, at, 1)
    needed = data[at.needed : at.needed + at.nodes]
    stays = data[at.never_freed : at.never_freed + at.storage_count]
    context = data[at.context : at.context + 4]
    saved = stays.copy(), context.copy()
    held = np.zeros(at.nodes, dtype=np.uint8)
    in_order = np.arange(at.stages - 1, -1, -1) * KINDS + BACKWARD
    _begin(data, at.packed, in_order, held)
    needed[:] = 0
    needed[asked] = LATER
    data[at.alive : at.alive + at.storage_count] = 0  # nothing is held elsewhere
    data[at.runs + stage] = 2 if mode == AGAIN else 1
    data[at.keeps + stage] = option
    codes = np.array([stage * KINDS + (BACKWARD if mode == BACK else ALL)])
    calls, call_s = np.zeros((ROWS, 1), dtype=np.int64), np.zeros(1)
    stays[:], context[:] = kept, 0
    total_s = _walk(data, seconds, at, codes, held, calls, call_s)
    stays[:], context[:] = saved
    if total_s == np.inf:
        return 0, 0, 0
    needed[:] = 0  # pinned values exist already
    _write_outcome(data, at)
    if not data[at.total + COUNT]:
        return 0, 0, 0
    lists = at.block + COLUMNS * calls[BLOCK, 0]
    read = data[data[lists + INPUTS] : data[lists + DIRECT]]
    inputs[: read.size] = read
    return int(calls[PEAK, 0]), int(calls[HELD, 0]), read.size


@entry
def find_lives(data: Ints, packed: Packed, calls: Ints, last: Ints, after: Ints) -> None:
    """Find the calls of the last evaluation that use each storage around the loss point.

    Args:
        data, packed: the arrays of the step.
        calls: the calls of that evaluation.
        last: shape ``(S,)``, filled with the last forward call that uses the storage, or -1.
        after: shape ``(S,)``, filled with the first backward call that reads it, or -1.
    """
    at: At = packed[0]
    data = pointer(data, 0)
    last[:] = after[:] = -1
    loss_point = data[at.total + LOSS_POINT]
    for call in range(data[at.total + COUNT]):
        lists = at.block + COLUMNS * calls[BLOCK, call]
        for k in range(data[lists + READS], data[lists + END]):
            if call < loss_point:
                last[data[k]] = call
            elif after[data[k]] == -1:
                after[data[k]] = call
        if call < loss_point:
            for i in range(data[lists + ASKED], data[lists + NODES]):
                node = data[i]
                for k in range(data[at.storages + node], data[at.storages + node + 1]):
                    last[data[k]] = call
