"""The course of a schedule over time, as its replay gives it."""

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
    """The resource that an operation occupies while it runs."""

    COMPUTE = "compute"
    D2H = "D2H"
    H2D = "H2D"


@dataclass(frozen=True, slots=True)
class Idle:
    """Seconds in which the compute lane is idle, by cause.

    Attributes:
        memory_s: waiting for free device memory.
        data_s: waiting for offloaded data to be back.
        lane_s: waiting for an earlier prefetch of the schedule to start, while its lane is busy.
    """

    memory_s: float = 0.0
    data_s: float = 0.0
    lane_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Idle seconds of all causes together."""
        return self.memory_s + self.data_s + self.lane_s


@dataclass(frozen=True, slots=True)
class Copy:
    """A transfer of a single storage, as emitted graphs do it. Its lane gives the direction.

    Attributes:
        name: name of the tensor that the storage was allocated for.
        stage: index of the stage that computes it.
        nbytes: its size in bytes.
    """

    name: str
    stage: int
    nbytes: int

    def __str__(self) -> str:
        return f"copy {self.name}"


@dataclass(frozen=True, slots=True)
class Event:
    """One operation of a replayed schedule, with its times and the memory it holds.

    Attributes:
        op: the operation.
        start_s, end_s: seconds since the step began.
        peak_bytes: maximum memory held during the operation, in bytes.
        held_bytes: memory held once it is done, in bytes.
        lane: lane that it ran on. A ``Wait`` or ``Free`` occupies none: it is the instant at which
            its data is complete, or freed.
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
    """The operations of a replayed schedule, with their times and the memory they hold."""

    events: tuple[Event, ...]

    @property
    def makespan_s(self) -> float:
        """Seconds from the start of the step to the last end of an operation."""
        return max((e.end_s for e in self.events), default=0.0)

    @property
    def peak_bytes(self) -> int:
        """Maximum memory held at any instant in bytes, including ``fixed_bytes``."""
        return max((e.peak_bytes for e in self.events), default=0)

    def actions(self, moves: Sequence[Move]) -> Schedule:
        """Return a schedule of the computations and of the transfers of ``moves`` where they begin.

        Args:
            moves: storages that are offloaded in this step.
        """
        copies = [e.op for e in self.events if e.lane is Lane.D2H and isinstance(e.op, Copy)]
        leaving = sorted(moves, key=lambda move: move.offload)
        storage: dict[int, Activations] = {}
        counts: Counter[str] = Counter()
        for move, copy in zip(leaving, copies, strict=True):
            # All results of one operation have the operation's name.
            name = f"{copy.name}.{counts[copy.name]}" if copy.name in counts else copy.name
            storage[move.storage] = Activations(Part.SAVED, copy.stage, name)
            counts[copy.name] += 1
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
        """Idle seconds of the compute lane by cause, from its first to its last operation."""
        waits = [e.idle for e in self.events]
        return Idle(
            sum(w.memory_s for w in waits),
            sum(w.data_s for w in waits),
            sum(w.lane_s for w in waits),
        )
