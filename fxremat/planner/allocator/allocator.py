"""A model of torch's caching allocator for CUDA.

An allocation takes more than the bytes of its tensor. Requests are rounded up; a cached block is
handed out whole if little would be left over; memory comes from the device in segments. The rules
are those of ``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/AllocatorConfig.cpp`` in torch
2.11 to 2.15, for the allocator that torch calls "native":

* Sizes are rounded up to 512 bytes, or to a fraction of a power of two
  (``roundup_power2_divisions``). Sizes up to 1 MiB belong to the small pool, others to the large
  pool.
* Each stream has its own free blocks in each pool. The smallest block that is large enough is
  taken; among blocks of equal size, the one of the oldest segment with the lowest address.
* A block is split if at least 512 bytes would be left over; in the large pool, if more than 1 MiB
  would be.
* If no block fits, a segment is taken from the device: 2 MiB for the small pool; 20 MiB
  (``large_segment_size_mb``) for up to 10 MiB; from there on the requested size, rounded up to 2
  MiB.
* A freed block is merged with its free neighbors in the segment.
* With ``expandable_segments`` a stream has one segment in each pool, which grows by 2 MiB or 20 MiB
  at its end, and a block is split whenever 512 bytes are left over. A free block at the end of the
  segment counts as infinitely large in the search for the best fit.
* With ``max_split_size_mb``, blocks of at least that size are not split. They serve neither smaller
  requests nor requests that would waste ``max_non_split_rounding_mb``.

The model never returns memory to the device. The real allocator does that only if memory runs out,
if its cache is emptied, or above a ``garbage_collection_threshold``.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass, field

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

ROUNDING_RANGES = 16
"""How many ranges of sizes have their own ``divisions``: from 1 MiB, 2 MiB, …, 32 GiB on."""


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """Settings of the allocator.

    Attributes:
        expandable_segments: whether segments grow.
        large_segment_bytes: size of a segment of the large pool.
        max_split_bytes: blocks of at least this size are not split; ``None``: all blocks may be.
        max_waste_bytes: by how much such a block may exceed the request that it serves.
        divisions: for each of the 16 ranges of sizes, the number of steps between two powers of two
            to which sizes are rounded up; 0 or 1: sizes are rounded up to 512 bytes.
    """

    expandable_segments: bool = False
    large_segment_bytes: int = 20 * MIB
    max_split_bytes: int | None = None
    max_waste_bytes: int = 20 * MIB
    divisions: tuple[int, ...] = (0,) * ROUNDING_RANGES

    def __post_init__(self) -> None:
        if len(self.divisions) != ROUNDING_RANGES:
            raise ValueError(
                f"divisions has {len(self.divisions)} numbers, must have {ROUNDING_RANGES}"
            )
        for number in self.divisions:
            if number < 0 or number & (number - 1):
                raise ValueError(f"divisions has {number}: must be powers of two or 0")
        if self.large_segment_bytes < WHOLE_SEGMENT_FROM_BYTES:
            raise ValueError(
                f"large_segment_bytes is {self.large_segment_bytes}, must be at least "
                f"{WHOLE_SEGMENT_FROM_BYTES}"
            )

    @staticmethod
    def read(snapshot: Mapping[str, object]) -> AllocatorSettings:
        """Read ``torch.cuda.memory._snapshot()["allocator_settings"]``.

        Two of the sizes are only in the text of the environment variable.
        """
        text = " ".join(str(value) for key, value in snapshot.items() if "ALLOC_CONF" in key)
        written = _integer_settings(text)
        most = snapshot.get("max_split_size")
        divisions = snapshot.get("roundup_power2_divisions")
        by_range = divisions if isinstance(divisions, Mapping) else {}
        numbers = [int(str(by_range[key])) for key in sorted(by_range, key=lambda k: int(str(k)))]
        return AllocatorSettings(
            expandable_segments=bool(snapshot.get("expandable_segments", False)),
            large_segment_bytes=written.get("large_segment_size_mb", 20) * MIB,
            # "Unlimited" is the largest unsigned number, or -1 if it was read as signed.
            max_split_bytes=most if isinstance(most, int) and 0 <= most < 1 << 62 else None,
            max_waste_bytes=written.get("max_non_split_rounding_mb", 20) * MIB,
            divisions=(*numbers, *(0,) * ROUNDING_RANGES)[:ROUNDING_RANGES],
        )

    def block_bytes(self, nbytes: int) -> int:
        """Return the size of the smallest block that holds ``nbytes``; 0 bytes take no block."""
        if nbytes == 0:
            return 0
        index = min(max(nbytes.bit_length() - MIB.bit_length(), 0), ROUNDING_RANGES - 1)
        divisions = self.divisions[index]
        if divisions > 1 and nbytes > LEAST_BLOCK_BYTES * divisions:
            part = (1 << (nbytes.bit_length() - 1)) // divisions
            return -(-nbytes // part) * part
        return -(-nbytes // LEAST_BLOCK_BYTES) * LEAST_BLOCK_BYTES

    def segment_bytes(self, block_bytes: int) -> int:
        """Return the size of the segment that is taken for a block of this size."""
        if block_bytes <= MOST_SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if block_bytes < WHOLE_SEGMENT_FROM_BYTES:
            return self.large_segment_bytes
        return -(-block_bytes // (2 * MIB)) * 2 * MIB


def _integer_settings(text: str) -> dict[str, int]:
    """Return the settings in ``text`` whose value is one integer."""
    pairs = (entry.partition(":") for entry in text.replace(" ", "").split(","))
    return {key: int(value) for key, _, value in pairs if value.isdigit()}


@dataclass(slots=True, eq=False)
class _Block:
    """A part of a segment, linked with its neighbors.

    Attributes:
        address: address of its first byte; addresses are unique across segments.
        nbytes: its size.
        pool: the pool that it belongs to.
        free: whether it is not handed out.
        before, after: its neighbors in the segment.
    """

    address: int
    nbytes: int
    pool: _Pool
    free: bool
    before: _Block | None = None
    after: _Block | None = None


@dataclass(slots=True, eq=False)
class _Pool:
    """The free blocks of one stream in the small or the large pool.

    Attributes:
        small: whether this is the small pool.
        end: where the growing segment ends, or will begin.
        order: size and address of each block, ascending.
        blocks: blocks by address.
        last: the last block of the growing segment.
    """

    small: bool
    end: int
    order: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[int, _Block] = field(default_factory=dict)
    last: _Block | None = None

    def add(self, block: _Block) -> None:
        insort(self.order, (block.nbytes, block.address))
        self.blocks[block.address] = block

    def remove(self, block: _Block) -> None:
        del self.order[bisect_left(self.order, (block.nbytes, block.address))]
        del self.blocks[block.address]


class CachingAllocator:
    """The caching allocator of one device, with an empty cache at first.

    Attributes:
        allocated_bytes: bytes of the blocks that are handed out, each counted whole.
        reserved_bytes: bytes that were taken from the device.
        peak_allocated_bytes: the maximum of ``allocated_bytes``.
        peak_reserved_bytes: the maximum of ``reserved_bytes``.
    """

    def __init__(self, settings: AllocatorSettings | None = None) -> None:
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self._settings = settings or AllocatorSettings()
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._held: dict[int, _Block | None] = {}
        self._last_handle = 0
        self._next_address = 0

    def allocate(self, nbytes: int, *, stream: int = 0) -> int:
        """Hand out a block for ``nbytes`` and return the handle by which it is freed.

        Raises:
            ValueError: ``nbytes`` is negative.
        """
        if nbytes < 0:
            raise ValueError(f"{nbytes} bytes cannot be allocated")
        self._last_handle += 1
        size = self._settings.block_bytes(nbytes)
        block = self._take_block(size, stream) if size else None
        self._held[self._last_handle] = block
        if block is not None:
            self.allocated_bytes += block.nbytes
            self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return self._last_handle

    def free(self, handle: int) -> None:
        """Put a block back into its stream's pool.

        Raises:
            ValueError: the handle belongs to no block that is handed out.
        """
        if handle not in self._held:
            raise ValueError(f"handle {handle} was never handed out, or is free already")
        block = self._held.pop(handle)
        if block is None:
            return
        self.allocated_bytes -= block.nbytes
        before, after, pool = block.before, block.after, block.pool
        if before is not None and before.free:
            pool.remove(before)
            self._join(before, block)
            block = before
        if after is not None and after.free:
            pool.remove(after)
            self._join(block, after)
        block.free = True
        pool.add(block)

    def blocks(self) -> tuple[tuple[int, int, bool], ...]:
        """Return address, size and whether it is free for each block, by address.

        Adjacent addresses mean that two blocks lie in the same segment.
        """
        free = [block for pool in self._pools.values() for block in pool.blocks.values()]
        every = [*free, *(block for block in self._held.values() if block is not None)]
        return tuple(sorted((block.address, block.nbytes, block.free) for block in every))

    def _take_block(self, size: int, stream: int) -> _Block:
        """Take a block of at least ``size`` bytes, and split it if the rules say so."""
        pool = self._pool(small=size <= MOST_SMALL_BYTES, stream=stream)
        settings = self._settings
        block = self._best_fit(pool, size)
        if block is not None:
            pool.remove(block)
        elif settings.expandable_segments:
            block = self._grow_segment(pool, size)
        else:
            nbytes = settings.segment_bytes(size)
            block = _Block(self._new_addresses(nbytes), nbytes, pool, free=False)
            self._reserve(nbytes)
        block.free = False
        if self._is_split(pool, block.nbytes, size):
            self._split(block, size)
        return block

    def _best_fit(self, pool: _Pool, size: int) -> _Block | None:
        """Return the free block that serves the request, or ``None``."""
        settings, order = self._settings, pool.order
        index = bisect_left(order, (size, -1))
        if index == len(order):
            return None
        block = pool.blocks[order[index][1]]
        if settings.expandable_segments and block is pool.last and index + 1 < len(order):
            block = pool.blocks[order[index + 1][1]]
        most = settings.max_split_bytes
        if most is not None:
            if size < most <= block.nbytes:
                return None
            if size >= most and block.nbytes >= size + settings.max_waste_bytes:
                return None
        return block

    def _grow_segment(self, pool: _Pool, size: int) -> _Block:
        """Grow the segment until its last block has ``size`` bytes, and return that block."""
        unit = SMALL_SEGMENT_BYTES if pool.small else self._settings.large_segment_bytes
        last = pool.last
        if last is not None and last.free:
            pool.remove(last)
            block = last
        else:
            block = _Block(pool.end, 0, pool, free=False, before=last)
            if last is not None:
                last.after = block
            pool.last = block
        more = -(-max(size - block.nbytes, 0) // unit) * unit
        block.nbytes += more
        pool.end += more
        self._reserve(more)
        return block

    def _is_split(self, pool: _Pool, nbytes: int, size: int) -> bool:
        left = nbytes - size
        if pool.small or self._settings.expandable_segments:
            return left >= LEAST_BLOCK_BYTES
        most = self._settings.max_split_bytes
        return left > MOST_SMALL_BYTES and (most is None or size < most)

    @staticmethod
    def _split(block: _Block, size: int) -> None:
        """Cut ``block`` to ``size`` bytes; the rest becomes a free block after it."""
        pool, after = block.pool, block.after
        rest = _Block(
            block.address + size, block.nbytes - size, pool, free=True, before=block, after=after
        )
        if after is not None:
            after.before = rest
        block.nbytes, block.after = size, rest
        if pool.last is block:
            pool.last = rest
        pool.add(rest)

    @staticmethod
    def _join(first: _Block, second: _Block) -> None:
        """Merge ``second`` into ``first``, its neighbor in front."""
        first.nbytes += second.nbytes
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        if first.pool.last is second:
            first.pool.last = first

    def _pool(self, *, small: bool, stream: int) -> _Pool:
        pool = self._pools.get((stream, small))
        if pool is None:
            # The segment may grow to this size without meeting another one.
            end = self._new_addresses(1 << 50) if self._settings.expandable_segments else 0
            pool = self._pools[stream, small] = _Pool(small, end)
        return pool

    def _new_addresses(self, nbytes: int) -> int:
        """Return the first of ``nbytes`` unused addresses, with a gap to all others."""
        begin = self._next_address
        self._next_address += nbytes + LEAST_BLOCK_BYTES
        return begin

    def _reserve(self, nbytes: int) -> None:
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
