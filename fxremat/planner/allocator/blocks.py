"""The blocks of a caching allocator as arrays, and compiled loops that hand them out.

``planner.allocator.allocator`` states the rules. A block is a column of a table; its number is
used again once the block was merged into a neighbor.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fxremat.jit import entry, helper

Ints = NDArray[np.int64]

MIB = 1 << 20
"""Bytes in a mebibyte."""

LEAST_BLOCK_BYTES = 512
"""The size of every block is a multiple of this."""

MOST_SMALL_BYTES = MIB
"""The largest block of the small pool; also the most that is left over without splitting a large
block."""

SMALL_SEGMENT_BYTES = 2 * MIB

WHOLE_SEGMENT_FROM_BYTES = 10 * MIB
"""A request of this size or more gets a segment of its size, rounded up to a multiple of 2 MiB."""

GROWING_BYTES = 1 << 50
"""Addresses that a growing segment may take without meeting another segment."""

NONE = -1
"""Stands for no block, or for no place among the free blocks."""

COLUMN_FIELDS = 6
"""The number of rows of ``State.table``."""

ADDRESS, NBYTES, POOL, PLACE, BEFORE, AFTER = range(COLUMN_FIELDS)
"""Rows of ``State.table``: a block's first byte, its size and pool, its place among the free blocks
of the pool or ``NONE`` while it is handed out, and its neighbors in the segment."""

POOL_FIELDS = 4
"""The number of rows of ``State.pools``."""

FREE, SMALL, SEGMENT_END, LAST = range(POOL_FIELDS)
"""Rows of ``State.pools``: number of free blocks, whether it is a small pool, where its growing
segment ends or will begin, and the last block of that segment."""

TOTAL_FIELDS = 7
"""The number of places in ``State.totals``."""

ALLOCATED, RESERVED, MOST_ALLOCATED, MOST_RESERVED, NEXT_ADDRESS, USED, UNUSED = range(TOTAL_FIELDS)
"""Places in ``State.totals``: bytes that are handed out, bytes taken from the device, the maximum
of each, the first address of the next segment, how many columns were ever used, and the first
column that may be used again; its ``AFTER`` is the next one."""

RULES = 4
"""The number of places in ``State.rules``."""

EXPANDABLE, LARGE_SEGMENT, MOST_SPLIT, MOST_WASTE = range(RULES)
"""Places in ``State.rules``: whether segments grow, the size of a segment of the large pool, the
size from which blocks are not split, and by how much such a block may exceed a request."""


class State(NamedTuple):
    """State of a simulated caching allocator, with room for ``N`` blocks in ``P`` pools.

    Attributes:
        table: shape ``(COLUMN_FIELDS, N)``, a column for each block; for the rows see ``ADDRESS``.
        free: shape ``(P, N)``, the free blocks of each pool, in no order.
        pools: shape ``(POOL_FIELDS, P)``, where pool ``2 i`` is the small and ``2 i + 1`` the large
            pool of the ``i``-th stream; for the rows see ``FREE``.
        totals: shape ``(TOTAL_FIELDS,)``, sums of bytes and counters, see ``ALLOCATED``.
        rules: shape ``(RULES,)``, settings, see ``EXPANDABLE``.
    """

    table: Ints
    free: Ints
    pools: Ints
    totals: Ints
    rules: Ints


def new_state(rules: Ints, *, streams: int, blocks: int) -> State:
    """Return an allocator with an empty cache and with room for ``blocks`` blocks."""
    pools = np.zeros((POOL_FIELDS, 2 * streams), dtype=np.int64)
    totals = np.zeros(TOTAL_FIELDS, dtype=np.int64)
    totals[UNUSED] = NONE
    for pool in range(2 * streams):
        pools[:, pool] = (0, pool % 2 == 0, pool * 2 * GROWING_BYTES, NONE)
    totals[NEXT_ADDRESS] = 4 * streams * GROWING_BYTES
    table = np.empty((COLUMN_FIELDS, blocks), dtype=np.int64)
    return State(table, np.empty((2 * streams, blocks), dtype=np.int64), pools, totals, rules)


@entry
def take(state: State, size: int, stream: int) -> int:
    """Hand out a block of at least ``size`` bytes, and return its column in ``state.table``.

    Requires: ``size`` is a multiple of 512, and two columns of the table were never used, or may be
        used again.
    """
    table, totals, rules = state.table, state.totals, state.rules
    pool = 2 * stream + (size > MOST_SMALL_BYTES)
    block = _best_fit(state, pool, size)
    if block != NONE:
        _leave_free(state, block)
    elif rules[EXPANDABLE]:
        block = _grow_segment(state, pool, size)
    else:
        nbytes = _segment_bytes(rules, size)
        block = _new_block(state, totals[NEXT_ADDRESS], nbytes, pool)
        totals[NEXT_ADDRESS] += nbytes + LEAST_BLOCK_BYTES  # a gap to all others
        _reserve(totals, nbytes)
    if _is_split(state, pool, table[NBYTES, block], size):
        _split(state, block, size)
    totals[ALLOCATED] += table[NBYTES, block]
    totals[MOST_ALLOCATED] = max(totals[MOST_ALLOCATED], totals[ALLOCATED])
    return block


@entry
def put_back(state: State, block: int) -> None:
    """Free the block in column ``block``, and merge it with free neighbors in its segment."""
    table = state.table
    state.totals[ALLOCATED] -= table[NBYTES, block]
    before, after = table[BEFORE, block], table[AFTER, block]
    if before != NONE and table[PLACE, before] != NONE:
        _leave_free(state, before)
        _join(state, before, block)
        block = before
    if after != NONE and table[PLACE, after] != NONE:
        _leave_free(state, after)
        _join(state, block, after)
    _enter_free(state, block)


@entry
def replay(state: State, given: Ints, keys: Ints, sizes: Ints, steps: int) -> None:
    """Simulate ``steps`` equal steps; ``state.totals`` then has their peak bytes.

    Args:
        state: an allocator of one stream, with room for two blocks for each allocation of each
            step.
        given: sizes of blocks that are handed out before the first step and never freed.
        keys: for each request of a step, the number of its key, from 0 on. A release frees the
            block that was allocated last under its key.
        sizes: size of the block that each request allocates, or 0 for a release.
        steps: number of steps; what a step does not release is released at its end.

    Raises:
        ValueError: a request releases a key under which nothing is allocated.
    """
    for size in given:
        take(state, size, 0)
    latest = np.full(keys.size, NONE, dtype=np.int64)
    former, blocks = np.empty_like(keys), np.empty_like(keys)
    for _ in range(steps):
        for i in range(keys.size):
            key = keys[i]
            if sizes[i]:
                former[i], latest[key] = latest[key], i
                blocks[i] = take(state, sizes[i], 0)
            elif latest[key] == NONE:
                raise ValueError("a request releases a key under which nothing is allocated")
            else:
                put_back(state, blocks[latest[key]])
                latest[key] = former[latest[key]]
        for key in range(keys.size):
            while latest[key] != NONE:
                put_back(state, blocks[latest[key]])
                latest[key] = former[latest[key]]


@helper
def _best_fit(state: State, pool: int, size: int) -> int:
    """Return the smallest free block of ``pool`` that may serve ``size`` bytes, or ``NONE``."""
    table, rules = state.table, state.rules
    # The last block of a growing segment counts as infinitely large.
    last = state.pools[LAST, pool] if rules[EXPANDABLE] else NONE
    best, best_bytes, best_address = NONE, 0, 0
    for i in range(state.pools[FREE, pool]):
        block = state.free[pool, i]
        nbytes, address = table[NBYTES, block], table[ADDRESS, block]
        if nbytes < size or block == last:
            continue
        if best == NONE or (nbytes, address) < (best_bytes, best_address):
            best, best_bytes, best_address = block, nbytes, address
    if best == NONE and last != NONE and table[PLACE, last] != NONE and table[NBYTES, last] >= size:
        best = last
    if best != NONE:
        nbytes, most = table[NBYTES, best], rules[MOST_SPLIT]
        if size < most <= nbytes or (size >= most and nbytes >= size + rules[MOST_WASTE]):
            return NONE
    return best


@helper
def _grow_segment(state: State, pool: int, size: int) -> int:
    """Grow the segment of ``pool`` until its last block has ``size`` bytes; return that block."""
    table, pools = state.table, state.pools
    unit = SMALL_SEGMENT_BYTES if pools[SMALL, pool] else state.rules[LARGE_SEGMENT]
    block = pools[LAST, pool]
    if block != NONE and table[PLACE, block] != NONE:
        _leave_free(state, block)
    else:
        last, block = block, _new_block(state, pools[SEGMENT_END, pool], 0, pool)
        table[BEFORE, block] = last
        if last != NONE:
            table[AFTER, last] = block
        pools[LAST, pool] = block
    more = -(-max(size - table[NBYTES, block], 0) // unit) * unit
    table[NBYTES, block] += more
    pools[SEGMENT_END, pool] += more
    _reserve(state.totals, more)
    return int(block)


@helper
def _segment_bytes(rules: Ints, size: int) -> int:
    """Return the bytes to take from the device as the segment of a block of ``size`` bytes."""
    if size <= MOST_SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < WHOLE_SEGMENT_FROM_BYTES:
        return int(rules[LARGE_SEGMENT])
    return -(-size // (2 * MIB)) * 2 * MIB


@helper
def _is_split(state: State, pool: int, nbytes: int, size: int) -> bool:
    """Return whether a block of ``nbytes`` is cut when it serves ``size`` bytes.

    If not, the rest of the block is wasted.
    """
    if state.pools[SMALL, pool] or state.rules[EXPANDABLE]:
        return nbytes - size >= LEAST_BLOCK_BYTES
    return nbytes - size > MOST_SMALL_BYTES and size < state.rules[MOST_SPLIT]


@helper
def _split(state: State, block: int, size: int) -> None:
    """Cut ``block`` to ``size`` bytes; the rest becomes a free block after it."""
    table, pool = state.table, state.table[POOL, block]
    rest = _new_block(state, table[ADDRESS, block] + size, table[NBYTES, block] - size, pool)
    after = table[AFTER, block]
    table[BEFORE, rest], table[AFTER, rest] = block, after
    if after != NONE:
        table[BEFORE, after] = rest
    table[NBYTES, block], table[AFTER, block] = size, rest
    if state.pools[LAST, pool] == block:
        state.pools[LAST, pool] = rest
    _enter_free(state, rest)


@helper
def _join(state: State, first: int, second: int) -> None:
    """Merge ``second`` into ``first``, the block right before it in the segment."""
    table, totals = state.table, state.totals
    after = table[AFTER, second]
    table[NBYTES, first] += table[NBYTES, second]
    table[AFTER, first] = after
    if after != NONE:
        table[BEFORE, after] = first
    if state.pools[LAST, table[POOL, first]] == second:
        state.pools[LAST, table[POOL, first]] = first
    table[AFTER, second], totals[UNUSED] = totals[UNUSED], second


@helper
def _new_block(state: State, address: int, nbytes: int, pool: int) -> int:
    """Add a block without neighbors, not free, to the table; return its column."""
    table, totals = state.table, state.totals
    block = totals[UNUSED]
    if block != NONE:
        totals[UNUSED] = table[AFTER, block]
    else:
        block = totals[USED]
        totals[USED] += 1
    table[ADDRESS, block], table[NBYTES, block], table[POOL, block] = address, nbytes, pool
    table[PLACE, block] = table[BEFORE, block] = table[AFTER, block] = NONE
    return int(block)


@helper
def _enter_free(state: State, block: int) -> None:
    """Add a block to the list of free blocks of its pool."""
    pool = state.table[POOL, block]
    count = state.pools[FREE, pool]
    state.free[pool, count], state.table[PLACE, block] = block, count
    state.pools[FREE, pool] += 1


@helper
def _leave_free(state: State, block: int) -> None:
    """Remove a block from its pool's list of free blocks; the last of the list takes its place."""
    pool, place = state.table[POOL, block], state.table[PLACE, block]
    state.pools[FREE, pool] -= 1
    other = state.free[pool, state.pools[FREE, pool]]
    state.free[pool, place], state.table[PLACE, other] = other, place
    state.table[PLACE, block] = NONE


@helper
def _reserve(totals: Ints, nbytes: int) -> None:
    """Add ``nbytes`` to the bytes taken from the device, and update their maximum."""
    totals[RESERVED] += nbytes
    totals[MOST_RESERVED] = max(totals[MOST_RESERVED], totals[RESERVED])
