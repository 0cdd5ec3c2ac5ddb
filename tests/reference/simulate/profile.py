"""Device memory over time, piecewise linear, and when there is room for more."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

Key = tuple[float, int, int]
"""When a change happens: seconds, the index of the operation, its own order there.

At one instant the changes of earlier operations come first. That an operation depends on none
after it makes this their order."""


class Jump(NamedTuple):
    """``nbytes`` more from ``key`` on."""

    key: Key
    nbytes: float


class Ramp(NamedTuple):
    """``nbytes`` more, evenly from ``key`` to ``end_s``."""

    key: Key
    end_s: float
    nbytes: float

    def at(self, seconds: float) -> float:
        """Bytes at ``seconds``, between its start and its end."""
        begin = self.key[0]
        return self.nbytes * ((seconds - begin) / (self.end_s - begin))


class Piece(NamedTuple):
    """From ``begin_s`` to ``end_s`` memory goes from ``begin`` to ``end`` bytes."""

    begin_s: float
    end_s: float
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Room:
    """How much may be held: ``limit_bytes``, but for rounding errors of ``slack_bytes``."""

    limit_bytes: float
    slack_bytes: float


class Profile:
    """What is held at every instant; grows by changes, and answers for the time after ``now``."""

    def __init__(self, nbytes: int) -> None:
        self.first_bytes = nbytes
        self.past_bytes: float = nbytes  # of all changes that ``forget`` has seen the end of
        self.jumps: list[Jump] = []
        self.ramps: list[Ramp] = []
        self.past: list[Jump | Ramp] = []

    def jump(self, key: Key, nbytes: float) -> None:
        """Hold ``nbytes`` more from ``key`` on."""
        if nbytes:
            self.jumps.append(Jump(key, nbytes))

    def ramp(self, key: Key, end_s: float, nbytes: float) -> None:
        """Hold ``nbytes`` more, evenly from ``key`` to ``end_s``."""
        if end_s <= key[0]:
            self.jump(key, nbytes)
        elif nbytes:
            self.ramps.append(Ramp(key, end_s, nbytes))

    def forget(self, now_s: float) -> None:
        """Nothing will be asked of the time before ``now_s``."""
        over = [j for j in self.jumps if j.key[0] <= now_s]
        done = [r for r in self.ramps if r.end_s <= now_s]
        if over or done:
            self.past += over
            self.past += done
            self.past_bytes += sum(j.nbytes for j in over) + sum(r.nbytes for r in done)
            self.jumps = [j for j in self.jumps if j.key[0] > now_s]
            self.ramps = [r for r in self.ramps if r.end_s > now_s]

    def pieces(self, now_s: float) -> list[Piece]:
        """The time after ``now_s``, the last piece without end."""
        stops = {now_s}
        stops |= {j.key[0] for j in self.jumps}
        stops |= {s for r in self.ramps for s in (r.key[0], r.end_s)}
        times = sorted(s for s in stops if s >= now_s)
        found = []
        for begin, end in zip(times, [*times[1:], math.inf], strict=True):
            held = self.past_bytes + sum(j.nbytes for j in self.jumps if j.key[0] <= begin)
            grown = 0.0
            for r in self.ramps:
                if r.end_s <= begin:
                    held += r.nbytes
                elif r.key[0] <= begin:
                    held += r.at(begin)
                    grown += r.at(end) - r.at(begin)
            found.append(Piece(begin, end, held, held + grown))
        return found

    def changes(self) -> list[Jump | Ramp]:
        """All that ever happened."""
        return [*self.past, *self.jumps, *self.ramps]


class _Crowd(NamedTuple):
    """From ``begin_s`` (itself only if ``closed``) until before ``end_s`` there is no room."""

    begin_s: float
    end_s: float
    closed: bool


def _crowds(pieces: Iterable[Piece], room: Room) -> Iterator[_Crowd]:
    limit = room.limit_bytes
    most = limit + room.slack_bytes
    for begin_s, end_s, begin, end in pieces:
        if begin <= most and end <= most:
            continue
        if end_s == math.inf or (begin > limit and end > limit):
            yield _Crowd(begin_s, end_s, begin > most)
        else:
            crossing = begin_s + (end_s - begin_s) * ((limit - begin) / (end - begin))
            if begin > end:
                yield _Crowd(begin_s, crossing, True)
            else:
                yield _Crowd(crossing, end_s, False)


def when_steps_fit(
    pieces: list[Piece], room: Room, *, seconds: float, first: float, later: float
) -> float:
    """The earliest start of something that holds ``first`` bytes for ``seconds``, then ``later``.

    Returns:
        Infinity if there will never be room.
    """
    limit, slack = room.limit_bytes, room.slack_bytes
    start = pieces[0].begin_s
    for crowd in _crowds(pieces, Room(limit - later, slack)):
        if start + seconds < crowd.end_s:
            start = crowd.end_s - seconds
    for crowd in _crowds(pieces, Room(limit - first, slack)):
        begins = crowd.begin_s < start or (crowd.closed and crowd.begin_s == start)
        if crowd.end_s > start and (begins or crowd.begin_s < start + seconds):
            start = crowd.end_s
    return start


def when_ramp_fits(pieces: list[Piece], room: Room, *, seconds: float, nbytes: float) -> float:
    """The earliest start of something that takes ``nbytes`` evenly over ``seconds``.

    Starting late is as good as pausing: either way it ends when the last of its bytes fits.

    Returns:
        Infinity if there will never be room.
    """
    if seconds <= 0.0:
        return when_steps_fit(pieces, room, seconds=0.0, first=nbytes, later=nbytes)
    rate = nbytes / seconds
    start = pieces[0].begin_s
    for crowd in _crowds(pieces, Room(room.limit_bytes - nbytes, room.slack_bytes)):
        if crowd.end_s == math.inf:
            return math.inf
        piece = next(p for p in pieces if p.begin_s <= crowd.begin_s and crowd.end_s <= p.end_s)
        slope = (piece.end - piece.begin) / (piece.end_s - piece.begin_s)
        for time_s in (crowd.begin_s, crowd.end_s):
            held = piece.begin + slope * (time_s - piece.begin_s)
            # Held together with nbytes - rate * (time left until the end) at this time.
            start = max(start, time_s - max(0.0, room.limit_bytes - held) / rate)
    return start


def running_totals(
    first_bytes: float, changes: Iterable[Jump | Ramp], marks: Iterable[Key]
) -> dict[Key, tuple[float, float]]:
    """Memory before and after every change and mark, in their order."""
    steps: dict[Key, list[Jump | Ramp]] = {key: [] for key in marks}
    for change in changes:
        steps.setdefault(change.key, []).append(change)
        if isinstance(change, Ramp):
            steps.setdefault((change.end_s, *change.key[1:]), [])
    found: dict[Key, tuple[float, float]] = {}
    base: float = first_bytes
    rising: list[Ramp] = []
    for key in sorted(steps):
        now = key[0]
        if rising:
            base += sum(r.nbytes for r in rising if r.end_s <= now)
            rising = [r for r in rising if r.end_s > now]
        slopes = sum(r.at(now) for r in rising)
        before = base + slopes
        for change in steps[key]:
            if isinstance(change, Ramp):
                rising.append(change)
            else:
                base += change.nbytes
        found[key] = (before, base + slopes)
    return found
