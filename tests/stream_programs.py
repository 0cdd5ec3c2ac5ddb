"""What a step does on a device: calls, and values that travel in between, at random."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from tests.clocks import GRAIN_BYTES

MOST_HOST_BYTES = 12 * 4 * GRAIN_BYTES
"""What no program needs more than."""


@dataclass(frozen=True, slots=True)
class Trip:
    """Where a value travels. Places are numbers of calls, and mean the instant before.

    Attributes:
        offload: its copy to the host begins.
        release: it is dropped on the device, once copied; ``None`` if it is held until it
            has come back.
        prefetch: its copy back begins. The next call that reads it waits for that.
    """

    offload: int
    release: int | None
    prefetch: int

    @staticmethod
    def drawn(draw: random.Random, first: int, last: int, *, turn: int) -> Trip:
        """Places in ``[first, last]``; one over the turn leaves before and comes back after."""
        if first <= turn <= last:
            offload, release = sorted(draw.randint(first, turn) for _ in range(2))
            prefetch = draw.randint(turn, last)
        else:
            offload, release, prefetch = sorted(draw.randint(first, last) for _ in range(3))
        return Trip(offload, release if draw.random() < 7 / 8 else None, prefetch)


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of a step.

    Attributes:
        nbytes: its size.
        counted_bytes: what the plan counts for it, which may be more.
        made: the call that makes it.
        last: the last call that reads it, but for the next.
        next: the call that reads it after it was away, the last of all.
        trip: how it travels in between, if it does.
        offset: where on the host.
    """

    nbytes: int
    counted_bytes: int
    made: int
    last: int
    next: int
    trip: Trip | None
    offset: int = 0

    @staticmethod
    def drawn(draw: random.Random, made: int, *, turn: int) -> Value:
        """What is made in the forward is mostly read by the call that mirrors its own."""
        calls = 2 * turn
        last = min(made + 1, calls - 1)
        mirrored = made < turn and draw.random() < 4 / 5
        following = calls - 1 - made if mirrored else draw.randint(last, calls - 1)
        travels = following > last + 1 and draw.random() < 4 / 5
        nbytes = GRAIN_BYTES * draw.choice([1, 1, 1, 2, 3])
        return Value(
            nbytes=nbytes,
            counted_bytes=nbytes + draw.choice([0, 0, GRAIN_BYTES]),
            made=made,
            last=last,
            next=following,
            trip=Trip.drawn(draw, last + 1, following, turn=turn) if travels else None,
        )

    def read_by(self, call: int) -> bool:
        """Whether that call reads it."""
        return self.made < call <= self.last or call == self.next != self.made


@dataclass(frozen=True, slots=True)
class Program:
    """What a step does: at each place transfers, then a call that makes one value.

    Attributes:
        values: one for each call.
        turn: the first call of the backward.
        host_bytes: what the transfers need.
        trips: number, value and trip of those that travel, the first to be read first.
    """

    values: tuple[Value, ...]
    turn: int
    host_bytes: int
    trips: tuple[tuple[int, Value, Trip], ...]

    @staticmethod
    def drawn(draw: random.Random) -> Program:
        """Values that are read again in the backward, and temporary ones of either half."""
        turn = draw.randint(2, 6)
        values = [Value.drawn(draw, made, turn=turn) for made in range(2 * turn)]
        trips = [(i, v, v.trip) for i, v in enumerate(values) if v.trip is not None]
        placed: list[tuple[int, Value, Trip]] = []
        for i, value, trip in trips:
            placed.append((i, replace(value, offset=_first_gap(value, trip, placed)), trip))
        placed.sort(key=lambda x: x[1].next)
        host_bytes = max((v.offset + v.counted_bytes for _, v, _ in placed), default=0)
        return Program(tuple(values), turn, host_bytes, tuple(placed))

    @property
    def last_prefetch(self) -> int:
        """The place after which nothing of the host is needed."""
        return max((trip.prefetch for _, _, trip in self.trips), default=0)


def _first_gap(value: Value, trip: Trip, placed: list[tuple[int, Value, Trip]]) -> int:
    """The first place on the host that is free while ``value`` is there.

    A place is taken again as soon as the copy from it has been enqueued: more than emitted
    graphs ask of the runtime, which must keep such copies in order all the same.
    """
    offset = 0
    for _, other, taken in sorted(placed, key=lambda x: x[1].offset):
        apart = trip.prefetch < taken.offload or taken.prefetch < trip.offload
        if not apart and other.offset < offset + value.counted_bytes:
            offset = max(offset, other.offset + other.counted_bytes)
    return offset
