"""Traces of a plan for Chrome and Perfetto: operations, copies, and memory counters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from fxremat.errors import PlanError
from fxremat.ir import Copy, Event, Forward, Lane, Timeline
from fxremat.report.areas import areas_of
from fxremat.report.memory import StepMemory
from fxremat.report.plan import AnyPlan, StepPlan
from fxremat.report.view import StepView, view_of
from fxremat.units import format_seconds

PREDICTED, MEASURED = 1, 2
"""Processes of the trace."""

THREADS = {Lane.COMPUTE: (1, "compute"), Lane.D2H: (2, "to host"), Lane.H2D: (3, "from host")}
COUNTERS, REGIONS = 4, 5

WIDTH = 110
"""The width of a table in columns if the output is not a terminal."""


@dataclass(frozen=True, slots=True)
class StepTrace:
    """The predicted timeline of a plan and a measured one, with the same events in the same order.

    Attributes:
        predicted: the plan's timeline.
        measured: timeline of one step, in seconds since its first computation began. The
            allocator is not measured: bytes are the plan's.
    """

    predicted: Timeline
    measured: Timeline

    @property
    def overlap(self) -> float:
        """The share of transfer time that overlaps computation; 1 without transfers."""
        copies = [(e.start_s, e.end_s) for e in self.measured.events if isinstance(e.op, Copy)]
        runs = [(e.start_s, e.end_s) for e in self.measured.events if not isinstance(e.op, Copy)]
        total = sum(end - begin for begin, end in copies)
        hidden = sum(
            max(0.0, min(end, stop) - max(begin, start))
            for begin, end in copies
            for start, stop in runs
        )
        return min(hidden / total, 1.0) if total else 1.0

    def show(self) -> str:
        """Print both timelines as a table with one row per event, and return the printed text.

        Raises:
            ImportError: rich is not installed.
        """
        # Not at import: a step is planned and run without rich.
        from fxremat.console import Table, show  # noqa: PLC0415

        table = Table(title="predicted and measured step")
        for name in ("operation", "lane"):
            table.add_column(name, no_wrap=True)
        for name in ("start", "duration", "measured start", "measured duration"):
            table.add_column(name, justify="right", no_wrap=True)
        for plan, real in zip(self.predicted.events, self.measured.events, strict=True):
            times = (plan.start_s, plan.end_s - plan.start_s)
            real_times = (real.start_s, real.end_s - real.start_s)
            table.add_row(
                str(plan.op), plan.lane.value, *map(format_seconds, (*times, *real_times))
            )
        table.add_row(
            "step", "", "", format_seconds(self.predicted.makespan_s), "",
            format_seconds(self.measured.makespan_s),
        )  # fmt: skip
        return show(table, width=WIDTH)


def trace_of(plan: AnyPlan, traced: StepTrace | None = None) -> str:
    """Return the trace of a step as JSON in Chrome's trace event format, by ascending time.

    Args:
        plan: the predicted step.
        traced: measured timeline, shown as a second process. Its bytes are the plan's.

    Raises:
        PlanError: the plan has no record of tensors, or ``traced`` belongs to another plan.
    """
    view = view_of(plan)
    events = list(_process(view, view.timeline, view.times_s, PREDICTED, "predicted"))
    if isinstance(plan, StepPlan):
        events += _regions(plan, view)
    if traced is not None:
        measured = traced.measured
        if [e.op for e in measured.events] != [e.op for e in view.timeline.events]:
            raise PlanError(
                f"the {len(measured.events)} calls and copies of the traced step are not the "
                f"{len(view.timeline.events)} of this plan: trace a step that follows it",
                code="FXR605",
            )
        times_s = view.memory.times(measured)
        events += _process(view, measured, times_s, MEASURED, "measured")
    events.sort(key=lambda event: event["ts"])
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False)


def _process(
    view: StepView, timeline: Timeline, times_s: tuple[float, ...], pid: int, name: str
) -> Iterator[dict[str, Any]]:
    """Yield the trace events of one timeline, which is displayed as a process.

    Args:
        view: the step.
        timeline: the predicted or measured timeline.
        times_s: the seconds at which each instant of the memory begins in it.
        pid: the process id to display.
        name: the name of the process.
    """
    yield _named("process_name", name, pid, 0)
    for tid, label in (*THREADS.values(), (COUNTERS, "memory")):
        yield _named("thread_name", label, pid, tid)
    for event in timeline.events:
        yield _operation(view, event, pid)
    yield from _device_memory(view.memory, times_s, pid)
    yield from _host_memory(timeline, pid)


def _named(what: str, name: str, pid: int, tid: int) -> dict[str, Any]:
    """Return the trace event that names a process or a thread.

    Args:
        what: ``"process_name"`` or ``"thread_name"``.
        name: the name to display.
        pid: the process id.
        tid: the thread id; for a process, 0.
    """
    return {"ph": "M", "name": what, "ts": 0.0, "pid": pid, "tid": tid, "args": {"name": name}}


def _slice(
    name: str, category: str, times_s: tuple[float, ...], pid: int, tid: int, args: dict[str, Any]
) -> dict[str, Any]:
    """Return the trace event of an interval in a thread.

    Args:
        name: the name to display.
        category: the category, such as ``"forward"``.
        times_s: begin and end in seconds.
        pid: the process id.
        tid: the thread id.
        args: further values to display.
    """
    begin_s, end_s = times_s
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "ts": begin_s * 1e6,
        "dur": max(end_s - begin_s, 0.0) * 1e6,
        "pid": pid,
        "tid": tid,
        "args": args,
    }


def _counter(name: str, time_us: float, pid: int, args: dict[str, int]) -> dict[str, Any]:
    return {"ph": "C", "name": name, "ts": time_us, "pid": pid, "tid": COUNTERS, "args": args}


def _operation(view: StepView, event: Event, pid: int) -> dict[str, Any]:
    """Return the trace event of an operation or a copy in the timeline."""
    op = event.op
    args: dict[str, Any] = {"peak_bytes": event.peak_bytes, "held_bytes": event.held_bytes}
    category = "forward" if isinstance(op, Forward) else "backward"
    if isinstance(op, Copy):
        category, args["bytes"] = "copy", op.nbytes
    stage = getattr(op, "stage", None)
    if stage is not None:
        args |= {"stage": view.stage_names[stage], "module": view.memory.modules[stage]}
    times_s = event.start_s, event.end_s
    return _slice(str(op), category, times_s, pid, THREADS[event.lane][0], args)


def _device_memory(
    memory: StepMemory, times_s: tuple[float, ...], pid: int
) -> Iterator[dict[str, Any]]:
    """Yield a trace event with the device memory of each area at each instant.

    Instants of equal times get distances of a nanosecond.
    """
    areas = [(area.name, memory.held_bytes(area.lives)) for area in areas_of(memory)]
    for time_s, group in groupby(range(memory.count), key=times_s.__getitem__):
        for place, instant in enumerate(group):
            held = {name: held[instant] for name, held in areas}
            yield _counter("device memory", time_s * 1e6 + place * 1e-3, pid, held)


def _host_memory(timeline: Timeline, pid: int) -> Iterator[dict[str, Any]]:
    """Yield trace events with the host memory in use, which each copy to or from it changes.

    Bytes count from the begin of the copy to the host until the end of the copy back.
    """
    changes = []
    for event in timeline.events:
        if isinstance(event.op, Copy):
            leaves = event.lane is Lane.D2H
            time_s = event.start_s if leaves else event.end_s
            changes.append((time_s, event.op.nbytes if leaves else -event.op.nbytes))
    held = 0
    for time_s, change in sorted(changes):
        held += change
        yield _counter("host memory", time_s * 1e6, pid, {"on the host": held})


def _regions(step: StepPlan, view: StepView) -> Iterator[dict[str, Any]]:
    """Yield the trace events of a thread that shows the forward and backward of each region."""
    yield _named("thread_name", "regions", PREDICTED, REGIONS)
    for number, (row, spans_s) in enumerate(zip(step.regions, view.spans_s, strict=True), 1):
        args = {"module": row.module, "ended by": row.ended_by, "held_bytes": row.held_bytes}
        for category, times_s, peak_bytes in (
            ("forward", spans_s[:2], row.forward_peak_bytes),
            ("backward", spans_s[2:], row.backward_peak_bytes),
        ):
            name = f"region {number} {category}"
            more = {**args, "peak_bytes": peak_bytes}
            yield _slice(name, category, times_s, PREDICTED, REGIONS, more)
