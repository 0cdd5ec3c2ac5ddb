"""The plans of one captured graph, and the choice among them at each call."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, fx

from fxremat import torch_compat
from fxremat.costs.workspaces import library_workspaces
from fxremat.errors import BudgetError
from fxremat.frontend.agreed import AGREED, agreed_corrections
from fxremat.frontend.corrections import Corrections, warn, warn_counted
from fxremat.frontend.emission import Emitted, Planned
from fxremat.frontend.optimizers import Optimizers
from fxremat.frontend.pipeline import Planner
from fxremat.frontend.regions import Regions
from fxremat.passes.joint.sizes import Values
from fxremat.planner.context import Correction, StepContext
from fxremat.planner.context_bytes import made_outputs, own_gradients
from fxremat.report.plan import Plan
from fxremat.runtime import cuda_graph
from fxremat.runtime.counted import Count
from fxremat.runtime.gradients import Contributors, Gradients, adds, leaves_among, with_gradients
from fxremat.runtime.profile import MemoryProfile, Watcher
from fxremat.runtime.steps import InFlight, Step
from fxremat.units import format_bytes, format_seconds

LOG = logging.getLogger("fxremat")

MOST_PLANS = 512
"""Plans of a plan cache that are kept; that which was used longest ago goes first."""


class _LessHeldError(Exception):
    """What a call found is not so any more."""


@dataclass(slots=True, eq=False)
class Compiled:
    """A plan in use.

    Attributes:
        planned: the plan, its graphs and its host memory.
        plan_cache: to which it belongs.
        context: that it was made for.
        watches: so many steps of it are watched, or until one was seen to its end.
    """

    planned: Planned
    plan_cache: PlanCache
    context: StepContext
    watches: int = 4
    _runs: tuple[Values, tuple[torch_compat.BoxedCallable, ...]] | None = None

    @property
    def plan(self) -> Plan:
        """The plan, for people: all that a step does not need is found when somebody asks."""
        with self.plan_cache.planning:
            self.planned = self.planned.completed()
            return self.planned.plan

    def at(self, values: Values) -> tuple[torch_compat.BoxedCallable, ...]:
        """The forward and the backward where the symbols are ``values``."""
        runs = self._runs  # another thread may put those of other numbers there
        if runs is None or runs[0] != values:
            graphs: tuple[Emitted, ...] = self.planned.graphs.both
            if values != tuple(n for _, n in self.planned.plan.sizes):
                names = self.plan_cache.planner.step.sizes.named(values)
                graphs = tuple(graph.at(names) for graph in graphs)
            runs = self._runs = values, tuple(emitted(graph.forward) for graph in graphs)
        return runs[1]


@dataclass(slots=True)
class PlanCache:
    """One captured graph, and a plan for each context in which it was called.

    Attributes:
        planner: makes plans.
        corrections: that its steps have taught.
        in_flight: steps of the whole model whose backward has not run.
        watcher: of one step of the whole model at a time.
        regions: of the whole model.
        optimizers: of the whole model.
        accumulate: gradients exist at every call, or will.
        output_count: how many results of the forward go to its caller.
        gradients: primals that get a gradient, and which of the tensors that go in each is.
        planning: is held by whoever plans, for any plan cache of the model.
        plans: by context, the one used last at the end.
        contributors: to the gradients of the graph's leaves.
        overhead_s: what a step takes beside its calls.
        spread_bytes: tells of gradients that exist of tensors that several processes share.
        slack_bytes: tells by how much blocks of what is there are larger than what lies in them.
        calls: their numbers, from the first on; no two threads get the same.
        passed: places of the backward's results that are inputs of the forward, and these.
    """

    planner: Planner
    corrections: Corrections
    in_flight: InFlight
    watcher: Watcher
    regions: Regions
    optimizers: Optimizers
    accumulate: bool
    output_count: int
    gradients: dict[int, int]
    planning: threading.RLock
    plans: dict[StepContext, Compiled] = field(default_factory=dict)
    contributors: Contributors = field(default_factory=Contributors)
    overhead_s: float = 0.0
    spread_bytes: Callable[[], int] = int
    slack_bytes: Callable[[], int] = int
    passed: dict[int, int] = field(default_factory=dict)
    calls: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _own: frozenset[int] = frozenset()
    _made: tuple[int, ...] = ()

    @staticmethod
    def of(
        planner: Planner,
        joint: fx.GraphModule,
        values: Sequence[object],
        *,
        in_flight: InFlight,
        watcher: Watcher,
        regions: Regions,
        optimizers: Optimizers,
        accumulate: bool,
        output_count: int,
        planning: threading.RLock,
        kept: Plan | None = None,
        rehearse: bool = True,
        spread_bytes: Callable[[], int] = int,
        slack_bytes: Callable[[], int] = int,
    ) -> PlanCache:
        """The plan cache of a graph, with its first plan.

        Args:
            planner: makes plans.
            joint: the captured graph.
            values: of its primals, where known.
            in_flight: steps of the whole model.
            watcher: of the whole model.
            regions: of the whole model.
            optimizers: of the whole model.
            accumulate: a set of gradients is counted at every call.
            output_count: how many results of the forward go to its caller.
            planning: is held by whoever plans.
            kept: a plan that is followed, instead of making one.
            rehearse: let it be told what the step takes beside its calls.
            spread_bytes: tells of gradients that exist of tensors that several processes share.
            slack_bytes: tells by how much blocks of what is there are larger than what is in them.

        Raises:
            BudgetError, PlanError, HostMemoryError, …: as planning raises them.
        """
        gradients = torch_compat.differentiated_primals(joint, forward_output_count=output_count)
        corrections = Corrections.of(planner, planning)
        plan_cache = PlanCache(
            planner,
            corrections,
            in_flight,
            watcher,
            regions,
            optimizers,
            accumulate,
            output_count,
            gradients,
            planning,
            spread_bytes=spread_bytes,
            slack_bytes=slack_bytes,
            passed=torch_compat.passed_primals(joint, forward_output_count=output_count),
        )
        context, _ = plan_cache._find(values, planner.step.sizes.hints)
        if regions.several:
            context = regions.context_unknown(planner, context)
        planned = planner.first(context, kept=kept, rehearse=rehearse, least=regions.several)
        plan_cache._own = own_gradients(planner.step.joint)
        plan_cache._made = made_outputs(planner.step.joint)
        plan_cache.plans[context] = Compiled(planned, plan_cache, context)
        return plan_cache

    def know_overhead(self, seconds: float) -> None:
        """Let it be in all plans; no rehearsal stays, and with it no batch."""
        self.overhead_s = seconds
        for compiled in self.plans.values():
            compiled.planned = compiled.planned.with_overhead(seconds)

    def forward(
        self,
        args: list[Any],
        *,
        ended_by: str = "",
        on_new: Callable[[Compiled], None] | None = None,
    ) -> tuple[list[Any], Compiled]:
        """Run the forward as planned for what this call finds.

        Args:
            args: the primals; emptied.
            ended_by: the user's line after which the step leaves the graph, and why.
            on_new: is told of a plan that is made.

        Returns the outputs and the step's token, and the plan.

        Raises:
            BudgetError: no plan that was found fits; nothing has run.
        """
        self.optimizers.watcher.end()
        if not self.regions.several:
            self.watcher.end()
        number = next(self.calls)
        together = self.planner.together
        if together is not None and 1 < number <= AGREED:
            self.corrections.seen = agreed_corrections(together, self.corrections.seen)
        values = self.planner.step.sizes.values(args)
        sizes = self._shaping(values)
        compiled = None
        while compiled is None:
            context, leaves = self._find(args, sizes)
            if self.regions.several:
                if context.kept_bytes and self.regions.chooses(self.planner, context):
                    gc.collect()  # what nobody can see any more
                    context, leaves = self._find(args, sizes)
                context, compiled = self._region(context, args, ended_by, on_new)
                break
            with contextlib.suppress(_LessHeldError):  # less each time
                context, compiled = self._plan_for(context, on_new)
        plan, arena = compiled.planned.plan, compiled.planned.graphs.arena
        if arena is not None:
            cuda_graph.refuse_host_memory(arena.nbytes)
        teaches = together is None or number < AGREED
        if (
            teaches
            and not self.regions.several
            and compiled.watches
            and self.corrections.are_watched(sizes)
        ):
            compiled.watches -= self.watcher.begin(
                self.planner.step.joint.device, lambda seen: _learn(context, compiled, seen)
            )
        forward, backward = compiled.at(values)
        count = None
        if self.regions.several:
            self.regions.begin()
        else:
            traced = self.planner.step
            count = Count.begin(
                traced.joint.device,
                lambda: traced.given_bytes(context) - traced.late_bytes,
            )
        passed = {place: args[primal] for place, primal in self.passed.items()}
        results = list(forward(args))
        saved = results[self.output_count :]
        del results[self.output_count :]
        # Autograd makes the results lead to the step: it must not lead to them.
        returned = set(map(id, results))
        saved = [t.detach() if id(t) in returned else t for t in saved]
        held_bytes = plan.waiting_bytes + self.planner.step.turn_bytes(context)
        step = Step(
            compiled,
            backward,
            saved,
            [results[i] for i in self._made],
            context=context,
            held_bytes=held_bytes,
            leaves=leaves,
            passed=passed,
            count=count,
            missing=context.existing - with_gradients(leaves) if self.accumulate else frozenset(),
        )
        self.in_flight.add(step)
        if self.regions.several:
            self.regions.left(step)
        else:
            self.watcher.left(step)
        results.append(step.token())
        return results, compiled

    def backward(self, args: list[Any]) -> Sequence[Any]:
        """Run the backward of a step.

        Args:
            args: the step's token and the tangents; emptied.

        Returns the gradients, by primal; ``None`` for those that are handed over.

        Raises:
            BackwardError: what the step needs is gone, or was written to.
        """
        step = Step.of(args[0])
        self._back(step)
        gradients = Gradients(
            step.leaves,
            places=self.gradients,
            own=self._own,
            contributors=self.contributors,
            others=any(other is not step for other in self.in_flight),
        )
        values: list[Any] = step.take()
        values.extend(args[1:])
        args.clear()
        values.append(gradients)
        step.backward(values)
        if self.regions.several:
            self.regions.done(step)
        elif any(self.in_flight):
            self.watcher.after(step)  # what follows is another step's
        returned = gradients.finish()
        if step.count is not None:
            self._counted(step, step.count.peak_bytes())
        if gradients.asked_for:
            self.in_flight.returned(returned)
        if not step.passed:
            return returned
        return [step.passed.get(place, own) for place, own in enumerate(returned)]

    def _counted(self, step: Step, peak_bytes: int | None) -> None:
        """A step has ended; what the allocator tells of it, if that tells anything."""
        budget_bytes = step.plan.planned.plan.budget_bytes
        if peak_bytes is None or peak_bytes <= budget_bytes or self.watcher.is_watching(step):
            return
        if step.context.waiting or step.number != self.in_flight.latest:
            return  # of several at once it tells of none
        step.plan.watches += 1
        warn_counted(peak_bytes, budget_bytes)

    def _back(self, step: Step) -> None:
        """Note what is there as a backward begins that was not when its forward ran."""
        if self.regions.several:
            self.regions.back(step, self.in_flight)
        context: StepContext = step.context
        now = with_gradients(step.leaves)
        if self.watcher.is_watching(step):
            gone = context.existing - now
            nbytes = [
                replace(context, existing=those).gradient_bytes(self.planner.step.joint)
                for those in (gone, gone & step.missing)
            ]
            self.watcher.back(step, gone=nbytes[0], never=nbytes[1])
        if self.regions.several:
            return
        if now & context.existing:
            self.corrections.gradients_stayed(context)
        came: list[Set[int]] = [now - context.existing]
        if self.contributors.summing == torch_compat.current_backward():
            # Autograd holds those of other steps, which may be all that was planned for.
            came.append(self.gradients.keys() - (context.existing - now))
        if any(came):
            self.corrections.gradients_came(context, came)

    def _shaping(self, values: Values) -> Values:
        """``values``, without those that no tensor follows: a counter is none of a plan's sizes."""
        hints = self.planner.step.sizes.hints
        shaping = self.planner.step.shaping
        return tuple(values[i] if i in shaping else hints[i] for i in range(len(values)))

    def _find(
        self, values: Sequence[object], sizes: Values
    ) -> tuple[StepContext, list[Tensor | None]]:
        """What a call with these primals finds, and the leaves among them that get gradients."""
        waiting = list(self.in_flight)
        made, accumulate = self.gradients, self.accumulate
        alone = () if waiting else self.contributors.alone
        leaves = leaves_among(values)
        existing, added = [], []
        for primal, leaf in enumerate(leaves):
            if leaf is None:
                continue
            there = leaf.grad is not None
            if there or (accumulate and primal in made):
                existing.append(primal)
                if primal in made and (not there or (primal in alone and adds(leaf))):
                    added.append(primal)
            elif primal not in made:
                leaves[primal] = None
        context = StepContext(
            sizes,
            frozenset(existing),
            frozenset(added),
            len(waiting),
            sum(step.held_bytes for step in waiting),
            self.in_flight.kept_bytes(waiting),
            self.optimizers.more_bytes,
            torch_compat.bucket_bytes(),
            self._workspace_bytes(),
            0 if self.planner.together else self.slack_bytes(),  # which is each process's own
            spread_bytes=self.spread_bytes() if self.passed else 0,
        )
        with self.planning:
            if self.regions.several:
                return context, leaves
            context = self.planner.shared_out(context)
            many = len(waiting) >= self.planner.step.caller.in_flight
            if many and any(step.context.kind == context.kind for step in waiting):
                self._leave_room(context)
            return self.corrections.applied(context), leaves

    def _workspace_bytes(self) -> int:
        """What libraries hold beyond what they did when the graph was captured."""
        step = self.planner.step
        return library_workspaces(step.device) - step.caller.library_bytes_on(step.device)

    def _leave_room(self, context: StepContext) -> None:
        """A step like this one still waits: a further one will come while this one does."""
        known = self.corrections.of_kind(context)
        if known.room_bytes:
            return
        room = Correction(room_bytes=self.planner.room_bytes(context))
        if self.planner.fits(replace(context, correction=known | room)):
            self.corrections.teach(context, room)

    def _new_plan(self, context: StepContext) -> tuple[StepContext, Planned]:
        """A plan for a context.

        Where nothing fits beside gradients that exist, but would if they were gone before the
        backward, they are taken to be, until a backward shows otherwise.

        Steps that wait were planned without knowing of this one. Where nothing fits beside what
        they hold, but would beside the least that they could, this step takes the least that it
        can, and they leave room for it from now on.
        """
        try:
            return context, self.planner.again(context)
        except BudgetError as error:
            cleared = replace(context, cleared=True)
            may_clear = not self.accumulate and self.corrections.may_clear(context)
            if may_clear and self.planner.fits(cleared):
                self.corrections.clear(context)
                return cleared, self.planner.again(cleared)
            if context.waiting or context.kept_bytes:
                torch_compat.drop_failed_backward()
                gc.collect()  # what nobody can run backwards, or see, any more
                waiting = list(self.in_flight)
                held_bytes = sum(step.held_bytes for step in waiting)
                held_bytes += self.in_flight.kept_bytes(waiting)
                if held_bytes < context.waiting_bytes + context.kept_bytes:
                    raise _LessHeldError from None
            if not self._taught_waiting(context):
                if self.planner.grown(error):
                    return context, self.planner.again(context)
                raise self.planner.advised(error, context) from None
        planned = self.planner.again(context, least=True)
        plan = planned.plan
        budget_bytes = self.planner.budget.nbytes or 0
        over = plan.counted_bytes - budget_bytes
        warn(
            f"this step takes {plan.counted_bytes} bytes, {over} ({format_bytes(over)}) more than "
            f"its budget of {budget_bytes}: {context.waiting} earlier ones hold "
            f"{context.waiting_bytes} bytes for their backward, and were planned without "
            "knowing of this one. From now on they leave room for it"
        )
        return context, planned

    def _taught_waiting(self, context: StepContext) -> bool:
        """Whether steps that wait could leave room for a further one; then they will."""
        room = self.planner.room_bytes(context)
        corrections: list[tuple[Step, Correction]] = []
        for step in sorted(self.in_flight, key=lambda step: step.number, reverse=True):
            plan_cache: PlanCache = step.plan.plan_cache
            correction = plan_cache.corrections.of_kind(step.context) | Correction(room_bytes=room)
            alone = replace(step.context, correction=correction)
            if not plan_cache.planner.fits(alone):
                return False
            corrections.append((step, correction))
            room += step.held_bytes
        for step, correction in corrections:
            step.plan.plan_cache.corrections.teach(step.context, correction)
        return bool(corrections)

    def _as_good(self, context: StepContext) -> Compiled | None:
        """A plan for a call that found less and still fits, or one that recomputes nothing.

        No other is faster. Where the allocator's blocks are replayed, sums say nothing.
        """
        if self.planner.step.joint.device.type == "cuda":
            return None
        now = self.planner.step.around(context)
        for compiled in reversed(self.plans.values()):
            plan, made_for = compiled.planned.plan, compiled.context
            if made_for.sizes != context.sizes or made_for.added != context.added:
                continue
            then = self.planner.step.around(made_for)
            differences = (
                now.given_bytes - then.given_bytes,
                now.turn_bytes - then.turn_bytes,
                now.tangent_bytes - then.tangent_bytes,
            )
            more_bytes = sum(max(0, n) for n in differences)
            kept = not (compiled.planned.graphs.recomputes or compiled.planned.graphs.arena)
            fits = plan.counted_bytes + more_bytes <= plan.budget_bytes
            if fits and (min(differences) >= 0 or kept):
                return compiled
        return None

    def _region(
        self,
        context: StepContext,
        values: Sequence[object],
        ended_by: str,
        on_new: Callable[[Compiled], None] | None,
    ) -> tuple[StepContext, Compiled]:
        """The plan for a call of one of several regions."""
        with self.planning, self.regions.telling():
            found, known = self.regions.enter(self.planner, context, values, ended_by)
            compiled = self.plans.pop(found, None)
            if compiled is None:
                try:
                    planned = self.planner.again(found, least=not known)
                except BudgetError:
                    if self.regions.together:
                        raise
                    # More is there than in the steps that were watched: it leaves what it can.
                    self.regions.no_room()
                    found = self.regions.context_unknown(self.planner, context)
                    planned = self.planner.again(found, least=True)
                compiled = Compiled(planned.with_overhead(self.overhead_s), self, found)
                _tell(planned.plan)
                if on_new is not None:
                    on_new(compiled)
            self._keep(found, compiled)
            return found, compiled

    def _keep(self, context: StepContext, compiled: Compiled) -> None:
        if len(self.plans) >= MOST_PLANS:
            self.plans.pop(next(iter(self.plans)))
        self.plans[context] = compiled

    def _plan_for(
        self, context: StepContext, on_new: Callable[[Compiled], None] | None
    ) -> tuple[StepContext, Compiled]:
        """The plan for a context, one that is there or a new one; and what it takes for true."""
        with self.planning:
            compiled = self.plans.pop(context, None) or self._as_good(context)
            if compiled is None:
                context, planned = self._new_plan(context)
                planned = planned.with_overhead(self.overhead_s)
                compiled = Compiled(planned, self, context)
                _tell(planned.plan)
                if on_new is not None:
                    on_new(compiled)
                if planned.plan.counted_bytes > (self.planner.budget.nbytes or 0):
                    return context, compiled  # for this time only
            self._keep(context, compiled)
            return context, compiled


def _learn(context: StepContext, compiled: Compiled, seen: MemoryProfile) -> None:
    """A step was watched to its end."""
    if seen.taken_bytes is not None:
        compiled.watches = 0
    plan_cache = compiled.plan_cache
    given_bytes = plan_cache.planner.step.given_bytes(compiled.context)
    plan = compiled.planned.plan
    peak_bytes = plan_cache.corrections.learn(context, plan, given_bytes, seen)
    with plan_cache.planning:
        if seen.taken_bytes is not None and peak_bytes != plan.measured_peak_bytes:
            plan = replace(compiled.planned.plan, measured_peak_bytes=peak_bytes)
            compiled.planned = replace(compiled.planned, plan=plan)


def _tell(plan: Plan) -> None:
    beside = ", ".join(f"{format_bytes(n)} for {what}" for what, n in plan.beside)
    LOG.info(
        "a new plan: peak %s of %s, %s a step%s",
        format_bytes(plan.counted_bytes),
        format_bytes(plan.budget_bytes),
        format_seconds(plan.predicted_s),
        f"; beside the step {beside}" if beside else "",
    )


def emitted(run: torch_compat.BoxedCallable) -> torch_compat.BoxedCallable:
    """How an emitted graph is called: with the algorithms that were measured.

    What it was computing is gone when it raises, whoever keeps the exception: a notebook keeps
    the last one, and with its frames the activations and the host memory of a step that an
    interrupt, or a device short of memory, has ended.
    """

    def call(args: list[Any]) -> Sequence[Any]:
        try:
            with torch_compat.without_autotuning():
                return run(args)
        except BaseException as error:
            args.clear()
            traceback.clear_frames(error.__traceback__)
            raise

    return call
