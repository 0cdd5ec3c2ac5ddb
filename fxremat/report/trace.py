"""A plan as a trace that Chrome and Perfetto show: operations, copies, and counters of memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

from fxremat.errors import PlanError
from fxremat.ir import Copy, Event, Forward, Lane, Timeline
from fxremat.report.areas import areas_of, memory_of
from fxremat.report.facts import PlanFacts
from fxremat.report.memory import StepMemory

PREDICTED, MEASURED = 1, 2
"""Processes of the trace."""

THREADS = {Lane.COMPUTE: (1, "compute"), Lane.D2H: (2, "to host"), Lane.H2D: (3, "from host")}
COUNTERS = 4
"""Thread of a trace that has the counters."""


class Traced(Protocol):
    """What ``trace_step`` of a compiled module returns."""

    @property
    def measured(self) -> Timeline:
        """The plan's events with real times."""


def trace_of(plan: PlanFacts, traced: Traced | None = None) -> str:
    """The trace as JSON, in the format of trace events, by ascending time.

    Args:
        plan: what is predicted.
        traced: what really happened, shown as a second process. Its bytes are the plan's.

    Raises:
        PlanError: the plan does not say which tensors are held when, or ``traced`` is of another.
    """
    memory = memory_of(plan)
    stages = tuple(stage.name for stage in plan.chain.stages)
    told = Told(memory, stages)
    events = list(told.process(plan.timeline, pid=PREDICTED, name="predicted"))
    if traced is not None:
        measured = traced.measured
        if [e.op for e in measured.events] != [e.op for e in plan.timeline.events]:
            raise PlanError(
                f"the step that was traced made {len(measured.events)} calls and copies that are "
                f"not the {len(plan.timeline.events)} of this plan: trace a step that follows it"
            )
        events += told.process(measured, pid=MEASURED, name="measured")
    return packed(events)


def packed(events: list[dict[str, Any]]) -> str:
    """Trace events as one JSON, by ascending time."""
    events.sort(key=lambda event: event["ts"])
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False)


@dataclass(frozen=True, slots=True)
class Told:
    """What processes of a trace tell of.

    Attributes:
        memory: of the step.
        stages: their names.
        times_s: at which each instant of the memory begins; ``None``: as the timeline says.
    """

    memory: StepMemory
    stages: tuple[str, ...]
    times_s: tuple[float, ...] | None = None

    def process(self, timeline: Timeline, *, pid: int, name: str) -> Iterator[dict[str, Any]]:
        """All events of one process.

        Args:
            timeline: what happens when.
            pid: its number.
            name: what it is called.
        """
        yield named("process_name", name, pid, 0)
        for tid, label in (*THREADS.values(), (COUNTERS, "memory")):
            yield named("thread_name", label, pid, tid)
        for event in timeline.events:
            yield self._run(event, pid)
        times_s = self.memory.times(timeline) if self.times_s is None else self.times_s
        yield from _counters(self.memory, times_s, pid)
        yield from _host(timeline, pid)

    def _run(self, event: Event, pid: int) -> dict[str, Any]:
        """An operation, or a copy."""
        op = event.op
        told: dict[str, Any] = {"peak_bytes": event.peak_bytes, "held_bytes": event.held_bytes}
        category = (
            "copy" if isinstance(op, Copy) else "forward" if isinstance(op, Forward) else "backward"
        )
        if isinstance(op, Copy):
            told["bytes"] = op.nbytes
        stage = getattr(op, "stage", None)
        if stage is not None:
            told |= {"stage": self.stages[stage], "module": self.memory.modules[stage]}
        return {
            "ph": "X",
            "name": str(op),
            "cat": category,
            "ts": event.start_s * 1e6,
            "dur": max(event.end_s - event.start_s, 0.0) * 1e6,
            "pid": pid,
            "tid": THREADS[event.lane][0],
            "args": told,
        }


def named(what: str, name: str, pid: int, tid: int) -> dict[str, Any]:
    """A process or a thread has a name."""
    return {"ph": "M", "name": what, "ts": 0.0, "pid": pid, "tid": tid, "args": {"name": name}}


def _counters(memory: StepMemory, times_s: tuple[float, ...], pid: int) -> Iterator[dict[str, Any]]:
    """Device memory by kind at each instant; those at one time are told a nanosecond apart."""
    areas = [(area.name, memory.held_bytes(area.lives)) for area in areas_of(memory)]
    for time_s, group in groupby(range(memory.count), key=times_s.__getitem__):
        own = list(group)
        for place, instant in enumerate(own):
            yield {
                "ph": "C",
                "name": "device memory",
                "ts": time_s * 1e6 + place * 1e-3,
                "pid": pid,
                "tid": COUNTERS,
                "args": {name: held[instant] for name, held in areas},
            }


def _host(timeline: Timeline, pid: int) -> Iterator[dict[str, Any]]:
    """Host memory, from the start of each copy there to the end of that back."""
    changes = []
    for event in timeline.events:
        if isinstance(event.op, Copy):
            leaves = event.lane is Lane.D2H
            time_s = event.start_s if leaves else event.end_s
            changes.append((time_s, event.op.nbytes if leaves else -event.op.nbytes))
    held = 0
    for time_s, change in sorted(changes):
        held += change
        yield {
            "ph": "C",
            "name": "host memory",
            "ts": time_s * 1e6,
            "pid": pid,
            "tid": COUNTERS,
            "args": {"on the host": held},
        }
