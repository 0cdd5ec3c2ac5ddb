"""What a schedule does over time, as found by replaying it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from fxremat.ir.schedule import Op


class Lane(Enum):
    """What an operation occupies while it runs."""

    COMPUTE = "compute"
    D2H = "D2H"
    H2D = "H2D"


@dataclass(frozen=True, slots=True)
class Event:
    """One operation of a replay.

    Attributes:
        op: the operation.
        start_s, end_s: seconds since the step began.
        peak_bytes: most memory held at any instant of the operation.
        held_bytes: memory held once it is done.
        lane: where it ran.
    """

    op: Op
    start_s: float
    end_s: float
    peak_bytes: int
    held_bytes: int
    lane: Lane = Lane.COMPUTE


@dataclass(frozen=True, slots=True)
class Timeline:
    """The replay of a whole schedule."""

    events: tuple[Event, ...]

    @property
    def makespan_s(self) -> float:
        """Seconds from the first operation's start to the last end of any."""
        return max((e.end_s for e in self.events), default=0.0)

    @property
    def peak_bytes(self) -> int:
        """Most memory held at any instant, ``fixed_bytes`` included."""
        return max((e.peak_bytes for e in self.events), default=0)
