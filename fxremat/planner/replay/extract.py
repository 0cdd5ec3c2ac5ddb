"""Compiled loops that find the block of a call: the operations that it runs.

A block depends on few things: stage, mode and save option of the call, the values that are asked of
it, and what is held. Schedules differ in a few stages, so each block is extracted once and looked
up by a 128-bit hash of these.

All numbers lie in one array of integers and one of seconds, at the places that ``At`` has. If each
array were an attribute, its reference would be counted at each access, which takes longer than most
accesses. Loops that are called from Python, rather than from another loop, are compiled once.
"""

from __future__ import annotations

from fxremat.jit import entry, helper, pointer
from fxremat.planner.replay.places import (
    AGAIN,
    BACK,
    COLUMNS,
    ROOM,
    TABLE,
    TOP,
    At,
    Flags,
    Floats,
    Ints,
    Packed,
    find,
    mixed,
)

ASKED, NODES, INPUTS, DIRECT, READS, END, REBUILDS = range(7)
"""Columns of a block: where each of its lists begins, and whether a backward recomputes operations.
"""

BLOCKS, FOOTPRINTS, STAMP, FAILED, EVALUATIONS, HANDED_BYTES = range(2, 8)
"""Places in ``At.counts``, besides ``TOP`` and ``ROOM``: number of blocks and of footprints, the
last mark, what was missing, number of evaluations, and bytes that the last call hands over."""

NOTHING_ASKED, NO_ROOM, MISSED = -1, -2, -3
"""Returned in place of a block."""


def make_room(data: Ints, at: At, calls: int) -> None:
    """Empty the cache of blocks if there may be no room for the blocks of ``calls`` more calls."""
    full = data[at.counts + BLOCKS] + calls > TABLE // 2
    full = full or data[at.counts + FOOTPRINTS] + calls > TABLE // 2
    if full or 2 * (data[at.counts + TOP] - at.arena) > data[at.counts + ROOM] - at.arena:
        data[at.block_key : at.block_key + 2 * TABLE] = 0
        data[at.footprint_key : at.footprint_key + 2 * TABLE] = 0
        data[at.counts + TOP] = at.arena
        data[at.counts + BLOCKS] = data[at.counts + FOOTPRINTS] = 0


def resize(data: Ints, seconds: Floats, at: At) -> None:
    """Update the seconds of all cached blocks, and drop their peaks, after sizes have changed."""
    data[at.footprint_key : at.footprint_key + 2 * TABLE] = 0
    data[at.counts + FOOTPRINTS] = 0
    data[at.counts + FAILED] = 0
    _time_all(data, seconds, at.packed)
    if data[at.counts + FAILED]:
        make_room(data, at, TABLE)  # drops all blocks: one has no seconds


@entry
def _time_all(data: Ints, seconds: Floats, packed: Packed) -> None:
    at: At = packed[0]
    data, seconds = pointer(data, 0), pointer(seconds, 0)
    for block in range(data[at.counts + BLOCKS]):
        time_block(data, seconds, at, block)


@helper
def time_block(data: Ints, seconds: Floats, at: At, block: int) -> None:
    """Write the seconds of what a block recomputes to ``at.block_s``.

    There are two numbers: as part of a forward, and as part of a rebuild before a backward.
    """
    forward_s = rebuild_s = 0.0
    lists = at.block + COLUMNS * block
    for i in range(data[lists + NODES], data[lists + INPUTS]):
        node, again = data[i] // 2, data[i] % 2
        if again:
            if seconds[at.once_s + node] < 0 or seconds[at.once_s + at.nodes + node] < 0:
                data[at.counts + FAILED] = 1 + node
            forward_s += seconds[at.once_s + node]
            rebuild_s += seconds[at.once_s + at.nodes + node]
    seconds[at.block_s + 2 * block], seconds[at.block_s + 2 * block + 1] = forward_s, rebuild_s


@helper
def list_operations(data: Ints, at: At, stage: int, mode: int) -> int:
    """Write the operations of a stage's forward or backward to ``at.listed``; return how many.

    ``mode`` is ``FIRST``, ``AGAIN`` or ``BACK``.
    """
    if mode != BACK:
        begin, end = data[at.forward + stage], data[at.forward + stage + 1]
    else:
        begin, end = data[at.backward + stage], data[at.backward + stage + 1]
    if mode != BACK or not data[at.unusual + stage]:
        for i in range(end - begin):
            data[at.listed + i] = begin + i
        return int(end - begin)
    return _with_sums(data, at, stage, begin, end)


@helper
def place_sums(data: Ints, at: At) -> None:
    """Assign each sum of gradients of several branches to the last backward that it waits for.

    The stage of this backward is written to ``at.sum_at``.
    """
    for stage in range(at.stages):
        data[at.unusual + stage] = 0
        data[at.sum_hash + 2 * stage] = data[at.sum_hash + 2 * stage + 1] = 0
    for i in range(at.sum_count):
        stage = data[data[at.sum_stages + i]]
        for k in range(data[at.sum_stages + i], data[at.sum_stages + i + 1]):
            if data[at.back + data[k]] > data[at.back + stage]:
                stage = data[k]
        data[at.sum_at + i] = stage
        data[at.sum_hash + 2 * stage] ^= data[at.random + 2 * at.width + data[at.sums + i]]
        data[at.sum_hash + 2 * stage + 1] ^= data[at.random + 3 * at.width + data[at.sums + i]]
        home = data[at.sum_home + i]
        if stage != home:
            data[at.unusual + stage] = data[at.unusual + home] = 1


@helper
def _with_sums(data: Ints, at: At, stage: int, begin: int, end: int) -> int:
    """Write a backward's operations to ``at.listed``, with each sum over branches; return how many.

    A sum comes as soon as all its inputs are available. The nodes ``begin`` to ``end - 1`` are
    those of the stage's backward.
    """
    data[at.counts + STAMP] += 1
    missing = data[at.counts + STAMP]  # marked in ``want``: not listed yet
    done = -missing
    for i in range(at.sum_count):  # sums of other stages are not listed
        data[at.want + data[at.sums + i]] = done
    waiting = 0
    for i in range(at.sum_count):
        if data[at.sum_at + i] == stage:
            data[at.stack + waiting] = data[at.sums + i]
            data[at.want + data[at.sums + i]] = missing
            waiting += 1
    count = 0
    for node in range(begin, end):
        if data[at.want + node] != done and data[at.want + node] != missing:
            data[at.want + node] = missing
            data[at.order + count] = node
            count += 1
    operations, count = count, 0
    for i in range(operations):
        node = data[at.order + i]
        data[at.listed + count] = node
        data[at.want + node] = done
        count += 1
        if i + 1 < operations and data[at.value_of + data[at.order + i + 1]] >= 0:
            continue  # nothing comes between an operation and its values
        left = 0
        for j in range(waiting):
            reader = data[at.stack + j]
            ready = True
            for k in range(data[at.reads + reader], data[at.reads + reader + 1]):
                ready = ready and data[at.want + data[k]] != missing
            if ready:
                data[at.listed + count] = reader
                data[at.want + reader] = done
                count += 1
            else:
                data[at.stack + left] = reader
                left += 1
        waiting = left
    return count


@helper
def can_give(data: Ints, at: At, mode: int, held: Flags, node: int) -> bool:
    """Return whether a call in ``mode`` can return ``node``.

    It must be a tensor. A recomputation returns nothing that is pinned or held: that is in memory
    already.
    """
    if data[at.tensor + node] == 0:
        return False
    return mode != AGAIN or (data[at.pinned + node] == 0 and held[node] == 0)


@helper
def block_of(data: Ints, at: At, held: Flags, stage: int, mode: int, option: int) -> int:
    """Return the number of the cached block that a call of ``stage`` runs.

    It depends on the values that are asked for in ``at.needed``. ``option`` is the stage's save
    option.

    Returns:
        The number, or ``NOTHING_ASKED`` for a recomputation whose results nobody reads, ``NO_ROOM``
        if a new block may not fit, ``MISSED`` if :func:`extract` must make the block first.
    """
    count = list_operations(data, at, stage, mode)
    data[at.counts + STAMP] += 1
    stamp = data[at.counts + STAMP]
    one = mixed(stage * 3 + mode, 1)
    two = mixed(stage * 3 + mode, 2)
    asked = 0
    for i in range(count):
        node = data[at.listed + i]
        if data[at.needed + node] != 0 and can_give(data, at, mode, held, node):
            data[at.want + node] = stamp
            asked += 1
            one ^= data[at.random + node]
            two ^= data[at.random + at.width + node]
    if mode == AGAIN and asked == 0:
        return NOTHING_ASKED
    row = data[at.option + stage] + option
    rebuilds = mode == BACK and data[at.missing + row] < data[at.missing + row + 1]
    if rebuilds:
        one ^= mixed(option, 3)
        two ^= mixed(option, 4)
    if mode == AGAIN or rebuilds:
        one ^= data[at.held_hash + 2 * stage]
        two ^= data[at.held_hash + 2 * stage + 1]
    if mode == BACK:
        one ^= data[at.sum_hash + 2 * stage]
        two ^= data[at.sum_hash + 2 * stage + 1]
    if one == 0:
        one = 1
    entry = find(data, at.block_key, one, two)
    key = at.block_key + 2 * entry
    if data[key] == 0:
        if data[at.counts + TOP] + data[at.longest + stage] > data[at.counts + ROOM]:
            return NO_ROOM
        data[key], data[key + 1] = one, two
        data[at.missed], data[at.missed + 1], data[at.missed + 2] = entry, stage, mode
        data[at.missed + 3], data[at.missed + 4] = row if rebuilds else -1, count
        return MISSED
    block: int = data[at.block_at + entry]
    return block


def extract(data: Ints, seconds: Floats, at: At, held: Flags) -> None:
    """Make and cache the block that :func:`block_of` missed.

    It has the fewest operations that return what is asked of it.
    """
    entry, stage, mode, row, count = data[at.missed : at.missed + 5].tolist()
    block = int(data[at.counts + BLOCKS])
    data[at.counts + BLOCKS] += 1
    inside = _select(data, at.packed, held, block, stage, mode, row, count)
    nodes = _interleave(data, at.packed, inside, count, mode)
    _record(data, seconds, at.packed, block, nodes, mode, inside, count)
    data[at.block_at + entry] = block


@entry
def _select(
    data: Ints, packed: Packed, held: Flags, block: int, stage: int, mode: int, row: int, count: int
) -> int:
    """Gather the operations that a block runs at the end of ``at.listed``; return where they begin.

    ``count`` operations are listed. ``row`` is the list in ``at.missing`` of what a backward
    recomputes, or -1.
    """
    at: At = packed[0]
    data, held = pointer(data, 0), pointer(held, 0)
    stamp = data[at.counts + STAMP]
    _record_asked(data, at, block, count)
    if mode != AGAIN:
        for i in range(count):
            if data[at.draws + data[at.listed + i]]:
                data[at.want + data[at.listed + i]] = stamp
    lists = at.reads_again if mode == AGAIN else at.reads
    inside = count  # operations that run are gathered in ``data[at.listed + inside:count]``
    for i in range(count - 1, -1, -1):
        node = data[at.listed + i]
        available = mode == AGAIN and (data[at.pinned + node] != 0 or held[node] != 0)
        if data[at.want + node] == stamp and not available:
            inside -= 1
            data[at.listed + inside] = node
            for k in range(data[lists + node], data[lists + node + 1]):
                data[at.want + data[k]] = stamp
    rebuilds = False
    if row >= 0:
        rebuilds = _recompute(data, at, held, stage, row)
    data[at.block + COLUMNS * block + REBUILDS] = rebuilds
    return inside


@helper
def _recompute(data: Ints, at: At, held: Flags, stage: int, row: int) -> bool:
    """Mark in ``at.again`` the forward operations that a backward recomputes; return whether any.

    ``row`` is the list in ``at.missing`` of the tensors that were not kept.
    """
    stamp = data[at.counts + STAMP]
    missing = -stamp  # a temporary mark in ``chosen``
    for k in range(data[at.missing + row], data[at.missing + row + 1]):
        data[at.chosen + data[k]] = missing
    recomputes = False
    for node in range(data[at.forward + stage + 1] - 1, data[at.forward + stage] - 1, -1):
        gone = data[at.chosen + node] == missing and held[node] == 0
        if data[at.want + node] == stamp and (gone or data[at.tensor + node] == 0):
            data[at.again + node] = stamp
            recomputes = True
            for k in range(data[at.reads_again + node], data[at.reads_again + node + 1]):
                data[at.want + data[k]] = stamp
    return recomputes


@entry
def _interleave(data: Ints, packed: Packed, inside: int, count: int, mode: int) -> int:
    """Write the nodes that a block runs to ``at.order``, in order of execution; return how many.

    Its operations are in ``at.listed`` from ``inside`` to ``count``. Each view and each recomputed
    value comes right before its first reader. The values of an operation with several results
    directly follow it.
    """
    at: At = packed[0]
    data = pointer(data, 0)
    stamp = data[at.counts + STAMP]
    nodes = 0
    for i in range(inside, count):
        data[at.stack] = data[at.listed + i]
        waiting = 1
        while waiting:
            node = data[at.stack + waiting - 1]
            again = mode == AGAIN or data[at.again + node] == stamp
            lists = at.reads_again if again else at.reads
            before = waiting
            for k in range(data[lists + node + 1] - 1, data[lists + node] - 1, -1):
                source = data[k]
                made_here = data[at.is_view + source] != 0 or data[at.again + source] == stamp
                if made_here and data[at.chosen + source] != stamp:
                    data[at.stack + waiting] = source
                    waiting += 1
            if waiting > before:
                continue
            waiting -= 1
            if data[at.chosen + node] != stamp:
                data[at.chosen + node] = stamp
                data[at.order + nodes] = node
                nodes += 1
            for k in range(data[at.values + node], data[at.values + node + 1]):
                value = data[k]
                if data[at.again + value] == stamp and data[at.chosen + value] != stamp:
                    data[at.chosen + value] = stamp
                    data[at.order + nodes] = value
                    nodes += 1
    return nodes


@helper
def _record_asked(data: Ints, at: At, block: int, count: int) -> None:
    """Write the tensors that a block has to return to ``at.arena``, as the first of its lists."""
    top = data[at.counts + TOP]
    data[at.block + COLUMNS * block + ASKED] = top
    for i in range(count):
        node = data[at.listed + i]
        if data[at.want + node] == data[at.counts + STAMP]:
            data[top] = node
            top += 1
    data[at.counts + TOP] = top


@entry
def _record(
    data: Ints,
    seconds: Floats,
    packed: Packed,
    block: int,
    nodes: int,
    mode: int,
    inside: int,
    count: int,
) -> None:
    """Write the nodes of a block, its inputs and their storages to ``at.arena``, as lists.

    A node is written as twice its number, plus 1 for a recomputation. One more list has the forward
    values that backward operations read.
    """
    at: At = packed[0]
    data, seconds = pointer(data, 0), pointer(seconds, 0)
    stamp = data[at.counts + STAMP]
    top = data[at.counts + TOP]
    data[at.block + COLUMNS * block + NODES] = top
    for i in range(nodes):
        node = data[at.order + i]
        again = mode == AGAIN or data[at.again + node] == stamp
        data[top] = 2 * node + again
        top += 1
    data[at.block + COLUMNS * block + INPUTS] = top
    time_block(data, seconds, at, block)
    data[at.counts + STAMP] += 1
    is_input = data[at.counts + STAMP]
    for i in range(nodes):
        node = data[at.order + i]
        again = mode == AGAIN or data[at.again + node] == stamp
        lists = at.reads_again if again else at.reads
        for k in range(data[lists + node], data[lists + node + 1]):
            source = data[k]
            if data[at.chosen + source] != stamp and data[at.want + source] != is_input:
                data[at.want + source] = is_input
                data[top] = source
                top += 1
    data[at.block + COLUMNS * block + DIRECT] = top
    if mode == BACK:
        data[at.counts + STAMP] += 1
        direct = data[at.counts + STAMP]
        for i in range(inside, count):
            node = data[at.listed + i]
            for k in range(data[at.reads + node], data[at.reads + node + 1]):
                source = data[k]
                if source < at.forward_count and data[at.want + source] != direct:
                    data[at.want + source] = direct
                    data[top] = source
                    top += 1
    data[at.block + COLUMNS * block + READS] = top
    data[at.counts + STAMP] += 1
    reads = data[at.counts + STAMP]
    for i in range(
        data[at.block + COLUMNS * block + INPUTS], data[at.block + COLUMNS * block + DIRECT]
    ):
        node = data[i]
        for k in range(data[at.storages + node], data[at.storages + node + 1]):
            storage = data[k]
            if data[at.read + storage] != reads:
                data[at.read + storage] = reads
                data[top] = storage
                top += 1
    data[at.block + COLUMNS * block + END] = top
    data[at.counts + TOP] = top
