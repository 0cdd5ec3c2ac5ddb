"""Compiled loops that find what a block does to memory, operation by operation.

Each result allocates its storages, each workspace is held while its operation runs, and each
operation frees what it reads last. The footprint of a block is computed once for each set of
storages that are held elsewhere.
"""

from __future__ import annotations

from fxremat.jit import helper
from fxremat.planner.replay.extract import (
    END,
    FAILED,
    FOOTPRINTS,
    INPUTS,
    NODES,
    READS,
    STAMP,
)
from fxremat.planner.replay.places import AGAIN, COLUMNS, UNKNOWN, At, Ints, find, mixed


@helper
def footprint(data: Ints, at: At, block: int, mode: int, outputs: int) -> int:
    """Return the place in ``data`` of a block's peak in bytes; its change in held bytes follows.

    Both are computed once for each set of storages that are held elsewhere.

    Args:
        data, at: the arrays of the step.
        block: number of the block. The first ``outputs`` entries of ``at.listed`` are the tensors
            that it returns.
        mode: ``FIRST``, ``AGAIN`` or ``BACK``.
        outputs: the number of tensors that it returns.
    """
    one = mixed(block, 5)
    two = mixed(block, 6)
    lists = at.block + COLUMNS * block
    begin, end = data[lists + READS], data[lists + END]
    for i in range(begin, end):
        storage = data[i]
        if data[at.never_freed + storage] or data[at.alive + storage] > 0:
            one ^= data[at.random + 2 * at.width + storage]
            two ^= data[at.random + 3 * at.width + storage]
    if one == 0:
        one = 1
    entry = find(data, at.footprint_key, one, two)
    key, place = at.footprint_key + 2 * entry, at.footprint + 2 * entry
    if data[key] == 0:
        data[key], data[key + 1] = one, two
        data[at.counts + FOOTPRINTS] += 1
        data[at.counts + STAMP] += 1
        for i in range(begin, end):
            storage = data[i]
            if data[at.never_freed + storage] or data[at.alive + storage] > 0:
                data[at.kept + storage] = data[at.counts + STAMP]
        data[place], data[place + 1] = run_block(data, at, block, mode, outputs)
    return place


@helper
def run_block(data: Ints, at: At, block: int, mode: int, outputs: int) -> tuple[int, int]:
    """Return a block's peak in bytes and the bytes held at its end, both less those at its start.

    Requires: storages that are held elsewhere are marked in ``at.kept`` with the current stamp, and
        the values that the block returns are at the beginning of ``at.listed``.
    """
    stamp = data[at.counts + STAMP]
    lists = at.block + COLUMNS * block
    for i in range(data[lists + READS], data[lists + END]):
        data[at.present + data[i]] = stamp
    for i in range(outputs):
        node = data[at.listed + i]
        for k in range(data[at.storages + node], data[at.storages + node + 1]):
            data[at.staying + data[k]] = stamp
    begin, end = data[lists + NODES], data[lists + INPUTS]
    _mark_last_uses(data, at, begin, end)
    now = peak = 0
    previous = -1
    for i in range(begin, end):
        node, again = data[i] // 2, data[i] % 2
        if data[at.value_of + node] >= 0 and data[at.value_of + node] == previous:
            continue
        previous = node
        data[at.counts + STAMP] += 1
        read = data[at.counts + STAMP]
        reads = at.reads_again if again else at.reads
        for k in range(data[reads + node], data[reads + node + 1]):
            source = data[k]
            for j in range(data[at.storages + source], data[at.storages + source + 1]):
                data[at.read + data[j]] = read
        second = 0
        first_made, last_made = _made(data, at, node, again)
        for j in range(first_made, last_made):
            storage = data[j]
            if data[at.read + storage] == read:
                continue
            if data[at.present + storage] == stamp:
                second += data[at.nbytes + storage]
            else:
                data[at.present + storage] = stamp
                now += data[at.nbytes + storage]
        workspace = data[at.workspace + (AGAIN if again else mode) * at.nodes + node]
        if workspace == UNKNOWN:
            data[at.counts + FAILED] = -1 - node
            workspace = 0
        peak = max(peak, now + workspace + second)
        for k in range(data[reads + node], data[reads + node + 1]):
            source = data[k]
            for j in range(data[at.storages + source], data[at.storages + source + 1]):
                now -= _released(data, at, data[j], i, stamp)
        for j in range(first_made, last_made):
            now -= _released(data, at, data[j], i, stamp)
    return peak, now


@helper
def _mark_last_uses(data: Ints, at: At, begin: int, end: int) -> None:
    """Write to ``at.last``, for each storage, the last operation of a block that uses it.

    ``data[begin:end]`` is the block's list of nodes.
    """
    previous = -1
    for i in range(begin, end):
        node, again = data[i] // 2, data[i] % 2
        if data[at.value_of + node] >= 0 and data[at.value_of + node] == previous:
            continue
        previous = node
        lists = at.reads_again if again else at.reads
        for k in range(data[lists + node], data[lists + node + 1]):
            source = data[k]
            for j in range(data[at.storages + source], data[at.storages + source + 1]):
                data[at.last + data[j]] = i
        first_made, last_made = _made(data, at, node, again)
        for j in range(first_made, last_made):
            data[at.last + data[j]] = i


@helper
def _made(data: Ints, at: At, node: int, again: int) -> tuple[int, int]:
    """Return where the list of storages of a node's results begins and ends in ``data``.

    It is shorter for a recomputed BatchNorm (``again``), which returns no statistics.
    """
    first = data[at.storages + node]
    if again:
        return first, first + data[at.made_again + node]
    return first, data[at.storages + node + 1]


@helper
def _released(data: Ints, at: At, storage: int, place: int, stamp: int) -> int:
    """Return the bytes that are freed if the operation at ``place`` uses ``storage`` last, else 0.

    Each storage counts once. One that stays in memory, as it has the mark ``stamp``, is not freed.
    """
    stays = data[at.staying + storage] == stamp or data[at.kept + storage] == stamp
    if stays or data[at.last + storage] != place:
        return 0
    data[at.last + storage] = -1
    nbytes: int = data[at.nbytes + storage]
    return nbytes
