"""Instances of storages as bits, for the exhaustive searches.

A recomputed storage is another instance of it, and both may be in memory at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fxremat.ir import Storage


class Instances:
    """Bit ``storage * copies + n`` is instance ``n`` of a storage."""

    def __init__(self, storages: Sequence[Storage], copies: int) -> None:
        self._nbytes = [storage.nbytes for storage in storages]
        self._copies = copies
        self._sizes: dict[int, int] = {}
        every = (1 << copies) - 1
        self._slot = [every << (i * copies) for i in range(len(storages))]

    def within(self, storages: Iterable[int]) -> int:
        """All instances of ``storages``."""
        return sum(self._slot[storage] for storage in storages)

    def new(self, storages: frozenset[int], *, held: int, source: int) -> int:
        """New instances of ``storages`` but those in ``source``: the lowest unused numbers."""
        new = 0
        for storage in storages:
            if not source & self._slot[storage]:
                base = 1 << (storage * self._copies)
                taken = (held & self._slot[storage]) // base
                new |= (~taken & (taken + 1)) * base
        return new

    def nbytes(self, mask: int) -> int:
        """Bytes of the instances in ``mask``."""
        nbytes = self._sizes.get(mask)
        if nbytes is None:
            nbytes = self._sizes[mask] = sum(
                (mask & slot).bit_count() * size
                for slot, size in zip(self._slot, self._nbytes, strict=True)
            )
        return nbytes


def union(values: Iterable[int]) -> int:
    """All instances in ``values``, of which negative ones stand for nothing held."""
    held = 0
    for value in values:
        if value > 0:
            held |= value
    return held
