"""What a schedule does over time, as found by replaying it."""

from __future__ import annotations

from dataclasses import dataclass

from fxremat.ir.schedule import Op


@dataclass(frozen=True, slots=True)
class Event:
    """One operation of a replay.

    Attributes:
        op: the operation.
        start_s, end_s: seconds since the step began.
        peak_bytes: most memory held at any instant of the operation.
        held_bytes: memory held once it is done.
    """

    op: Op
    start_s: float
    end_s: float
    peak_bytes: int
    held_bytes: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """The replay of a whole schedule."""

    events: tuple[Event, ...]

    @property
    def makespan_s(self) -> float:
        """Seconds from the first operation's start to the last one's end."""
        return self.events[-1].end_s if self.events else 0.0

    @property
    def peak_bytes(self) -> int:
        """Most memory held at any instant, ``fixed_bytes`` included."""
        return max((e.peak_bytes for e in self.events), default=0)
