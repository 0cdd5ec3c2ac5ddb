"""Regions: graphs that one step runs, one after the other, within one budget.

Where a model is captured in pieces, each of them is planned by itself, but what a region leaves for
its backward is there while others run, and so is what code between them allocates. A first step
runs what leaves least of each region and is watched: from then on it is known what is there at each
call beside what regions hold, and one plan for each is chosen together.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import weakref
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field, replace
from time import perf_counter

import torch
from torch.utils._pytree import tree_leaves

from fxremat import torch_compat
from fxremat.errors import BudgetError, CostError
from fxremat.graph.further import grow
from fxremat.graph.graph import Graph
from fxremat.graph.pools import least_bytes
from fxremat.graph.shortfall import user_line, warn_counted
from fxremat.loop.loop import Loop
from fxremat.planner.context import NO_CORRECTION, Correction, StepContext
from fxremat.planner.context_bytes import SCALARS
from fxremat.planning.choose import must_fit
from fxremat.ranks.combine import AGREED, Chosen
from fxremat.ranks.peers import Peers
from fxremat.regions.call_trace import Walk, between, seen_profiles
from fxremat.regions.joint_choice import (
    alone,
    choices_of,
    chosen_for,
    leaving_least,
    leaving_little,
)
from fxremat.regions.step_profiles import Called, Key, KnownStep, KnownSteps
from fxremat.regions.warnings import Notices
from fxremat.runtime.counted import Count
from fxremat.runtime.profile import WATCH_EVERY, MemoryProfile
from fxremat.runtime.steps import SCALAR_BYTES, Step
from fxremat.solvers.knapsack import Call, Choice, least
from fxremat.units import format_bytes

MUCH = 0.02
"""Share of the budget: where so much less is there than before, plans are chosen again."""

MOST_UNKNOWN = 512
"""Calls of a graph in unknown steps whose contexts are kept; the oldest go first."""

Contexts = dict[tuple[int, StepContext], StepContext]
"""What a call of an unknown step is planned for, by the budget and what it finds."""

MOST_BARE = 4
"""First steps that are watched where nothing is captured."""

NEAR = 0.75
"""Share of the budget: steps that differ and are planned to take more are all watched."""


@dataclass(slots=True)
class Regions:
    """The regions of one model, the steps that run them, and the plans chosen for these.

    Attributes:
        peers: processes that train the same model.
        notices: to the user of the model.
        several: steps are known to run several graphs.
        called: calls of the model are told.
        known: steps that were watched.
        parameters: that calls have read, by ``id``, where nobody tells of calls of the model.
        trained: tensors that backwards have computed a gradient of, by ``id``.
        late_bytes: are left free beside what was seen: it may come, or go, at another moment.
        together: graphs have collectives: all processes must follow the same plans at all calls.
        steps: that have begun.
        captured: the step before has captured a graph, or failed to: of that, circles are left that
            hold memory.
        entered: a call of a region has begun.
        latest: calls of the step that has followed plans chosen together last.
    """

    peers: InitVar[Peers | None] = None
    notices: Notices = field(default_factory=Notices)
    several: bool = False
    called: bool = False
    known: KnownSteps = field(init=False)
    parameters: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    trained: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    late_bytes: int = 0
    together: bool = False
    steps: int = 0
    captured: bool = False
    entered: bool = False
    latest: list[Called] = field(default_factory=list)
    _watches: int = 1  # of steps to come, whatever they are
    _late_bytes: int = 0  # of collectives in graphs, likewise
    _planned_bytes: int = 0  # the least "min" that plans, once made, were seen to need
    _before: Walk | None = None
    _choices: dict[tuple[Key, bool], tuple[Choice, ...]] = field(default_factory=dict)
    _unknown: weakref.WeakKeyDictionary[Graph, Contexts] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    _now: threading.local = field(default_factory=threading.local)

    def __post_init__(self, peers: Peers | None) -> None:
        self.known = KnownSteps(peers)

    def call(self, loop: Loop, device: torch.device, there_bytes: Callable[[], int]) -> None:
        """A call of the model begins, or goes on with a step whose backward has not begun.

        Args:
            device: of the model.
            there_bytes: tells what is there then: what the model holds, gradients, arguments.

        Raises:
            BudgetError: steps take more than the budget whatever their plans.
        """
        self.called = True
        self._drop_failed()
        walk = self._going_on()
        if self.several and (walk is None or not walk.calls):
            walk = self._next(loop)
            if self.entered or self._is_to_be_watched(loop):  # else none would ask
                walk.base_bytes, walk.line = there_bytes(), user_line()
                walk.kept_bytes = loop.in_flight.now()[1]
                self._begin_watch(loop, walk, device)
        if walk is not None:
            walk.open = True

    def returned(self, loop: Loop, outputs: object) -> None:
        """A call of the model has ended."""
        walk: Walk | None = getattr(self._now, "walk", None)
        if walk is None:
            return
        walk.open, walk.last = False, None
        if walk.calls and not walk.unknown:
            self.latest = walk.ran
        if not walk.watched or not loop.watcher.is_on:
            return
        tensors = [t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor)]
        walk.returned_bytes = sum(torch_compat.storages_on(loop.device, tensors).values())
        hung = _Hung()
        if torch_compat.before_each_backward(outputs, lambda: self._goes_back(loop, hung, walk)):
            loop.watcher.close(hung)
        else:
            walk.unended = True

    def _goes_back(self, loop: Loop, _hung: object, walk: Walk) -> None:
        """A backward begins where a call of the model has ended, in whatever thread."""
        if loop.watcher.is_on and not torch_compat.is_profiled():
            walk.unseen = "it runs in another thread than the forward"
        torch_compat.after_backward(loop.watcher.done)

    def raised(self) -> None:
        """A graph has raised, or could not be planned: where calls of the model are not reported,
        that ends its step.
        """
        if not self.called:
            self.fail()

    def fail(self) -> None:
        """A call of the model has raised."""
        walk: Walk | None = getattr(self._now, "walk", None)
        if walk is not None:
            walk.failed, walk.open = True, False

    def enter(
        self,
        loop: Loop,
        graph: Graph,
        context: StepContext,
        values: Sequence[object],
        ended_by: str = "",
    ) -> tuple[StepContext, bool]:
        """A call of a region begins.

        Args:
            graph: that is called.
            context: what it finds.
            values: with which.
            ended_by: the user's line after which the step leaves the graph, and why.

        Returns the same with what is beside it, and whether that is known: if not, the plan that
        leaves least is to be followed.

        Raises:
            BudgetError: no plans of the regions fit together.
        """
        self.entered = True
        self._now.inner = torch_compat.current_backward() >= 0
        if self._now.inner:  # its step is over before the backward goes on, which was watched so
            return self.unplanned_context(loop, graph, context), False
        if not self.called:
            read = (p for p in values if isinstance(p, torch.nn.Parameter))
            self.parameters.update({id(p): weakref.ref(p) for p in read})
        walk, called = self._going_on() or self._next(loop), Called(graph, context, ended_by)
        self._late_bytes = max(self._late_bytes, graph.late_bytes)
        if walk.base_bytes is None:  # nobody tells of calls of the model
            given_bytes = graph.given_bytes(context)
            walk.base_bytes = given_bytes - context.waiting_bytes + self._others_bytes(values)
            if not self.called:
                self._begin_watch(loop, walk, graph.joint.device)
        elif not walk.calls:  # what else was found, beside what the model holds
            found_bytes = context.kept_bytes + sum(context.bucket_bytes)
            walk.base_bytes += found_bytes - walk.found_bytes
            walk.found_bytes = found_bytes
        self.known.number(graph)
        if not walk.calls:
            self._agree_on_begin(loop, called, walk.base_bytes + context.waiting_bytes)
            walk.begin(self.known)
        places = self._with_room(loop, walk, called)
        self._watch(loop, called, walk)
        walk.calls.append(called)
        read_by = tuple(id(p) for p in values if isinstance(p, torch.nn.Parameter))
        called.places, called.parameters = tuple(places), read_by
        if not places:
            walk.unknown = True
            return self.unplanned_context(loop, graph, context), False
        held_bytes = context.waiting_bytes - walk.calls[0].context.waiting_bytes
        return self._beside(loop, graph, context, places, held_bytes), True

    def _beside(
        self,
        loop: Loop,
        graph: Graph,
        context: StepContext,
        places: Sequence[tuple[KnownStep, int]],
        held_bytes: int,
    ) -> StepContext:
        """What a call finds, with what is beside it in each of the steps that it may be one of.

        Args:
            graph: that is called.
            context: what it finds by itself.
            places: known steps, and its place in each.
            held_bytes: that earlier calls of its step have left.
        """
        later_bytes = max(known.later_host_bytes[place] for known, place in places)
        host_bytes = self._host_bytes(loop, later_bytes)
        known, place = places[0]
        now = context, held_bytes, known.there_bytes + known.more_bytes, host_bytes
        before = known.contexts.get(place) if len(places) == 1 else None
        if before is not None and before[0] is known.besides and before[1] == now:
            return before[2]
        own_bytes = graph.given_bytes(context) - context.others_there_bytes
        besides = [known.besides[place] for known, place in places]
        begins = (
            known.there_bytes + known.more_bytes + known.besides[place].more_bytes
            for known, place in places
        )
        beside = Correction(
            more_bytes=held_bytes - own_bytes + max(begins),
            turn_bytes=max(beside.turn_bytes for beside in besides),
            left_bytes=max(beside.left_bytes for beside in besides),
        )
        found = alone(context, beside, host_bytes)
        if len(places) == 1:
            known.contexts[place] = known.besides, now, found
        return found

    def chooses(self, loop: Loop, graph: Graph, context: StepContext) -> bool:
        """Whether a step that begins with this call has plans chosen anew, for what is there."""
        walk = self._going_on()
        if walk is None or walk.calls or walk.base_bytes is None:
            return False
        there_bytes = walk.base_bytes + context.waiting_bytes + context.kept_bytes
        there_bytes += sum(context.bucket_bytes) + self._aside_bytes
        key = Called(graph, context).key
        known = (known for known in self.known if known.keys[:1] == (key,))
        return not all(self._leaves_room(loop, own, there_bytes) for own in known)

    def choose_again(self) -> None:
        """Have plans of all known steps chosen again: of a graph more is known than before."""
        for known in self.known:
            known.besides = []

    def grow_to(self, loop: Loop, nbytes: int | None) -> bool:
        """Let ``"min"`` be at least what a plan of the call that was entered last takes.

        Plans are chosen together by what each call takes by itself. An allocator may need a little
        more for the plan that is made of them.

        Returns whether the budget has grown.
        """
        budget = loop.budget
        if not budget.grows or nbytes is None or nbytes <= (budget.nbytes or 0):
            return False
        self._planned_bytes = nbytes
        budget.set(nbytes)
        return True

    def no_room(self) -> None:
        """The call that was entered last does not fit where it was to: it leaves least."""
        self._now.walk.unknown = True
        self._now.walk.calls[-1].places = ()

    def _with_room(self, loop: Loop, walk: Walk, called: Called) -> list[tuple[KnownStep, int]]:
        """Known steps that the one that goes on may be, and the call's places in them, each with
        plans chosen together.

        Raises:
            BudgetError: it is one of some steps that are known, and of each the calls that have
                begun fit by no plans.
        """
        first = walk.calls[0] if walk.calls else called
        there_bytes = (walk.base_bytes or 0) + first.context.waiting_bytes
        found, failed, goes_on = [], None, False
        for known, place in walk.follow(called.key):
            if self.together and known not in walk.begun:
                continue  # ranks know of the same steps, but not of the same sizes
            try:
                # As chosen when the step began.
                fits = bool(walk.calls and known.besides)
                fits = fits or self._choose(loop, known, there_bytes, begun=place + 1)
            except BudgetError as error:
                failed = failed or error.with_traceback(None)  # with frames it would hold the step
                continue
            if fits:
                found.append((known, place))
            else:
                goes_on = True
        seen = [known for known in walk.begun if not known.envelope] or walk.begun
        sure = self.together or all(known.is_sure for known in seen)
        if failed is not None and not (found or goes_on) and walk.begun and sure:
            if loop.budget.may_raise:
                raise failed
            if not walk.short:
                walk.short = True
                self.notices.short(failed, walk.line)
        return found

    def unplanned_context(self, loop: Loop, graph: Graph, context: StepContext) -> StepContext:
        """A call of a step that is not known: it is to leave least.

        Where the budget is known, and no other process is to find the same, only as far as it keeps
        to that. A little more is taken to be there than is, so that calls that find nearly the same
        follow one plan.
        """
        walk: Walk | None = getattr(self._now, "walk", None)
        budget_bytes, host_bytes = loop.budget.nbytes, self._host_bytes(loop)
        begins = walk is None or not (walk.calls and graph.started)
        is_known = budget_bytes is not None or loop.budget.grows
        if walk is None or begins or not is_known or loop.peers is not None:
            return leaving_least(graph, context, host_bytes)
        there_bytes = (walk.base_bytes or 0) + context.waiting_bytes + self._aside_bytes
        there_bytes += -there_bytes % max(1, int(self._much_bytes(loop)))
        beside = Correction(more_bytes=there_bytes, left_bytes=self._made_bytes(loop, walk))
        if budget_bytes is None:  # "min", of which nothing else is known yet
            budget_bytes = self._least_bytes(loop, graph, context, beside)
        key = budget_bytes, alone(context, beside, host_bytes)
        known = self._unknown.setdefault(graph, {})
        if key not in known:
            while len(known) >= MOST_UNKNOWN:
                known.pop(next(iter(known)))
            known[key] = leaving_little(
                graph,
                context,
                budget_bytes,
                beside,
                host_bytes,
                needed=must_fit(graph, loop.budget),
            )
        return known[key]

    def check_least(
        self, loop: Loop, graph: Graph, context: StepContext, parameters: Sequence[torch.Tensor]
    ) -> None:
        """Compare the least that one region needs by itself with the budget, once it is captured.

        Optimizer state of what other regions may read is left out: it may never exist.

        Args:
            graph: that is called.
            context: what its first call finds, with nothing that steps before have shown.
            parameters: that the graph computes a gradient of.

        Raises:
            BudgetError: it needs more, and no step has run to its end yet.
        """
        budget, walk = loop.budget, getattr(self._now, "walk", None)
        if budget.nbytes is None or budget.grows or walk is None or self._now_inner:
            return
        there_bytes = (walk.base_bytes or 0) + context.waiting_bytes + self._aside_bytes
        others_bytes = loop.state_bytes_beside(parameters)
        beside, budget_bytes = Correction(more_bytes=there_bytes), budget.nbytes + others_bytes
        nbytes = self._least_bytes(loop, graph, context, beside, budget_bytes) - others_bytes
        if nbytes <= budget.nbytes:
            return
        error = BudgetError(
            f"budget {budget.written.written!r} is {budget.nbytes} bytes "
            f"({format_bytes(budget.nbytes)}), but a region of this model needs at least "
            f"{nbytes} bytes ({format_bytes(nbytes)}) with what the model holds, "
            f"whatever its plan. Give budget='min', or at least {nbytes}; what the model's "
            "other regions need is not known before they have run, and may be more",
            least_budget_bytes=nbytes,
        )
        if budget.may_raise and not walk.calls:
            raise error
        self.notices.short(error, user_line())

    def _least_bytes(
        self,
        loop: Loop,
        graph: Graph,
        context: StepContext,
        beside: Correction,
        budget_bytes: int | None = None,
    ) -> int:
        """The least budget of a call by itself, with what is beside it; of further forms, too,
        where none that is known keeps to ``budget_bytes``.
        """
        own_bytes = graph.given_bytes(alone(context, NO_CORRECTION))
        held = Correction(
            more_bytes=max(0, beside.more_bytes - own_bytes),
            left_bytes=graph.tangent_bytes(context.sizes) + beside.left_bytes,
        )
        needed = must_fit(graph, loop.budget)
        return least_bytes(graph, alone(context, held), budget_bytes, needed=needed)

    @property
    def _now_inner(self) -> bool:
        return torch_compat.current_backward() >= 0

    def _made_bytes(self, loop: Loop, walk: Walk) -> int:
        """Of gradients that are there when a backward of the call that was entered last begins: of
        parameters that it has not read, nor one before it.
        """
        read = {own for call in walk.calls for own in call.parameters}
        found = (own() for own in self.parameters.values())
        known = {id(p): p for p in (*loop.call.resident(), *found) if p is not None}
        left = (p for own, p in known.items() if own not in read and p.requires_grad)
        return sum(torch_compat.nbytes_of(p) for p in left if p.is_leaf and p.grad is None)

    def begin(self) -> None:
        """The forward of the call that was entered last begins."""
        if self._now.inner:
            return
        walk: Walk = self._now.walk
        called = walk.calls[-1]
        if walk.count is None and not walk.watched:
            there_bytes = (walk.base_bytes or 0) + called.context.waiting_bytes
            walk.count = Count.begin(called.graph.joint.device, lambda: there_bytes)
        called.times_s.append(perf_counter())

    def left(self, loop: Loop, step: Step) -> None:
        """The forward of a region has ended."""
        if self._now.inner:
            return
        walk: Walk = self._now.walk
        walk.steps.append(weakref.ref(step))
        step.part = walk, len(walk.calls) - 1
        called = walk.calls[-1]
        called.compiled, called.held_bytes = step.plan, step.held_bytes
        called.times_s.append(perf_counter())
        loop.watcher.left(step)

    def back(self, loop: Loop, step: Step) -> None:
        """A backward begins, in whatever thread.

        Args:
            loop: around the model.
            step: of which call.
        """
        if step.part is None:
            return
        walk: Walk
        walk, place = step.part
        called, walk.last = walk.calls[place], place
        if walk.watched:
            waiting_bytes = walk.calls[0].context.waiting_bytes
            called.back_bytes = sum(other.held_bytes for other in loop.in_flight) - waiting_bytes
        called.times_s.append(perf_counter())

    def done(self, loop: Loop, step: Step) -> None:
        """The backward of a region has ended."""
        loop.watcher.after(step)
        if step.part is None:
            return
        walk: Walk
        walk, place = step.part
        walk.calls[place].times_s.append(perf_counter())
        peak_bytes = walk.count.peak_bytes() if walk.count and not self.captured else None
        budget_bytes = loop.budget.nbytes
        if peak_bytes is not None and budget_bytes is not None and peak_bytes > budget_bytes:
            self._watches, walk.count = 2, None
            warn_counted(peak_bytes, budget_bytes)

    @property
    def _aside_bytes(self) -> int:
        """Bytes of the budget set aside for what this process did not see, and for scalars.

        These are numbers of the loop: step counts of an optimizer, the last loss.
        """
        unseen_bytes = self.late_bytes + self._late_bytes + self.known.elsewhere_bytes
        return unseen_bytes + SCALARS * SCALAR_BYTES

    def _host_bytes(self, loop: Loop, later_bytes: int = 0) -> int | None:
        """Host memory that a call may take beside what is lent and what later ones are to take."""
        if loop.host is None or loop.host.nbytes is None:
            return None
        return max(0, loop.host.nbytes - loop.host.lent_bytes - later_bytes)

    def _much_bytes(self, loop: Loop) -> float:
        return MUCH * (loop.budget.nbytes or 0)

    def _leaves_room(self, loop: Loop, known: KnownStep, there_bytes: int) -> bool:
        """Whether plans were chosen for what is there when a step begins, or for little more."""
        host_bytes = self._host_bytes(loop)
        more_bytes = (host_bytes or 0) - (known.host_bytes or 0)
        as_before = 0 <= more_bytes <= MUCH * (host_bytes or 0)
        return as_before and known.leaves_room(there_bytes, self._much_bytes(loop))

    def _agree_on_begin(self, loop: Loop, called: Called, there_bytes: int) -> None:
        """Let all processes know of steps what any of them has seen.

        Args:
            called: the first call of the step that begins.
            there_bytes: what is there.

        Raises:
            RankError: other processes, which must follow the same plans, make other calls.
        """
        if self.together and self._before is not None:
            now = [own for own in self.known if own.keys[:1] == (called.key,)]
            fit = [self._leaves_room(loop, known, there_bytes + self._aside_bytes) for known in now]
            self.known.agree_with_all(
                self._before.calls, called, there_bytes, fits=bool(fit) and all(fit)
            )
        elif 2 <= self.steps <= AGREED:
            self.known.agree_with_any(there_bytes)

    def _others_bytes(self, values: Sequence[object]) -> int:
        """Bytes of parameters that only other calls read, and of their gradients."""
        own = {id(p): p for p in values if isinstance(p, torch.nn.Parameter)}
        alive = {place: p for place, found in self.parameters.items() if (p := found()) is not None}
        others = [p for place, p in alive.items() if place not in own]
        gradients = [p.grad for p in others if p.grad is not None]
        return sum(
            nbytes
            for tensor in (*others, *gradients)
            for nbytes in torch_compat.storages_of(tensor).values()
        )

    def _is_to_be_watched(self, loop: Loop) -> bool:
        """Whether a step that begins may teach."""
        shared = loop.peers is None or self.steps < AGREED  # what is seen, others learn
        return bool(self._watches) or (
            shared and any(self._may_teach(loop, known) for known in self.known)
        )

    def _begin_watch(self, loop: Loop, walk: Walk, device: torch.device) -> None:
        """Watch a step that begins, where it may teach."""
        if not self._is_to_be_watched(loop):
            return
        walk.watched = loop.watcher.begin(
            device, whole=functools.partial(self._learn, loop, walk), until_closed=self.called
        )
        if not walk.watched:
            walk.unseen = "another profiler is on in its thread"

    def _may_teach(self, loop: Loop, known: KnownStep) -> bool:
        """Whether steps are watched: where they differ, all whose like may come near the budget."""
        if not known.envelope or not known.choices:
            return bool(known.watches) or known.envelope
        peak_bytes = known.there_bytes + known.planned_bytes
        return bool(known.watches) or peak_bytes > NEAR * (loop.budget.nbytes or 0)

    def _drop_failed(self) -> None:
        """Let what a step holds go that has raised, so that the next one has all room."""
        walk: Walk | None = getattr(self._now, "walk", None)
        if walk is not None and walk.waits:
            torch_compat.drop_failed_backward()
            if walk.failed:
                gc.collect()  # an interrupt may leave its frames in a circle

    def _going_on(self) -> Walk | None:
        """The step of this thread, if it is none whose backward has begun, or can be no more."""
        walk: Walk | None = getattr(self._now, "walk", None)
        if walk is None or walk.failed:
            return None
        if walk.open:  # though nothing waits, or a part went back: functions may do so in a forward
            return walk
        if walk.last is not None:
            return None
        return walk if not walk.calls or walk.waits else None

    def _next(self, loop: Loop) -> Walk:
        """A new step.

        Raises:
            BudgetError: steps take more than the budget whatever their plans.
        """
        loop.watcher.end()
        if self.captured:
            gc.collect()
            self.captured = False
        self.steps += 1
        if self.steps % WATCH_EVERY == 0:
            self._watches = max(self._watches, 1)
        walk: Walk | None = getattr(self._now, "walk", None)
        if walk is None or walk.calls:
            self._before = walk
        if walk is not None:
            self._end(walk)
        self.notices.refuse(loop.budget)
        walk = self._now.walk = Walk()
        return walk

    def _end(self, walk: Walk) -> None:
        """A step is over."""
        if walk.unknown or (not walk.calls and self.steps <= MOST_BARE):
            self._watches = 2  # one more, as the next may be another one
        elif walk.watched:
            self._watches -= bool(self._watches)
        if walk.failed or not (walk.done or walk.last is not None):
            return
        self.notices.followed(walk)
        timed = all(len(call.times_s) == 4 for call in walk.calls)
        if timed and not walk.watched and not walk.unknown:
            for known in walk.begun:
                if len(known.calls) == len(walk.calls):
                    known.seconds = known.seconds or tuple(between(walk))
                    self.notices.broken(known)

    def _watch(self, loop: Loop, called: Called, walk: Walk) -> None:
        """Have a call watched where its step is."""

        def tell(seen: MemoryProfile) -> None:
            called.profile = seen

        if walk.watched:
            loop.watcher.join(tell)

    def _learn(self, loop: Loop, walk: Walk, first_bytes: int, peak_bytes: int, done: bool) -> None:
        """A step was watched, as far as it could be: see :meth:`Watcher.begin`."""
        if walk.failed or self.captured or not (done or walk.calls or walk.unended):
            return  # capturing measures, and that may be in the log
        base_bytes = (walk.base_bytes or 0) + sum(c.context.waiting_bytes for c in walk.calls[:1])
        if not walk.calls:  # else the first call has counted them, and the last loss
            base_bytes += walk.kept_bytes + SCALARS * SCALAR_BYTES
        if self.notices.peak(base_bytes + peak_bytes, loop.budget, walk):
            self._watches = 2  # as long as steps are over, they are watched
        loop.check_outside(base_bytes + peak_bytes)
        walk.done = done
        profiles = seen_profiles(walk)
        if profiles is None or not profiles:
            walk.unseen = walk.unseen or "their backwards had not ended when the next ones began"
            return
        if walk.unseen:
            self.notices.half_seen(walk)
        self.known.has_news = True
        followed = [known for known in walk.begun or walk.places if not walk.unknown]
        for known in self.known.learn(walk.calls, profiles, envelopes=not self.together):
            known.first_bytes = max(known.first_bytes, first_bytes)
            known.peak_bytes = base_bytes + peak_bytes
            if known in followed and known.choices:
                explained_bytes = max(known.planned_bytes - known.more_bytes, *walk.planned_bytes())
                known.more_bytes = max(known.more_bytes, peak_bytes - explained_bytes)
            there_bytes = self._aside_bytes + base_bytes
            budget_bytes = loop.budget.nbytes or 0
            if not known.choices or there_bytes + known.planned_bytes > budget_bytes:
                known.besides = []

    def _choose(self, loop: Loop, known: KnownStep, there_bytes: int, *, begun: int) -> bool:
        """Choose plans for all calls of a step together, if that is to be done.

        A step that begins with the same calls may end before those that do not fit.

        Args:
            known: the step.
            there_bytes: what is there at its begin.
            begun: so many of its calls have.

        Returns whether some fit; else some do that are of the calls which have begun.

        Raises:
            BudgetError: none do.
        """
        there_bytes += self._aside_bytes
        if self._leaves_room(loop, known, there_bytes):
            return True
        asked = there_bytes, loop.budget.nbytes, known.rows
        if known.fitting is not None and known.fitting[1] == asked and begun <= known.fitting[0]:
            return False
        if not known.choices and loop.host is not None:
            loop.host.drop_idle()  # first steps took it for plans that none follows again
        host_bytes = self._host_bytes(loop)
        made: list[Chosen] = []

        def make() -> Chosen:
            try:
                made.append(self._chosen(loop, known, there_bytes, host_bytes))
            except BudgetError:
                fitting = self._fitting(loop, known, there_bytes, host_bytes)
                if fitting < begun:
                    raise
                made.append(Chosen((), (), 0, 0, 0, fitting))
            return made[0]

        if loop.peers is None or not self.together:
            found = make()
        else:
            found = loop.peers.follow("plans of regions", Chosen, make) or made[0]
        if not found.choices:
            known.fitting = found.fitting, asked
            return False
        known.peak_bytes = None
        known.there_bytes, known.host_bytes = there_bytes, host_bytes
        known.least_bytes, known.full_bytes = found.least_bytes, found.full_bytes
        known.choices, known.besides = found.choices, list(found.besides)
        takes = [choice.host_bytes for choice in found.choices]
        self._set_budget(loop, found)
        known.later_host_bytes = [sum(takes[place + 1 :]) for place in range(len(takes))]
        return True

    def _fitting(
        self, loop: Loop, known: KnownStep, there_bytes: int, host_bytes: int | None
    ) -> int:
        """So many first calls of a step, not all, that keep to the budget by some plans."""
        budget_bytes = loop.budget.nbytes
        if budget_bytes is None or loop.budget.grows:
            return 0
        calls = [
            Call(self._choices_of(call), *profiles)
            for call, profiles in zip(known.calls, known.profiles, strict=True)
        ]

        def is_over(count: int) -> bool:
            last = replace(calls[count - 1], after_bytes=0, before_bytes=0)  # what follows may not
            found = least([*calls[: count - 1], last], host_bytes=host_bytes)
            return there_bytes + max(known.first_bytes, found.peak_bytes) > budget_bytes

        return bisect_left(range(1, len(calls)), True, key=is_over)

    def _set_budget(self, loop: Loop, found: Chosen) -> None:
        """Let the budget be what plans were chosen for; ``"min"``: what known steps need."""
        budget = loop.budget
        nbytes = found.budget_bytes
        if budget.grows:
            planned = (own.least_bytes for own in self.known if own.choices)
            nbytes = max(self._planned_bytes, max(planned, default=nbytes))
        budget.set(nbytes)

    def _chosen(
        self, loop: Loop, known: KnownStep, there_bytes: int, host_bytes: int | None
    ) -> Chosen:
        """Plans for all calls of a step, of more forms until some fit."""
        while True:
            calls = [
                Call(self._choices_of(call), *profiles)
                for call, profiles in zip(known.calls, known.profiles, strict=True)
            ]
            try:
                found = chosen_for(
                    calls,
                    loop.budget.now,
                    there_bytes=there_bytes + known.more_bytes,
                    first_bytes=known.first_bytes,
                    host_bytes=host_bytes,
                )
            except BudgetError:
                if not self._grown(known):
                    raise
            else:
                # The least is that of all forms; beside a profiler, of those that are known.
                with contextlib.suppress(CostError):
                    if loop.budget.grows and self._grown(known):
                        continue
                return found

    def _grown(self, known: KnownStep) -> bool:
        """Let schedules be known of one more form of each graph of a step, if there is one."""
        contexts = {call.graph: call.context for call in known.calls}
        grown = [grow(graph, context) for graph, context in contexts.items()]
        if any(grown):
            self._choices.clear()
        return any(grown)

    def _choices_of(self, call: Called) -> tuple[Choice, ...]:
        tangents_stay = call.graph.feedback.tangents_stay
        key = call.key, tangents_stay
        if key not in self._choices:
            context = replace(call.context, tangents_stay=tangents_stay)
            self._choices[key] = choices_of(call.graph, context)
        return self._choices[key]


class _Hung:
    """Hangs on the graph of a call of the model, and goes with it."""
