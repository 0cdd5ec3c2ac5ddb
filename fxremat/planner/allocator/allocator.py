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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from fxremat.ir import Request
from fxremat.planner.allocator.blocks import (
    ADDRESS,
    ALLOCATED,
    LEAST_BLOCK_BYTES,
    MIB,
    MOST_ALLOCATED,
    MOST_RESERVED,
    NBYTES,
    NONE,
    PLACE,
    RESERVED,
    USED,
    WHOLE_SEGMENT_FROM_BYTES,
    Ints,
    State,
    new_state,
    put_back,
    replay,
    take,
)

ROUNDING_RANGES = 16
"""How many ranges of sizes have their own ``divisions``: from 1 MiB, 2 MiB, …, 32 GiB on."""


NEVER = 1 << 62
"""A size from which blocks are not split that no block has."""

MOST_STREAMS = 16
"""Streams whose blocks :class:`CachingAllocator` keeps separate."""


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """Settings of torch's caching allocator for CUDA, as ``PYTORCH_CUDA_ALLOC_CONF`` gives them.

    Attributes:
        expandable_segments: whether a segment grows instead of a new one being taken.
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
        """Return the settings in ``torch.cuda.memory._snapshot()["allocator_settings"]``.

        ``large_segment_bytes`` and ``max_waste_bytes`` are only in the text of the environment
        variable, which ``snapshot`` includes.
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
        """Return the bytes to which the allocator rounds up a request for ``nbytes``; 0 for 0."""
        if nbytes == 0:
            return 0
        index = min(max(nbytes.bit_length() - MIB.bit_length(), 0), ROUNDING_RANGES - 1)
        divisions = self.divisions[index]
        if divisions > 1 and nbytes > LEAST_BLOCK_BYTES * divisions:
            part = (1 << (nbytes.bit_length() - 1)) // divisions
            return -(-nbytes // part) * part
        return -(-nbytes // LEAST_BLOCK_BYTES) * LEAST_BLOCK_BYTES

    @property
    def rules(self) -> Ints:
        """All settings but ``divisions``, as the array ``planner.allocator.blocks.State.rules``."""
        most = NEVER if self.max_split_bytes is None else self.max_split_bytes
        numbers = self.expandable_segments, self.large_segment_bytes, most, self.max_waste_bytes
        return np.array(numbers, dtype=np.int64)


def _integer_settings(text: str) -> dict[str, int]:
    """Parse text such as ``"name:20,other:True"``; return settings whose value is an integer."""
    pairs = (entry.partition(":") for entry in text.replace(" ", "").split(","))
    return {key: int(value) for key, _, value in pairs if value.isdigit()}


class CachingAllocator:
    """A simulation of torch's caching allocator on one device. Its cache is empty at first."""

    def __init__(self, settings: AllocatorSettings | None = None) -> None:
        self._settings = settings or AllocatorSettings()
        self._state = new_state(self._settings.rules, streams=MOST_STREAMS, blocks=256)
        self._streams: dict[int, int] = {}
        self._held: dict[int, int | None] = {}
        self._last_handle = 0

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the blocks that are handed out now, which may be more than was requested."""
        return int(self._state.totals[ALLOCATED])

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the allocator has taken from the device, in use or cached."""
        return int(self._state.totals[RESERVED])

    @property
    def peak_allocated_bytes(self) -> int:
        """The maximum of ``allocated_bytes`` so far."""
        return int(self._state.totals[MOST_ALLOCATED])

    @property
    def peak_reserved_bytes(self) -> int:
        """The maximum of ``reserved_bytes`` so far."""
        return int(self._state.totals[MOST_RESERVED])

    def allocate(self, nbytes: int, *, stream: int = 0) -> int:
        """Hand out a block of at least ``nbytes``, and return a handle to pass to :meth:`free`.

        Raises:
            ValueError: ``nbytes`` is negative, or more than ``MOST_STREAMS`` streams are used.
        """
        if nbytes < 0:
            raise ValueError(f"{nbytes} bytes cannot be allocated")
        number = self._streams.setdefault(stream, len(self._streams))
        if number >= MOST_STREAMS:
            raise ValueError(f"blocks of more than {MOST_STREAMS} streams cannot be allocated")
        self._last_handle += 1
        size = self._settings.block_bytes(nbytes)
        self._make_room()
        self._held[self._last_handle] = take(self._state, size, number) if size else None
        return self._last_handle

    def free(self, handle: int) -> None:
        """Put the block that was handed out with ``handle`` back among the free blocks.

        Raises:
            ValueError: the handle belongs to no block that is handed out.
        """
        if handle not in self._held:
            raise ValueError(f"handle {handle} was never handed out, or is free already")
        block = self._held.pop(handle)
        if block is not None:
            put_back(self._state, block)

    def blocks(self) -> tuple[tuple[int, int, bool], ...]:
        """Return ``(address, bytes, is_free)`` of every block, in order of addresses.

        Two blocks lie in the same segment if there is no gap between them.
        """
        table, counts = self._state.table, self._state.pools[0]
        free = [n for own, count in zip(self._state.free, counts, strict=True) for n in own[:count]]
        every = [*free, *(block for block in self._held.values() if block is not None)]
        described = ((table[ADDRESS, n], table[NBYTES, n], table[PLACE, n] != NONE) for n in every)
        return tuple(sorted((int(begin), int(size), bool(free)) for begin, size, free in described))

    def _make_room(self) -> None:
        """Double the size of the arrays of blocks if they have no room for two more blocks."""
        state = self._state
        if state.totals[USED] + 2 > state.table.shape[1]:
            table, free = (np.concatenate([x, np.empty_like(x)], axis=1) for x in state[:2])
            self._state = State(table, free, *state[2:])


def peaks_of(
    settings: AllocatorSettings,
    given_bytes: Sequence[int],
    requests: Sequence[Request],
    steps: int,
) -> tuple[int, int]:
    """Simulate ``steps`` equal steps; return the peaks of allocated and of reserved bytes.

    The cache is empty at first.

    Args:
        settings: settings of the allocator.
        given_bytes: sizes of the tensors that exist before the first step.
        requests: allocations and releases of a step, in order.
        steps: number of steps; what a step does not release is released at its end.
    """
    # One pass in Python over thousands of requests takes longer than the replay.
    flat = np.fromiter(chain.from_iterable(requests), np.int64, 2 * len(requests)).reshape(-1, 2)
    _, first, keys = np.unique(flat[:, 0], return_index=True, return_inverse=True)
    keys = np.argsort(np.argsort(first)).astype(np.int64)[keys]  # in order of appearance
    distinct, which = np.unique(flat[:, 1], return_inverse=True)
    blocks = [settings.block_bytes(size) if size > 0 else 0 for size in distinct.tolist()]
    sizes = np.array(blocks, dtype=np.int64)[which]
    given = np.array([settings.block_bytes(size) for size in given_bytes], dtype=np.int64)
    most = 2 * (given.size + steps * int(np.count_nonzero(sizes)))
    state = new_state(settings.rules, streams=1, blocks=most)
    replay(state, given, keys, sizes, steps)
    return int(state.totals[MOST_ALLOCATED]), int(state.totals[MOST_RESERVED])
