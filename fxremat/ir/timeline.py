"""What a schedule does over time, as found by replaying it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from fxremat.ir.schedule import (
    Activations,
    Compute,
    Free,
    Move,
    Offload,
    Op,
    Part,
    Prefetch,
    Schedule,
    Wait,
)


class Lane(Enum):
    """What an operation occupies while it runs."""

    COMPUTE = "compute"
    D2H = "D2H"
    H2D = "H2D"


@dataclass(frozen=True, slots=True)
class Idle:
    """Seconds that the compute lane does nothing, by what it waits for.

    Attributes:
        memory_s: room in device memory.
        data_s: what was offloaded to be back.
        lane_s: a prefetch that comes before in the schedule to start, its lane being busy.
    """

    memory_s: float = 0.0
    data_s: float = 0.0
    lane_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All causes together."""
        return self.memory_s + self.data_s + self.lane_s


@dataclass(frozen=True, slots=True)
class Copy:
    """A transfer of a single storage, as emitted graphs do it; its lane says which way.

    Attributes:
        name: of the tensor that the storage was made for.
        stage: which stage computes it.
        nbytes: its size.
    """

    name: str
    stage: int
    nbytes: int

    def __str__(self) -> str:
        return f"copy {self.name}"


@dataclass(frozen=True, slots=True)
class Event:
    """One operation of a replay.

    Attributes:
        op: the operation.
        start_s, end_s: seconds since the step began.
        peak_bytes: most memory held at any instant of the operation.
        held_bytes: memory held once it is done.
        lane: where it ran. A ``Wait`` and a ``Free`` occupy none: they are the instant at
            which what they are about is whole, or given back.
        idle: what the compute lane waited for right before it.
    """

    op: Op | Copy
    start_s: float
    end_s: float
    peak_bytes: int
    held_bytes: int
    lane: Lane = Lane.COMPUTE
    idle: Idle = Idle()


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

    def actions(self, moves: Sequence[Move]) -> Schedule:
        """The operations of the compute lane with transfers where they are issued.

        Args:
            moves: storages that travel in this step.
        """
        copies = [e.op for e in self.events if e.lane is Lane.D2H and isinstance(e.op, Copy)]
        leaving = sorted(moves, key=lambda move: move.offload)
        storage: dict[int, Activations] = {}
        seen: Counter[str] = Counter()
        for move, copy in zip(leaving, copies, strict=True):
            # Several results of one operation have its name.
            name = f"{copy.name}.{seen[copy.name]}" if copy.name in seen else copy.name
            storage[move.storage] = Activations(Part.SAVED, copy.stage, name)
            seen[copy.name] += 1
        back = sorted(moves, key=lambda move: move.wait)
        ops: list[Op] = []
        calls = [e.op for e in self.events if e.lane is Lane.COMPUTE]
        for index, op in enumerate(calls):
            ops += (Offload(storage[m.storage]) for m in moves if m.offload == index)
            ops += (Free(storage[m.storage]) for m in moves if m.release == index)
            ops += (Prefetch(storage[m.storage]) for m in back if m.prefetch == index)
            ops += (Wait(storage[m.storage]) for m in moves if m.wait == index)
            assert isinstance(op, Compute)
            ops.append(op)
        return Schedule(tuple(ops))

    @property
    def idle(self) -> Idle:
        """What the compute lane waits for between its first and its last operation."""
        waits = [e.idle for e in self.events]
        return Idle(
            sum(w.memory_s for w in waits),
            sum(w.data_s for w in waits),
            sum(w.lane_s for w in waits),
        )
