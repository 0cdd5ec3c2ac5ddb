"""Times the events of a real step, to compare them with its plan."""

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
    """Run ``step`` once; return the predicted and the measured time of each event of its plan.

    Args:
        step: runs one forward and one backward of the compiled module.
        training: the training of the compiled module.
        device: the device of the step.

    Raises:
        ValueError: the step ran the forward or the backward more or less than once.
    """
    clock = _Clock(device)
    with record_transfers() as copies, _calls_timed(training, clock):
        step()
    assert training.latest is not None
    predicted = training.latest[1].record.timeline
    runs = clock.intervals()
    wanted = sum(not isinstance(e.op, Copy) for e in predicted.events)
    if len(runs) != wanted or len(copies) != len(predicted.events) - wanted:
        raise ValueError(
            f"the step made {len(runs)} calls and {len(copies)} transfers, but its plan has "
            f"{wanted} and {len(predicted.events) - wanted}: trace one forward and one backward of "
            "the latest shapes, without accumulation"
        )
    return StepTrace(predicted, Timeline(tuple(_measured(predicted, runs, copies))))


def _measured(
    predicted: Timeline, runs: Sequence[tuple[float, float]], copies: Sequence[TransferRecord]
) -> Iterator[Event]:
    """Yield the predicted events with measured times, in seconds since the first computation.

    Args:
        predicted: the plan's timeline.
        runs: the begin and end of each call of a stage, in order.
        copies: the transfers that ran, in order.
    """
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
    """Records the begin and the end of calls, in seconds of ``time.perf_counter``.

    On a CUDA device it records events of the compute stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Record the present time as the begin of a call or, every other time, as its end."""
        self._marks.append(self._now())

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = timed_event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def intervals(self) -> list[tuple[float, float]]:
        """Return the begin and the end of each call, in seconds of ``time.perf_counter``."""
        times = self._marks
        if self._device.type == "cuda":
            now = self._now()
            now.synchronize()
            now_s = time.perf_counter()
            times = [now_s - mark.elapsed_time(now) / 1e3 for mark in times]
        return list(zip(times[::2], times[1::2], strict=True))


@contextmanager
def _calls_timed(training: Training, clock: _Clock) -> Iterator[None]:
    """Return a context in which ``clock`` records the begin and end of each call of a stage."""
    timed: list[CompiledPlan] = []

    def around(run: BoxedCallable) -> BoxedCallable:
        def call(args: list[Any]) -> Sequence[Any]:
            clock.mark()
            results = run(args)
            clock.mark()
            return results

        return call

    def time_calls(compiled: CompiledPlan) -> None:
        timed.append(compiled)
        compiled.call_through(around)

    try:
        for compiled in training.plans:
            time_calls(compiled)
        training.loop.on_new = time_calls
        yield
    finally:
        training.loop.on_new = None
        for compiled in timed:
            compiled.call_through(None)
