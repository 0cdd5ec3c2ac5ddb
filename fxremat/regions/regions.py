"""Regions: graphs that one step runs one after the other, within one budget.

Where a model is captured in pieces, each of them is planned by itself, but what a region leaves for
its backward is held while others run, and so is what code between them allocates. In a first step
each region leaves as little as it can, and the step is watched. From then on it is known what else
is held at each call, and plans for all calls are chosen together.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field

import torch

from fxremat import torch_compat
from fxremat.graph.graph import Graph
from fxremat.graph.shortfall import user_line, warn_counted
from fxremat.loop.loop import Loop
from fxremat.planner.context.context_bytes import SCALARS
from fxremat.planner.context.step_context import StepContext
from fxremat.ranks.combine import AGREED
from fxremat.ranks.peers import Peers
from fxremat.regions.call_trace import CallTrace, StepsByThread
from fxremat.regions.joint_plans import JointPlans, is_ample, planned_context
from fxremat.regions.read_parameters import ReadParameters
from fxremat.regions.step_profiles import RegionCall, StepProfile, StepProfiles
from fxremat.regions.step_watch import StepWatch, watch_backward
from fxremat.regions.unplanned import UnplannedCalls, shortfall_of_region
from fxremat.regions.warnings import RegionWarnings
from fxremat.runtime.profile import WATCH_EVERY
from fxremat.runtime.steps import SCALAR_BYTES, Step


@dataclass(slots=True)
class Regions:
    """The regions of one model, which are graphs that one step runs in turn, and its steps.

    Attributes:
        peers: processes that train the same model.
        warnings: issues warnings to the user of the model.
        several: whether steps run several graphs.
        called: whether calls of the model are reported, by :meth:`begin_call`.
        profiles: the profiles of steps whose memory was measured.
        trained: tensors that backwards have computed a gradient of, by ``id``.
        late_bytes: bytes left free, as they may be allocated, or freed, at another moment than
            measured.
        together: whether graphs have collectives, so that all processes must follow the same plans
            at all calls.
        steps: how many steps have begun.
        captured: whether the step before has captured a graph, or failed to, which leaves reference
            cycles that hold memory.
        entered: whether a call of a region has begun.
        latest: the calls of the latest step that followed plans which were chosen together.
    """

    peers: InitVar[Peers | None] = None
    warnings: RegionWarnings = field(default_factory=RegionWarnings)
    several: bool = False
    called: bool = False
    profiles: StepProfiles = field(init=False)
    trained: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    late_bytes: int = 0
    together: bool = False
    steps: int = 0
    captured: bool = False
    entered: bool = False
    latest: list[RegionCall] = field(default_factory=list)
    _read: ReadParameters = field(default_factory=ReadParameters)
    _plans: JointPlans = field(default_factory=JointPlans)
    _unplanned: UnplannedCalls = field(default_factory=UnplannedCalls)
    _watch: StepWatch = field(init=False)
    _collective_bytes: int = 0  # of collectives in graphs, left free as ``late_bytes`` are
    _before: CallTrace | None = None
    _thread: StepsByThread = field(default_factory=StepsByThread)

    def __post_init__(self, peers: Peers | None) -> None:
        self.profiles = StepProfiles(peers)
        self._watch = StepWatch(self.profiles, self.warnings)

    # Calls of the model

    def begin_call(self, loop: Loop, device: torch.device, held_bytes: Callable[[], int]) -> None:
        """Begin a call of the model, and a step unless the call belongs to one that has begun.

        Args:
            loop: the training loop of the model.
            device: the device of the model.
            held_bytes: returns the bytes held by the model, by gradients and by arguments.

        Raises:
            BudgetError: steps take more than the budget whatever their plans.
        """
        self.called = True
        self._free_failed_step()
        trace = self._thread.current()
        if self.several and (trace is None or not trace.calls):
            trace = self._begin_step(loop)
            if self.entered or self._watch.is_due(loop, self.steps):  # else nothing would read it
                trace.base_bytes, trace.line = held_bytes(), user_line()
                trace.kept_bytes = loop.in_flight.now()[1]
                self._begin_watch(loop, trace, device)
        if trace is not None:
            trace.is_open = True

    def end_call(self, loop: Loop, outputs: object) -> None:
        """Note that a call of the model has returned ``outputs``, and observe their backward."""
        trace = self._thread.trace
        if trace is None:
            return
        trace.is_open, trace.last_backward = False, None
        if trace.calls and not trace.is_unplanned:
            self.latest = trace.ran
        if not trace.is_watched or not loop.watcher.is_on:
            return
        watch_backward(loop, trace, outputs)

    def call_raised(self) -> None:
        """Note that a call of the model has raised: no further call belongs to its step."""
        trace = self._thread.trace
        if trace is not None:
            trace.has_failed, trace.is_open = True, False

    def graph_raised(self) -> None:
        """Note that a graph has raised, or could not be planned.

        If calls of the model are not reported, that ends its step.
        """
        if not self.called:
            self.call_raised()

    # Calls of a region

    def enter(
        self,
        loop: Loop,
        graph: Graph,
        context: StepContext,
        values: Sequence[object],
        ended_by: str = "",
    ) -> tuple[StepContext, bool]:
        """Begin a call of a region; return the context to plan it for, and whether it is planned.

        A call that is not planned must follow the plan that holds least for its backward. A call
        like none before, within an ample budget, counts as planned.

        Args:
            loop: the training loop of the model.
            graph: the graph that is called.
            context: the context of the call by itself.
            values: the values of its primals.
            ended_by: the user's line after which the step leaves the graph, and why.

        Raises:
            BudgetError: no plans of the regions fit together.
        """
        self.entered = True
        self._thread.in_backward = torch_compat.current_backward() >= 0
        if self._thread.in_backward:  # its step ends before that backward goes on
            return self.unplanned_context(loop, graph, context), False
        parameters = [p for p in values if isinstance(p, torch.nn.Parameter)]
        if not self.called:
            self._read.add(parameters)
        trace = self._thread.current() or self._begin_step(loop)
        call = RegionCall(graph, context, ended_by)
        self._collective_bytes = max(self._collective_bytes, graph.late_bytes)
        self._count_base(loop, trace, graph, context, parameters)
        self.profiles.number(graph)
        if not trace.calls:
            self._agree_on_begin(loop, call, (trace.base_bytes or 0) + context.waiting_bytes)
            trace.compare_with(self.profiles)
        matches = self._matches(loop, trace, call)
        if trace.is_watched:
            loop.watcher.join(call.note_profile)
        trace.calls.append(call)
        call.matches, call.parameters = tuple(matches), tuple(map(id, parameters))
        if not matches:
            keeps_all = self.keeps_all(loop)
            trace.is_unplanned |= not keeps_all
            return self.unplanned_context(loop, graph, context), keeps_all
        held_bytes = context.waiting_bytes - trace.first_waiting_bytes
        return planned_context(loop, graph, context, matches, held_bytes), True

    def keeps_all(self, loop: Loop) -> bool:
        """Return whether the latest call keeps everything, as the budget is ample."""
        return not (self._thread.in_backward or self.together) and is_ample(
            loop.budget, self.profiles
        )

    @property
    def varies(self) -> bool:
        """Whether the latest call is one of a step that is like none before.

        It then follows any plan that keeps everything, if the budget is ample: such plans are the
        same at all sizes, except for their figures.
        """
        return all(profile.is_envelope for profile, _ in self._thread.running.calls[-1].matches)

    def will_choose(self, loop: Loop, graph: Graph, context: StepContext) -> bool:
        """Return whether a call begins a step whose plans are chosen again, for the bytes held."""
        trace = self._thread.current()
        if trace is None or trace.calls or trace.base_bytes is None:
            return False
        base_bytes = trace.base_bytes + context.waiting_bytes + context.kept_bytes
        base_bytes += sum(context.bucket_bytes) + self._aside_bytes
        key = RegionCall(graph, context).key
        return self._plans.leave_room(loop, self.profiles, key, base_bytes) is False

    def choose_again(self) -> None:
        """Have the plans of all steps chosen again when they begin, as feedback has changed."""
        for profile in self.profiles:
            profile.corrections = []

    def grow_budget(self, loop: Loop, nbytes: int | None) -> bool:
        """Raise ``"min"`` to ``nbytes``, which a call's plan takes; return whether it has grown."""
        return self._plans.grow_budget(loop.budget, nbytes)

    def watch_next(self) -> None:
        """Have the memory of the next step measured."""
        self._watch.watches_left = max(self._watch.watches_left, 1)

    def give_up_plan(self) -> None:
        """Note that no plan fits the latest call, which follows one that holds least instead."""
        trace = self._thread.running
        trace.is_unplanned = True
        trace.calls[-1].matches = ()

    def unplanned_context(self, loop: Loop, graph: Graph, context: StepContext) -> StepContext:
        """Return the context to plan a call for if its step has no profile.

        Its best plan is one that holds least for the backward, or, if the budget is ample, one that
        keeps everything; see :meth:`UnplannedCalls.context`.
        """
        trace, aside_bytes = self._thread.trace, self._aside_bytes
        return self._unplanned.context(
            loop,
            graph,
            context,
            trace,
            aside_bytes=aside_bytes,
            read=self._read,
            keeps_all=self.keeps_all(loop),
        )

    def check_least(
        self, loop: Loop, graph: Graph, context: StepContext, parameters: Sequence[torch.Tensor]
    ) -> None:
        """Raise or warn if one region, just captured, needs more than the budget by itself.

        Args:
            loop: the training loop of the model.
            graph: the graph that is called.
            context: the context of its first call, without feedback of earlier steps.
            parameters: the parameters that the graph computes a gradient of.

        Raises:
            BudgetError: it needs more, it is the first region of the step, and the budget may
                raise.
        """
        trace = self._thread.trace
        if trace is None or torch_compat.current_backward() >= 0:
            return
        base_bytes = (trace.base_bytes or 0) + context.waiting_bytes + self._aside_bytes
        error = shortfall_of_region(loop, graph, context, base_bytes, parameters)
        if error is None:
            return
        if loop.budget.may_raise and not trace.calls:
            raise error
        self.warnings.warn_short(error, user_line())

    def begin_forward(self) -> None:
        """Record that the forward of the latest call begins."""
        if not self._thread.in_backward:
            self._thread.running.begin_forward()

    def end_forward(self, loop: Loop, step: Step) -> None:
        """Record that the latest call's forward has ended and left ``step`` for its backward."""
        if not self._thread.in_backward:
            self._thread.running.end_forward(step)
            loop.watcher.left(step)

    def begin_backward(self, loop: Loop, step: Step) -> None:
        """Record that the backward of ``step``, a call of a region, begins; in any thread."""
        if step.part is not None:
            trace, position = step.part
            trace.begin_backward(position, loop.in_flight)

    def end_backward(self, loop: Loop, step: Step) -> None:
        """Record that the backward of ``step``, a call of a region, has ended; in any thread.

        If the counted peak of the whole step exceeds the budget, a warning is given.
        """
        loop.watcher.after(step)
        if step.part is None:
            return
        trace: CallTrace
        trace, position = step.part
        peak_bytes = trace.end_backward(position)
        budget_bytes = loop.budget.nbytes
        if peak_bytes is None or budget_bytes is None or self.captured:
            return
        if peak_bytes > budget_bytes:
            self._watch.watches_left, trace.count = 2, None
            warn_counted(peak_bytes, budget_bytes)

    # Steps

    @property
    def _aside_bytes(self) -> int:
        """Bytes of the budget set aside for what this process does not measure, and for scalars.

        Scalars are the loop's: step counts of an optimizer, the last loss.
        """
        unmeasured_bytes = self.late_bytes + self._collective_bytes
        return unmeasured_bytes + self.profiles.peer_excess_bytes + SCALARS * SCALAR_BYTES

    def _count_base(
        self,
        loop: Loop,
        trace: CallTrace,
        graph: Graph,
        context: StepContext,
        parameters: Sequence[torch.Tensor],
    ) -> None:
        """Set ``trace.base_bytes``, the bytes held when the step begins, from what a call shows."""
        if trace.base_bytes is None:  # the call of the model was not reported
            given_bytes = graph.held(context).given_bytes
            others_bytes = self._read.bytes_beyond(parameters)
            trace.base_bytes = given_bytes - context.waiting_bytes + others_bytes
            if not self.called:
                self._begin_watch(loop, trace, graph.joint.device)
        elif not trace.calls:
            nbytes = context.kept_bytes + sum(context.bucket_bytes)
            trace.base_bytes += nbytes - trace.first_call_bytes
            trace.first_call_bytes = nbytes

    def _matches(
        self, loop: Loop, trace: CallTrace, call: RegionCall
    ) -> list[tuple[StepProfile, int]]:
        """Return the step profiles whose plans have room for a call, and its position in each.

        Raises:
            BudgetError: no profile that the step matches has plans that fit the calls so far.
        """
        first = trace.calls[0] if trace.calls else call
        matches, error = self._plans.matches(
            loop,
            self.profiles,
            trace,
            call.key,
            (trace.base_bytes or 0) + first.context.waiting_bytes + self._aside_bytes,
            followed_by=loop.peers if self.together else None,
        )
        if error is not None:
            if loop.budget.may_raise:
                raise error
            if not trace.has_warned:
                trace.has_warned = True
                self.warnings.warn_short(error, trace.line)
        return matches

    def _agree_on_begin(self, loop: Loop, call: RegionCall, base_bytes: int) -> None:
        """Exchange measured profiles with other processes when a step begins.

        Args:
            loop: the training loop of the model.
            call: the first call of the step.
            base_bytes: the bytes that are held when the step begins.

        Raises:
            RankError: other processes, which must follow the same plans, make other calls.
        """
        if self.together and self._before is not None:
            planned_bytes = base_bytes + self._aside_bytes
            fits = self._plans.leave_room(loop, self.profiles, call.key, planned_bytes)
            self.profiles.agree_with_all(self._before.calls, call, base_bytes, fits=bool(fits))
        elif 2 <= self.steps <= AGREED:
            self.profiles.agree_with_any(base_bytes)

    def _free_failed_step(self) -> None:
        """Free what the thread's step still holds if it has raised, before the next one begins."""
        trace = self._thread.trace
        if trace is not None and trace.waits:
            torch_compat.drop_failed_backward()
            if trace.has_failed:
                gc.collect()  # an interrupt may leave its frames in a cycle

    def _begin_step(self, loop: Loop) -> CallTrace:
        """End the thread's step, and return the trace of a new one.

        Raises:
            BudgetError: steps take more than the budget whatever their plans.
        """
        loop.watcher.end()
        if self.captured:
            gc.collect()
            self.captured = False
        self.steps += 1
        if self.steps % WATCH_EVERY == 0:
            self._watch.watches_left = max(self._watch.watches_left, 1)
        trace = self._thread.trace
        if trace is None or trace.calls:
            self._before = trace
        if trace is not None:
            self._watch.end(trace, self.steps)
        self.warnings.check_budget(loop.budget)
        trace = self._thread.trace = CallTrace()
        return trace

    def _begin_watch(self, loop: Loop, trace: CallTrace, device: torch.device) -> None:
        """Begin to measure the memory of a step, if measuring is due."""
        if not self._watch.is_due(loop, self.steps):
            return
        trace.is_watched = loop.watcher.begin(
            device, whole=functools.partial(self._learn, loop, trace), until_closed=self.called
        )
        if not trace.is_watched:
            trace.why_unobserved = "another profiler is active in its thread"

    def _learn(
        self, loop: Loop, trace: CallTrace, first_bytes: int, peak_bytes: int, is_observed: bool
    ) -> None:
        """Update step profiles by a measured step; for the arguments see :meth:`Watcher.begin`."""
        happened = is_observed or trace.calls or trace.has_no_backward
        if trace.has_failed or self.captured or not happened:
            return  # capturing measures, and that may be in the log
        trace.is_observed = is_observed
        self._watch.learn(
            loop,
            trace,
            first_bytes,
            peak_bytes,
            aside_bytes=self._aside_bytes,
            envelopes=not self.together,
        )
