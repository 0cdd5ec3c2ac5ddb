"""The calls of one step of several regions, while the step runs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from time import perf_counter

from fxremat.regions.step_profiles import CallKey, CallProfile, RegionCall, StepProfile
from fxremat.runtime.counted import Count
from fxremat.runtime.steps import Step


@dataclass(slots=True, eq=False)
class CallTrace:
    """The calls of one step that runs several graphs, in the order of their forwards.

    Attributes:
        base_bytes: bytes held when the step begins; ``None``: not known yet.
        first_call_bytes: the part of them that its first call has measured beyond what the model
            holds.
        calls: the calls so far.
        steps: the steps in flight that their forwards have left, not kept alive.
        matching: profiles of earlier steps that began with the same calls.
        positions: for profiles of which calls may be left out, the position that the step has
            reached.
        is_open: whether a call of the model runs.
        last_backward: the position of the call whose backward began last.
        is_observed: whether the end of a backward was observed.
        is_unplanned: whether a call matches no profile, or had no room in its plans.
        is_watched: whether the memory of the step is measured.
        count: counts the peak of a step whose memory is not measured.
        why_unobserved: why the step has no profile; empty: it may have one.
        has_failed: whether a call of the model has raised: no further call belongs to the step.
        line: the line of the user's code that calls the model.
        kept_bytes: bytes of outputs of earlier steps that are held when it begins.
        returned_bytes: bytes of outputs of the model, which the usual training loop holds into the
            next step.
        has_warned: whether the user was warned that no plans of it fit.
        has_no_backward: whether nothing that the model returned leads to a backward; then it is
            measured until the next call, or the optimizer's step.
    """

    base_bytes: int | None = None
    first_call_bytes: int = 0
    calls: list[RegionCall] = field(default_factory=list)
    steps: list[weakref.ref[Step]] = field(default_factory=list)
    matching: list[StepProfile] = field(default_factory=list)
    positions: dict[StepProfile, int] = field(default_factory=dict)
    is_open: bool = False
    last_backward: int | None = None
    is_observed: bool = False
    is_unplanned: bool = False
    is_watched: bool = False
    count: Count | None = None
    why_unobserved: str = ""
    has_failed: bool = False
    line: str = ""
    kept_bytes: int = 0
    returned_bytes: int = 0
    has_warned: bool = False
    has_no_backward: bool = False

    @property
    def waits(self) -> bool:
        """Whether a backward of the step has not run, or may run again."""
        return any(step is not None and step.waits for step in (own() for own in self.steps))

    @property
    def has_backward(self) -> bool:
        """Whether a backward of the step has begun, or was observed to end."""
        return self.is_observed or self.last_backward is not None

    @property
    def ran(self) -> list[RegionCall]:
        """Calls whose forward has ended."""
        return [call for call in self.calls if call.compiled is not None]

    @property
    def first_waiting_bytes(self) -> int:
        """Bytes that earlier steps in flight held when the first call began."""
        return self.calls[0].context.waiting_bytes

    def planned_bytes(self) -> Iterator[int]:
        """Yield the planned peak of each call, in bytes beyond those held when the step begins.

        Plans have room for any of the steps that the call may be one of.
        """
        for call in self.ran:
            if call.matches:
                base_bytes = max(
                    profile.base_bytes + profile.more_bytes for profile, _ in call.matches
                )
                yield call.compiled.record.predicted_peak_bytes - base_bytes

    def begin_forward(self) -> None:
        """Record when the latest call's forward begins; count the peak if it is not measured."""
        call = self.calls[-1]
        if self.count is None and not self.is_watched:
            held_bytes = (self.base_bytes or 0) + call.context.waiting_bytes
            self.count = Count.begin(call.graph.joint.device, lambda: held_bytes)
        call.times_s.append(perf_counter())

    def end_forward(self, step: Step) -> None:
        """Record that the latest call's forward has ended and left ``step`` for its backward."""
        self.steps.append(weakref.ref(step))
        step.part = self, len(self.calls) - 1
        call = self.calls[-1]
        call.compiled, call.held_bytes = step.plan, step.held_bytes
        call.times_s.append(perf_counter())

    def begin_backward(self, position: int, in_flight: Iterable[Step]) -> None:
        """Record when the backward of the call at ``position`` begins.

        Args:
            position: the index of the call.
            in_flight: the steps that hold memory at that time.
        """
        call, self.last_backward = self.calls[position], position
        if self.is_watched:
            held_bytes = sum(step.held_bytes for step in in_flight)
            call.held_at_backward_bytes = held_bytes - self.first_waiting_bytes
        call.times_s.append(perf_counter())

    def end_backward(self, position: int) -> int | None:
        """Record when the backward of the call at ``position`` ends.

        Returns the peak bytes of the step so far; ``None`` if they are not counted.
        """
        self.calls[position].times_s.append(perf_counter())
        return self.count.peak_bytes() if self.count else None

    def compare_with(self, profiles: Iterable[StepProfile]) -> None:
        """Set the profiles of earlier steps that :meth:`advance` compares the step with."""
        self.matching = list(profiles)
        self.positions = dict.fromkeys(self.matching, -1)

    def advance(self, key: CallKey) -> list[tuple[StepProfile, int]]:
        """Note the next call; return the profiles in which it comes next, and its position in each.

        These are the profiles with the same calls so far, if there are any; else those that have,
        later on, a call of the same graph with sizes at least as large.
        """
        at = len(self.calls)
        self.matching = [p for p in self.matching if at < len(p.calls) and p.calls[at].key == key]
        covering: list[tuple[StepProfile, int]] = []
        for profile, position in self.positions.items():
            later = range(position + 1, len(profile.calls))
            at_next = next((i for i in later if profile.calls[i].covers(key)), None)
            if at_next is not None:
                self.positions[profile] = at_next
                covering.append((profile, at_next))
        return [(profile, at) for profile in self.matching] or covering

    def profiles(self) -> list[CallProfile] | None:
        """Return the measured bytes of each call; ``None``: not measured to the step's end.

        They are those at its forward, after it, at its backward, and after that.
        """
        rows: list[CallProfile] = []
        for call in self.calls:
            measured = call.profile
            if measured is None or not self.has_backward:
                return None
            held_bytes = call.context.waiting_bytes - self.first_waiting_bytes
            forward = measured.begin_bytes - held_bytes
            after = measured.begin_bytes + measured.after_bytes - held_bytes - call.held_bytes
            backward, before = after, forward
            held_at_backward_bytes = call.held_at_backward_bytes
            if measured.taken_bytes is not None and held_at_backward_bytes is not None:
                backward = measured.begin_bytes + measured.taken_bytes - held_at_backward_bytes
                before = measured.begin_bytes + measured.before_bytes - held_bytes
            rows.append((forward, after, backward, before))
        return rows

    def between_s(self) -> Iterator[float]:
        """Yield the seconds that code between each call and the next took, in both directions.

        Requires: the step has ended.
        """
        for call, after in zip(self.calls, self.calls[1:], strict=False):
            yield after.times_s[0] - call.times_s[1] + call.times_s[2] - after.times_s[3]


class StepsByThread(threading.local):
    """The step of several graphs that the current thread runs.

    Attributes:
        trace: the calls of the step; ``None`` before the first one.
        in_backward: whether the call that was entered last runs inside a backward.
    """

    trace: CallTrace | None = None
    in_backward: bool = False

    @property
    def running(self) -> CallTrace:
        """The step of the call that this thread entered last."""
        assert self.trace is not None
        return self.trace

    def current(self) -> CallTrace | None:
        """Return the step that the next call belongs to; ``None``: the call begins a new step."""
        trace = self.trace
        if trace is None or trace.has_failed:
            return None
        if trace.is_open:  # even after a backward: functions may run one inside a forward
            return trace
        if trace.last_backward is not None:
            return None
        return trace if not trace.calls or trace.waits else None
