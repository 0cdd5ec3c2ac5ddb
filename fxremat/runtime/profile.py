"""What a step really allocates, phase by phase, from the events of the allocator."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from fxremat import torch_compat
from fxremat.errors import CostError

FORWARD, LOSS_POINT, BACKWARD, AFTER = "forward", "loss point", "backward", "after"
"""Phases of a call: its forward, what follows it, its backward, what follows that."""

DONE = "done"
"""Mark of the end of a backward, after all calls that took part."""

MOST_CALLS = 4096
"""How many calls of a step are watched."""

_Events = list[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Bytes that a call had allocated, relative to its begin.

    Attributes:
        forward_bytes: peak during the forward.
        left_bytes: bytes at the end of the forward.
        loss_point_bytes: peak from there to the backward.
        taken_bytes: bytes at the begin of the backward; ``None`` if there was none.
        backward_bytes: peak until the backward had ended.
        begin_bytes: bytes at the begin of the call, relative to the begin of the step.
        after_bytes: peak from the end of the forward to the next call.
        before_bytes: peak from the end of the backward to the next call.
        gone_bytes: bytes that existed when the forward began, and no longer when the backward
            began.
        released_bytes: the part of ``gone_bytes`` that were outputs of earlier steps.
    """

    forward_bytes: int
    left_bytes: int
    loss_point_bytes: int
    taken_bytes: int | None = None
    backward_bytes: int = 0
    begin_bytes: int = 0
    after_bytes: int = 0
    before_bytes: int = 0
    gone_bytes: int = 0
    released_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Most bytes that forward and backward had allocated, relative to the call's begin."""
        return max(self.forward_bytes, self.loss_point_bytes, self.backward_bytes)


@dataclass(slots=True)
class _Watched:
    """A call of a step that is watched.

    Attributes:
        report: called with the profile of the call.
        step: what its forward has left.
        gone: sizes of the tensors that were freed between forward and backward, and whose release
            the log may have missed.
        gone_bytes: bytes of all tensors that existed before the forward and were freed since.
        released_bytes: the part of them that were outputs of earlier steps.
        ended: whether its backward has ended.
    """

    report: Callable[[MemoryProfile], None]
    step: weakref.ref[object] | None = None
    gone: tuple[int, ...] = ()
    gone_bytes: int = 0
    released_bytes: int = 0
    ended: bool = False


WATCH_EVERY = 100
"""If no allocator counts the peaks of steps, one step in so many is watched, for as long as it
trains."""


class Watcher:
    """Logs what one step of a model at a time allocates, in the thread that runs its forward.

    A step is one call, or several calls whose backwards have not run when the next one begins.

    A profiler cannot be stopped inside a backward. So watching ends with the graphs of the step,
    with the next step, or when something else needs the profiler of the thread.
    """

    def __init__(self) -> None:
        self._log: torch_compat.AllocationLog | None = None
        self._thread: threading.Thread | None = None
        self._calls: list[_Watched] = []
        self._on_cuda = False
        self._report_step: Callable[[int, int, bool], None] | None = None
        self._graphs = 0  # graphs of the step that still exist
        self._open = False  # whether further graphs may come

    def begin(
        self,
        device: torch.device,
        report: Callable[[MemoryProfile], None] | None = None,
        *,
        whole: Callable[[int, int, bool], None] | None = None,
        until_closed: bool = False,
    ) -> bool:
        """Begin to log what a step allocates; return whether that is possible.

        Args:
            device: device of the step.
            report: called with the profile of its call when it ends; ``None`` if no call begins
                yet.
            whole: called after the reports of all calls, with the peak before the first call and
                the peak until the last backward had ended, both relative to the begin of the step,
                and whether that end was logged.
            until_closed: keep watching until :meth:`close`, even if no graph of the step is left.
        """
        # Not ``is_alive``: interrupted there, CPython takes a thread for stopped that runs on.
        if self._thread is not None and self._thread not in threading.enumerate():
            self._forget()
        if self._log is not None or torch_compat.current_backward() >= 0:
            return False  # another thread is watched, or a backward recomputes a forward
        log = torch_compat.AllocationLog(device, make_way=self.end)
        try:
            log.__enter__()
        except CostError:
            return False
        self._log, self._calls, self._report_step = log, [], whole
        self._graphs, self._open = 0, until_closed
        self._thread = threading.current_thread()
        self._on_cuda = device.type == "cuda"
        if report is not None:
            self._add_call(report)
        return True

    def join(self, report: Callable[[MemoryProfile], None]) -> bool:
        """Watch a further call of the step; return whether it is watched.

        It is not if no step is watched in this thread, or too many calls are. ``report`` is called
        with the profile of the call.
        """
        if not self._watches_thread() or len(self._calls) >= MOST_CALLS:
            return False
        self._add_call(report)
        return True

    def left(self, step: object) -> None:
        """Note that the forward of the latest call has ended.

        ``step`` is what it leaves for its backward, and stands for the call from now on.
        """
        if self._watches_thread() and self._calls and self._calls[-1].step is None:
            self._calls[-1].step = weakref.ref(step)
            self._mark(len(self._calls) - 1, LOSS_POINT)

    @property
    def is_on(self) -> bool:
        """Whether the allocations of a step are being logged."""
        return self._log is not None

    def is_watching(self, step: object) -> bool:
        """Return whether ``step`` is what a call that is watched has left for its backward."""
        return self._place_of(step) is not None

    def until_gone(self, graph: object, step: object) -> None:
        """Watch at least until ``graph`` is freed, if the call that left ``step`` is watched.

        ``graph`` is an object that lives as long as the graph of the call.
        """
        if self._place_of(step) is not None:
            self._end_with(graph)

    def close(self, graph: object) -> None:
        """Note that the step that is watched in this thread has no further calls.

        Watching goes on until ``graph`` is freed, an object that lives as long as the graph of all
        results of the calls.
        """
        if self._watches_thread():
            self._end_with(graph)
            self._open = False

    def back(
        self,
        step: object,
        *,
        gone: Sequence[int] = (),
        never: Sequence[int] = (),
        released: Sequence[int] = (),
    ) -> None:
        """Note that the backward of ``step`` begins, if it is watched.

        Args:
            step: what the forward has left.
            gone: sizes of the tensors that count as existing before the forward, and no longer
                exist. A CPU's allocator logs the release only of those whose allocation it has
                logged.
            never: the part of ``gone`` that did not exist before the forward; no log has them.
            released: sizes of outputs of earlier steps that existed before the forward, and no
                longer do.
        """
        place = self._place_of(step)
        if place is None:
            return
        call = self._calls[place]
        call.gone = tuple(never if self._on_cuda else (*gone, *released))
        call.released_bytes = sum(released)
        call.gone_bytes = sum(gone) - sum(never) + sum(released)
        self._calls[place].ended = False
        self._mark(place, BACKWARD)

        def ended() -> None:
            self.after(step)
            self.done()

        torch_compat.after_backward(ended)

    def after(self, step: object) -> None:
        """Note that the backward of the call that left ``step`` has ended; others may go on."""
        place = self._place_of(step)
        if place is not None and not self._calls[place].ended:
            self._calls[place].ended = True
            self._mark(place, AFTER)

    def done(self) -> None:
        """Note that ``backward()`` has ended, with the backwards of all calls that took part."""
        if self._log is not None:
            self._log.mark(DONE)

    def end(self) -> None:
        """Stop watching, and report the calls' profiles, if a step is watched in this thread."""
        if self._log is None or not self._watches_thread():
            return
        log, self._log = self._log, None
        assert log is not None
        log.__exit__()
        calls, self._calls = self._calls, []
        report_step, self._report_step = self._report_step, None
        events = _with_unlogged(log.events, [call.gone for call in calls])
        for place, call in enumerate(calls):
            profile = _profile_of(events, place)
            more = {"gone_bytes": call.gone_bytes, "released_bytes": call.released_bytes}
            call.report(replace(profile, **more))
        if report_step is not None:
            report_step(*_whole_step(events))

    def _end_with(self, graph: object) -> None:
        self._graphs += 1
        weakref.finalize(graph, self._graph_is_gone, self._log).atexit = False

    def _add_call(self, report: Callable[[MemoryProfile], None]) -> None:
        self._calls.append(_Watched(report))
        self._mark(len(self._calls) - 1, FORWARD)

    def _place_of(self, step: object) -> int | None:
        if self._log is None:
            return None
        for place, call in enumerate(self._calls):
            if call.step is not None and call.step() is step:
                return place
        return None

    def _forget(self) -> None:
        """Drop a log without reports, because its thread has ended."""
        log, self._log = self._log, None
        if log is not None:
            log.forget()
        self._thread, self._calls, self._report_step = None, [], None

    def _graph_is_gone(self, log: object) -> None:
        if self._log is log:
            self._graphs -= 1
            if not self._graphs and not self._open:
                self.end()

    def _watches_thread(self) -> bool:
        is_watched = self._log is not None and threading.current_thread() is self._thread
        return is_watched and torch_compat.current_backward() < 0

    def _mark(self, place: int, phase: str) -> None:
        if self._log is not None:
            self._log.mark(_mark_name(place, phase))


def _mark_name(place: int, phase: str) -> str:
    return f"{phase} {place}"


def _with_unlogged(events: _Events, gone: Sequence[Sequence[int]]) -> _Events:
    """Return ``events`` with the releases that the log has missed.

    A logged release of equal size outside of calls is taken to be one of them.

    Args:
        events: marks and signed bytes, in order.
        gone: for each call, sizes of the tensors that were freed before its backward.
    """
    outside = tuple(_mark_name(place, LOSS_POINT) for place in range(len(gone)))
    logged: Counter[int] = Counter()
    begins = {_mark_name(place, BACKWARD): sizes for place, sizes in enumerate(gone)}
    complete: _Events = []
    before = ""
    for mark, change in events:
        if change < 0 and mark in outside:
            logged[-change] += 1
        elif not change and mark in begins:
            sizes = Counter(begins.pop(mark))
            complete += [(before, -nbytes) for nbytes in (sizes - logged).elements()]
            logged -= sizes
        complete.append((mark, change))
        before = mark
    return complete


def _whole_step(events: _Events) -> tuple[int, int, bool]:
    """Return a step's peaks before its first call and until its end, and whether it ended."""
    now = most = first = peak = 0
    begun = done = False
    for mark, change in events:
        now += change
        most = max(most, now)
        begun |= mark == _mark_name(0, FORWARD)
        first = first if begun else most
        if mark == DONE and not change:
            done, peak = True, most
    return first, peak if done else most, done


def _profile_of(events: _Events, place: int) -> MemoryProfile:
    names = {_mark_name(place, phase): phase for phase in (FORWARD, LOSS_POINT, BACKWARD, AFTER)}
    current, phase, now, begin = "", "", 0, 0
    first: dict[str, int] = {}
    most: dict[str, int] = {}  # by phase, including other calls in between
    during: dict[str, int] = {}  # by phase, without them
    for mark, change in events:
        now += change
        current = names.get(mark, "")
        phase = current or phase
        if phase and phase not in first:
            first[phase], begin = now, begin if first else now
        most[phase] = max(most.get(phase, now), now)
        if current:
            during[current] = max(during.get(current, now), now)
    left = next((first[p] for p in (LOSS_POINT, BACKWARD, AFTER) if p in first), now)
    taken = first.get(BACKWARD, first.get(AFTER))
    return MemoryProfile(
        forward_bytes=during.get(FORWARD, begin) - begin,
        left_bytes=left - begin,
        loss_point_bytes=most.get(LOSS_POINT, left) - begin,
        taken_bytes=None if taken is None else taken - begin,
        backward_bytes=max(during.get(BACKWARD, begin) - begin, 0),
        begin_bytes=begin,
        after_bytes=during.get(LOSS_POINT, left) - begin,
        before_bytes=max(during.get(AFTER, begin) - begin, 0),
    )
