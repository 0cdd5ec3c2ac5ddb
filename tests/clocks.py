"""Vector clocks: which accesses to memory are ordered, whatever order they happen to run in.

A clock counts, of every timeline, the work that comes before a point. What is before what
follows from three rules: a timeline does its work in order; what waits for an event comes
after what was there when the event was recorded; and what is enqueued comes after what the
host had waited for. So one run finds a missing order that no run may ever show as wrong data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

GRAIN_BYTES = 32
"""Accesses begin and end at multiples of it."""


class Timeline:
    """What does its work in order: a stream, or the host.

    Attributes:
        name: what races are told with.
        index: its place in every clock.
        clock: of each timeline, how much of its work comes before what is done here next.
    """

    def __init__(self, name: str, *, index: int, timelines: int) -> None:
        self.name = name
        self.index = index
        self.clock = [0] * timelines

    def come_after(self, clock: Sequence[int]) -> None:
        """Do nothing more before what ``clock`` counts."""
        self.clock = list(map(max, self.clock, clock))

    def tick(self) -> None:
        """One more piece of work."""
        self.clock[self.index] += 1


class Access(NamedTuple):
    """One piece of work that reads or writes memory."""

    timeline: int
    time: int
    what: str


class Memory:
    """A range of memory, with the accesses that later ones have to come after.

    Attributes:
        name: what races are told with.
        address: its first byte.
        nbytes: its size, a multiple of ``GRAIN_BYTES``.
    """

    def __init__(self, name: str, *, address: int, nbytes: int) -> None:
        assert nbytes % GRAIN_BYTES == 0
        self.name, self.address, self.nbytes = name, address, nbytes
        grains = range(nbytes // GRAIN_BYTES)
        self._writes: list[Access | None] = [None for _ in grains]
        self._reads: list[dict[int, Access]] = [{} for _ in grains]

    def read(self, by: Timeline, begin: int, end: int, *, what: str) -> list[str]:
        """Note that ``by`` reads ``[begin, end)`` now; the races of that."""
        access = Access(by.index, by.clock[by.index], f"{by.name} {what} (read)")
        races = []
        for grain in self._grains(begin, end):
            races += self._races(by, access.what, grain, [self._writes[grain]])
            self._reads[grain][by.index] = access
        return races

    def write(self, by: Timeline, begin: int, end: int, *, what: str) -> list[str]:
        """Note that ``by`` writes ``[begin, end)`` now; the races of that."""
        access = Access(by.index, by.clock[by.index], f"{by.name} {what} (write)")
        races = []
        for grain in self._grains(begin, end):
            races += self._races(by, access.what, grain, self._earlier(grain))
            self._writes[grain] = access
            self._reads[grain].clear()
        return races

    def reuse(self, by: Timeline, *, what: str) -> list[str]:
        """The races if all of it is handed to ``by`` now: accesses that do not come before."""
        races = []
        for grain in self._grains(0, self.nbytes):
            races += self._races(by, f"{by.name} {what}", grain, self._earlier(grain))
        return races

    def _earlier(self, grain: int) -> list[Access | None]:
        return [self._writes[grain], *self._reads[grain].values()]

    def _grains(self, begin: int, end: int) -> range:
        assert begin % GRAIN_BYTES == end % GRAIN_BYTES == 0
        assert 0 <= begin <= end <= self.nbytes
        return range(begin // GRAIN_BYTES, end // GRAIN_BYTES)

    def _races(
        self, by: Timeline, what: str, grain: int, earlier: Iterable[Access | None]
    ) -> list[str]:
        return [
            f"{what} at byte {grain * GRAIN_BYTES} of {self.name}, "
            f"which is not ordered after {access.what}"
            for access in earlier
            if access is not None and access.time > by.clock[access.timeline]
        ]
