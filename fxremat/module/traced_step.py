"""What a step really does, beside what its plan says."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from fxremat.graph.compiled_plan import CompiledPlan
from fxremat.ir import Copy, Event, Lane, Timeline
from fxremat.report.trace import StepTrace
from fxremat.runtime.watch import TransferRecord, record_transfers, timed_event
from fxremat.torch_compat import BoxedCallable
from fxremat.training.training import Training


def trace_step(
    step: Callable[[], object],
    *,
    training: Training,
    device: torch.device,
) -> StepTrace:
    """Run ``step`` and measure when each event of its plan happens.

    Args:
        step: one forward and one backward of the compiled module.
        training: of the compiled module.
        device: of the step.

    Raises:
        ValueError: it ran the graphs more or less than once.
    """
    clock = _Clock(device)
    with record_transfers() as copies, _calls_noted(training, clock):
        step()
    assert training.latest is not None
    predicted = training.latest[1].record.timeline
    runs = clock.intervals()
    wanted = sum(not isinstance(e.op, Copy) for e in predicted.events)
    if len(runs) != wanted or len(copies) != len(predicted.events) - wanted:
        raise ValueError(
            f"the step made {len(runs)} calls and {len(copies)} transfers, its plan has {wanted} "
            f"and {len(predicted.events) - wanted}: trace one forward and backward of the shapes "
            "that ran last, without accumulation"
        )
    return StepTrace(predicted, Timeline(tuple(_measured(predicted, runs, copies))))


def _measured(
    predicted: Timeline, runs: Sequence[tuple[float, float]], copies: Sequence[TransferRecord]
) -> Iterator[Event]:
    """The plan's events with real times; those of a lane happen in the plan's order."""
    begin_s = min((start for start, _ in runs), default=0.0)
    computed = iter(runs)
    moved = {
        Lane.D2H: iter([(c.begin_s, c.end_s) for c in copies if c.kind == "offload"]),
        Lane.H2D: iter([(c.begin_s, c.end_s) for c in copies if c.kind == "prefetch"]),
    }
    for event in predicted.events:
        start, end = next(moved[event.lane] if isinstance(event.op, Copy) else computed)
        yield replace(event, start_s=start - begin_s, end_s=end - begin_s)


class _Clock:
    """Begins and ends of calls on the clock of ``time.perf_counter``, as transfers are on it.

    On a CUDA device they are events of the compute stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Note that a call begins or ends."""
        self._marks.append(self._now())

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        made = timed_event()
        made.record(torch.cuda.current_stream(self._device))
        return made

    def intervals(self) -> list[tuple[float, float]]:
        """Begin and end of each call."""
        times = self._marks
        if self._device.type == "cuda":
            now = self._now()
            now.synchronize()
            now_s = time.perf_counter()
            times = [now_s - mark.elapsed_time(now) / 1e3 for mark in times]
        return list(zip(times[::2], times[1::2], strict=True))


@contextmanager
def _calls_noted(training: Training, clock: _Clock) -> Iterator[None]:
    """Mark begin and end of every call of a stage, in plans that are made meanwhile as well."""
    noted: list[CompiledPlan] = []

    def around(run: BoxedCallable) -> BoxedCallable:
        def call(args: list[Any]) -> Sequence[Any]:
            clock.mark()
            results = run(args)
            clock.mark()
            return results

        return call

    def note(compiled: CompiledPlan) -> None:
        noted.append(compiled)
        compiled.call_through(around)

    try:
        for compiled in training.plans:
            note(compiled)
        training.loop.on_new = note
        yield
    finally:
        training.loop.on_new = None
        for compiled in noted:
            compiled.call_through(None)
