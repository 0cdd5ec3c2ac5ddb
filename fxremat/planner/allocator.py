"""What torch's caching allocator for CUDA hands out, and what it takes from the device.

A tensor's bytes are not what its allocation takes. Requests are rounded; a cached block is
handed out whole where what would be left over is small; memory comes from the device in
segments. The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` and
``c10/core/AllocatorConfig.cpp`` in torch 2.11 to 2.15, whose allocator of that name is called
"native":

* Sizes are rounded up to 512 bytes, or to a fraction of a power of two
  (``roundup_power2_divisions``). Up to 1 MiB they are of the small pool, else of the large one.
* Each stream has its own free blocks in each pool. The smallest one that is large enough is
  taken; among those of one size that of the oldest segment, and the lowest address in it.
* A block is split if at least 512 bytes are left over, in the large pool if more than 1 MiB is.
* With no such block a segment is taken: 2 MiB for the small pool; 20 MiB
  (``large_segment_size_mb``) up to 10 MiB; from there on what is asked for, in 2 MiB.
* A freed block merges with the free ones beside it in its segment.
* With ``expandable_segments`` a stream has one segment in each pool, which grows by 2 MiB or
  20 MiB at its end, and every block is split that leaves 512 bytes. A free block at the end
  counts as endless when the best fit is looked for.
* With ``max_split_size_mb`` blocks of that size are neither split nor given to smaller requests,
  nor to one that would waste ``max_non_split_rounding_mb``.

Where two free blocks of one size lie in different segments, that of the segment that was taken
first is handed out. Nothing ever goes back to the device: that happens where memory runs out, when
a cache is emptied, or beyond a ``garbage_collection_threshold``.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass, field

MIB = 1 << 20
"""Bytes."""


LEAST_BLOCK_BYTES = 512
"""Of which every block is a multiple."""

MOST_SMALL_BYTES = MIB
"""The largest block of the small pool; also what a large block may leave over unsplit."""

SMALL_SEGMENT_BYTES = 2 * MIB

WHOLE_SEGMENT_FROM_BYTES = 10 * MIB
"""From here on a request gets a segment of its own, in multiples of 2 MiB."""

ROUNDING_RANGES = 16
"""Ranges of sizes with divisions of their own: from 1 MiB, 2 MiB, … 32 GiB on."""


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """Which of the rules hold.

    Attributes:
        expandable_segments: segments grow.
        large_segment_bytes: what the large pool takes at once.
        max_split_bytes: blocks of this size on are kept whole; ``None``: none is.
        max_waste_bytes: what such a block may be larger than the request.
        divisions: into how many parts the stretch between two powers of two is divided, sizes
            being rounded up to one of them: for each of the 16 ranges of sizes; 0 or 1: none.
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
        """Of ``torch.cuda.memory._snapshot()["allocator_settings"]``.

        Two sizes are told there only in the text of the environment variable.
        """
        written = _written(" ".join(str(v) for k, v in snapshot.items() if "ALLOC_CONF" in k))
        most = snapshot.get("max_split_size")
        divisions = snapshot.get("roundup_power2_divisions")
        by_range = divisions if isinstance(divisions, Mapping) else {}
        numbers = [int(str(by_range[key])) for key in sorted(by_range, key=lambda k: int(str(k)))]
        return AllocatorSettings(
            expandable_segments=bool(snapshot.get("expandable_segments", False)),
            large_segment_bytes=written.get("large_segment_size_mb", 20) * MIB,
            # Unlimited is the largest number that there is, or -1 once it is signed.
            max_split_bytes=most if isinstance(most, int) and 0 <= most < 1 << 62 else None,
            max_waste_bytes=written.get("max_non_split_rounding_mb", 20) * MIB,
            divisions=(*numbers, *(0,) * ROUNDING_RANGES)[:ROUNDING_RANGES],
        )

    def block_bytes(self, nbytes: int) -> int:
        """The least block that holds ``nbytes``; 0 takes none."""
        if nbytes == 0:
            return 0
        index = min(max(nbytes.bit_length() - MIB.bit_length(), 0), ROUNDING_RANGES - 1)
        divisions = self.divisions[index]
        if divisions > 1 and nbytes > LEAST_BLOCK_BYTES * divisions:
            part = (1 << (nbytes.bit_length() - 1)) // divisions
            return -(-nbytes // part) * part
        return -(-nbytes // LEAST_BLOCK_BYTES) * LEAST_BLOCK_BYTES

    def segment_bytes(self, block_bytes: int) -> int:
        """What is taken from the device for a block that no free one can hold."""
        if block_bytes <= MOST_SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if block_bytes < WHOLE_SEGMENT_FROM_BYTES:
            return self.large_segment_bytes
        return -(-block_bytes // (2 * MIB)) * 2 * MIB


def _written(text: str) -> dict[str, int]:
    """The settings in ``text`` whose value is one whole number."""
    pairs = (entry.partition(":") for entry in text.replace(" ", "").split(","))
    return {key: int(value) for key, _, value in pairs if value.isdigit()}


@dataclass(slots=True, eq=False)
class _Block:
    """A part of a segment, in a list with those beside it.

    Attributes:
        address: its first byte; each segment has addresses of its own.
        nbytes: its size.
        pool: where it is when it is free.
        free: nobody has it.
        before, after: its neighbours in the segment.
    """

    address: int
    nbytes: int
    pool: _Pool
    free: bool
    before: _Block | None = None
    after: _Block | None = None


@dataclass(slots=True, eq=False)
class _Pool:
    """The free blocks of one stream, small or large.

    Attributes:
        small: which.
        order: size and address of each, ascending.
        blocks: each by its address.
        last: the last block of the segment that grows.
        end: where that segment ends; where it will begin if there is none.
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
    """The allocator of one device, its cache empty at first.

    Attributes:
        allocated_bytes: in blocks that are handed out, each counted whole.
        reserved_bytes: taken from the device.
        peak_allocated_bytes, peak_reserved_bytes: the most of each.
    """

    def __init__(self, settings: AllocatorSettings | None = None) -> None:
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self._settings = settings or AllocatorSettings()
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._held: dict[int, _Block | None] = {}
        self._handles = 0
        self._ends = 0

    def allocate(self, nbytes: int, *, stream: int = 0) -> int:
        """Hand out a block for ``nbytes``; returns a handle to free it by.

        Raises:
            ValueError: ``nbytes`` is negative.
        """
        if nbytes < 0:
            raise ValueError(f"{nbytes} bytes cannot be allocated")
        self._handles += 1
        size = self._settings.block_bytes(nbytes)
        block = self._take(size, stream) if size else None
        self._held[self._handles] = block
        if block is not None:
            self.allocated_bytes += block.nbytes
            self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return self._handles

    def free(self, handle: int) -> None:
        """Take a block back into its stream's pool.

        Raises:
            ValueError: the handle is of no block that is handed out.
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
        """Address, size and whether it is free of each block, by address.

        Blocks follow each other without a gap only within a segment.
        """
        free = [block for pool in self._pools.values() for block in pool.blocks.values()]
        every = [*free, *(block for block in self._held.values() if block is not None)]
        return tuple(sorted((block.address, block.nbytes, block.free) for block in every))

    def _take(self, size: int, stream: int) -> _Block:
        """A block of at least ``size``, split where that is done."""
        pool = self._pool(small=size <= MOST_SMALL_BYTES, stream=stream)
        settings = self._settings
        block = self._best(pool, size)
        if block is not None:
            pool.remove(block)
        elif settings.expandable_segments:
            block = self._grown(pool, size)
        else:
            nbytes = settings.segment_bytes(size)
            block = _Block(self._place(nbytes), nbytes, pool, free=False)
            self._reserve(nbytes)
        block.free = False
        if self._is_split(pool, block.nbytes, size):
            self._split(block, size)
        return block

    def _best(self, pool: _Pool, size: int) -> _Block | None:
        """The free block to use."""
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

    def _grown(self, pool: _Pool, size: int) -> _Block:
        """The end of the segment that grows, made large enough."""
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
        """Leave ``size`` bytes of ``block``; the rest is a free one after it."""
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
        """``second`` becomes a part of ``first``, which lies before it."""
        first.nbytes += second.nbytes
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        if first.pool.last is second:
            first.pool.last = first

    def _pool(self, *, small: bool, stream: int) -> _Pool:
        pool = self._pools.get((stream, small))
        if pool is None:
            # Room to grow to: no other segment begins there.
            end = self._place(1 << 50) if self._settings.expandable_segments else 0
            pool = self._pools[stream, small] = _Pool(small, end)
        return pool

    def _place(self, nbytes: int) -> int:
        """Addresses that nothing else has, nor anything right beside them."""
        begin = self._ends
        self._ends += nbytes + LEAST_BLOCK_BYTES
        return begin

    def _reserve(self, nbytes: int) -> None:
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
