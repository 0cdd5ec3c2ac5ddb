"""What a block does to memory, operation by operation: compiled loops.

Each result takes its storages, each workspace is there while its operation runs, and each
operation frees what it reads last. It is found once for each set of storages that others hold.
"""

from __future__ import annotations

from fxremat.jit import njit
from fxremat.planner.extract import (
    END,
    FAILED,
    FOOTPRINTS,
    INPUTS,
    NODES,
    READS,
    STAMP,
)
from fxremat.planner.places import AGAIN, COLUMNS, UNKNOWN, At, Ints, find, mixed


@njit(inline="always")
def footprint(data: Ints, at: At, block: int, mode: int, outputs: int) -> int:
    """Where it says what ``block`` does to memory: peak and change in bytes.

    Args:
        data, at: where.
        block: what runs. The first ``outputs`` of ``at.own`` are the tensors asked of it, which
            are not asked for any more.
        mode: of it.
        outputs: how many.
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
    key, found = at.footprint_key + 2 * entry, at.footprint + 2 * entry
    if data[key] == 0:
        data[key], data[key + 1] = one, two
        data[at.counts + FOOTPRINTS] += 1
        data[at.counts + STAMP] += 1
        for i in range(begin, end):
            storage = data[i]
            if data[at.never_freed + storage] or data[at.alive + storage] > 0:
                data[at.kept + storage] = data[at.counts + STAMP]
        data[found], data[found + 1] = run_block(data, at, block, mode, outputs)
    return found


@njit(cache=True, nogil=True)
def run_block(data: Ints, at: At, block: int, mode: int, outputs: int) -> tuple[int, int]:
    """Most bytes at any instant of a block, and bytes at its end, less those at its start.

    Requires: storages that others hold are marked in ``at.kept`` with the current stamp, and
        what is asked of the block is first in ``at.own``.
    """
    stamp = data[at.counts + STAMP]
    lists = at.block + COLUMNS * block
    for i in range(data[lists + READS], data[lists + END]):
        data[at.present + data[i]] = stamp
    for i in range(outputs):
        node = data[at.own + i]
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


@njit(inline="always")
def _mark_last_uses(data: Ints, at: At, begin: int, end: int) -> None:
    """Note in ``at.last`` the operation of a block that reads or makes each storage last."""
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


@njit(inline="always")
def _made(data: Ints, at: At, node: int, again: int) -> tuple[int, int]:
    """Where the storages of what an operation returns begin and end in ``data``."""
    first = data[at.storages + node]
    if again:
        return first, first + data[at.made_again + node]
    return first, data[at.storages + node + 1]


@njit(inline="always")
def _released(data: Ints, at: At, storage: int, place: int, stamp: int) -> int:
    """Bytes of ``storage`` if the operation at ``place`` is the last that uses it, once."""
    stays = data[at.staying + storage] == stamp or data[at.kept + storage] == stamp
    if stays or data[at.last + storage] != place:
        return 0
    data[at.last + storage] = -1
    nbytes: int = data[at.nbytes + storage]
    return nbytes
