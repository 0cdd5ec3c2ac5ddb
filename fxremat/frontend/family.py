"""The plans of one captured graph, and the choice among them at each call."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, fx

from fxremat import torch_compat
from fxremat.errors import BudgetError, BudgetWarning
from fxremat.frontend.emission import Emitted
from fxremat.frontend.optimizers import Optimizers
from fxremat.frontend.pipeline import Planned, Planner
from fxremat.passes.joint.sizes import Values
from fxremat.planner.situation import NO_LESSON, Lesson, Situation
from fxremat.planner.surroundings import (
    SCALAR_BYTES,
    SCALARS,
    Surroundings,
    made_outputs,
    own_gradients,
)
from fxremat.report.plan import Plan
from fxremat.runtime import cuda_graph
from fxremat.runtime.gradients import Contributors, Gradients, adds, leaf_of
from fxremat.runtime.levels import Levels, Watcher
from fxremat.runtime.steps import InFlight, Step
from fxremat.units import format_bytes, format_seconds

LOG = logging.getLogger("fxremat")

MOST_WATCHED = 2
"""Sizes at which steps are watched: what a loss takes at others follows from these."""

MOST_PLANS = 128
"""Plans of a family that are kept; that which was used longest ago goes first."""


class _LessHeldError(Exception):
    """What a call found is not so any more."""


@dataclass(slots=True, eq=False)
class Compiled:
    """A plan in use.

    Attributes:
        planned: the plan, its graphs and its host memory.
        family: to which it belongs.
        given_bytes: what was there beside it in the situation that it was made for.
        watches: so many steps of it are watched, or until one was seen to its end.
    """

    planned: Planned
    family: Family
    given_bytes: int
    watches: int = 4
    _runs: tuple[Values, tuple[torch_compat.BoxedCallable, ...]] | None = None

    def at(self, values: Values) -> tuple[torch_compat.BoxedCallable, ...]:
        """The forward and the backward where the symbols are ``values``."""
        runs = self._runs  # another thread may put those of other numbers there
        if runs is None or runs[0] != values:
            graphs: tuple[Emitted, ...] = self.planned.graphs.both
            if values != tuple(n for _, n in self.planned.plan.sizes):
                names = self.family.planner.sizes.named(values)
                graphs = tuple(graph.at(names) for graph in graphs)
            runs = self._runs = values, tuple(emitted(graph.forward) for graph in graphs)
        return runs[1]


@dataclass(slots=True)
class Family:
    """One captured graph, and a plan for each situation in which it was called.

    Attributes:
        planner: makes plans.
        in_flight: steps of the whole model whose backward has not run.
        watcher: of one step of the whole model at a time.
        optimizers: of the whole model.
        accumulate: gradients exist at every call, or will.
        output_count: how many results of the forward go to its caller.
        gradients: primals that get a gradient, and which of the tensors that go in each is.
        plans: by situation, the one used last at the end.
        contributors: to the gradients of the graph's leaves.
        seen: what steps that were watched have taught, by sizes.
        lessons: of several steps at once, by kind of situation.
        cleared: kinds whose gradients must be gone before the backward, or nothing fits.
        kept: kinds whose gradients were not.
    """

    planner: Planner
    in_flight: InFlight
    watcher: Watcher
    optimizers: Optimizers
    accumulate: bool
    output_count: int
    gradients: dict[int, int]
    plans: dict[Situation, Compiled] = field(default_factory=dict)
    contributors: Contributors = field(default_factory=Contributors)
    seen: dict[Values, Lesson] = field(default_factory=dict)
    lessons: dict[tuple[int, bool], Lesson] = field(default_factory=dict)
    cleared: set[tuple[int, bool]] = field(default_factory=set)
    kept: set[tuple[int, bool]] = field(default_factory=set)
    _own: frozenset[int] = frozenset()
    _made: tuple[int, ...] = ()
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @staticmethod
    def of(
        planner: Planner,
        joint: fx.GraphModule,
        values: Sequence[object],
        *,
        in_flight: InFlight,
        watcher: Watcher,
        optimizers: Optimizers,
        accumulate: bool,
        output_count: int,
        kept: Plan | None = None,
        rehearse: bool = True,
    ) -> Family:
        """That of a graph, with its first plan.

        Args:
            planner: makes plans.
            joint: the captured graph.
            values: of its primals, where known.
            in_flight: steps of the whole model.
            watcher: of the whole model.
            optimizers: of the whole model.
            accumulate: a set of gradients is counted at every call.
            output_count: how many results of the forward go to its caller.
            kept: a plan that is followed, instead of making one.
            rehearse: let it be told what the step takes beside its calls.

        Raises:
            BudgetError, PlanError, HostMemoryError, …: as planning raises them.
        """
        gradients = torch_compat.differentiated_primals(joint, forward_output_count=output_count)
        family = Family(
            planner, in_flight, watcher, optimizers, accumulate, output_count, gradients
        )
        known = planner.known_lesson()
        if known != NO_LESSON:
            family.seen[planner.sizes.hints] = known
        situation, _ = family._find(values, planner.sizes.hints)
        planned = planner.first(situation, kept=kept, rehearse=rehearse)
        family._own = own_gradients(planner.joint)
        family._made = made_outputs(planner.joint)
        given_bytes = planner.around(situation).given_bytes
        family.plans[situation] = Compiled(planned, family, given_bytes)
        return family

    def forward(
        self, args: list[Any], *, on_new: Callable[[Compiled], None] | None = None
    ) -> tuple[list[Any], Compiled]:
        """Run the forward as planned for what this call finds.

        Args:
            args: the primals; emptied.
            on_new: is told of a plan that is made.

        Returns the outputs and the step's token, and the plan.

        Raises:
            BudgetError: no plan that was found fits; nothing has run.
        """
        self.watcher.end()
        values = self.planner.sizes.values(args)
        sizes = self._shaping(values)
        compiled = None
        while compiled is None:
            situation, leaves = self._find(args, sizes)
            with contextlib.suppress(_LessHeldError):  # less each time
                situation, compiled = self._plan_for(situation, on_new)
        plan, arena = compiled.planned.plan, compiled.planned.graphs.arena
        if arena is not None:
            cuda_graph.refuse_host_memory(arena.nbytes)
        if compiled.watches and (sizes in self.seen or len(self.seen) < MOST_WATCHED):
            compiled.watches -= self.watcher.begin(
                self.planner.joint.device, lambda seen: self._learn(situation, compiled, seen)
            )
        forward, backward = compiled.at(values)
        results = list(forward(args))
        saved = results[self.output_count :]
        del results[self.output_count :]
        # Autograd makes the results lead to the step: it must not lead to them.
        returned = set(map(id, results))
        saved = [t.detach() if id(t) in returned else t for t in saved]
        held_bytes = plan.waiting_bytes + self.planner.turn_bytes(situation)
        step = Step(
            compiled,
            backward,
            saved,
            [results[i] for i in self._made],
            situation=situation,
            held_bytes=held_bytes,
            leaves=leaves,
        )
        self.in_flight.add(step)
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
        if self.watcher.is_watching(step) and any(self.in_flight):
            self.watcher.after()  # what follows is another step's
        returned = gradients.finish()
        if gradients.asked_for:
            self.in_flight.returned(returned)
        return returned

    def _back(self, step: Step) -> None:
        """A backward begins: what is there that was not when its forward ran?"""
        situation: Situation = step.situation
        now = {
            i for i, leaf in enumerate(step.leaves) if leaf is not None and leaf.grad is not None
        }
        if self.watcher.is_watching(step):
            gone = replace(situation, existing=situation.existing - now)
            self.watcher.back(unseen_bytes=sum(gone.gradient_bytes(self.planner.joint)))
        if situation.existing:
            self._see_cleared(step, frozenset(now))
        new = frozenset(now) - situation.existing
        if self.contributors.summing == torch_compat.current_backward():
            new = frozenset(self.gradients)  # autograd holds those of other steps
        if new:
            more = sum(replace(situation, existing=new).gradient_bytes(self.planner.joint))
            around = self.planner.around(replace(situation, lesson=NO_LESSON))
            self._teach(situation, Lesson(left_bytes=around.tangent_bytes + more))

    def _see_cleared(self, step: Step, now: frozenset[int]) -> None:
        """Gradients that a forward found are gone, or not, when the backward begins."""
        situation: Situation = step.situation
        if now.isdisjoint(situation.existing):
            return
        with self._lock:
            self.kept.add(situation.kind)
            self.cleared.discard(situation.kind)
        if situation.cleared:
            more = sum(situation.gradient_bytes(self.planner.joint))
            _warn(
                f"this step may take {more} bytes ({format_bytes(more)}) more than its budget of "
                f"{self.planner.budget.nbytes}: gradients that exist during its forward are still "
                "there in its backward. From the next step on they are planned for"
            )

    def _shaping(self, values: Values) -> Values:
        """``values``, without those that no tensor follows: a counter is none of a plan's sizes."""
        hints = self.planner.sizes.hints
        shaping = self.planner.shaping
        return tuple(values[i] if i in shaping else hints[i] for i in range(len(values)))

    def _seen_at(self, sizes: Values) -> Lesson:
        """What watched steps have taught: of other sizes, as their outputs are larger."""
        if not self.seen or sizes in self.seen:
            return self.seen.get(sizes, NO_LESSON)
        found = NO_LESSON
        own = self.planner.tangent_bytes(sizes)
        for other, lesson in self.seen.items():
            if lesson != NO_LESSON:
                found |= lesson.times(own / max(self.planner.tangent_bytes(other), 1))
        return found

    def _teach(self, situation: Situation, lesson: Lesson) -> None:
        """What steps of its kind are planned for from now on."""
        with self._lock:
            known = self.lessons.get(situation.kind, NO_LESSON)
            self.lessons[situation.kind] = known | lesson

    def _learn(self, situation: Situation, compiled: Compiled, seen: Levels) -> None:
        """A step was watched to its end.

        What stayed within the budget teaches nothing that would forbid it.
        """
        if seen.taken_bytes is not None:
            compiled.watches = 0
        plan, around = compiled.planned.plan, self.planner.around(situation)
        own_bytes = plan.predicted_held_bytes - compiled.given_bytes
        lesson = _lesson_of(seen, own_bytes, around)
        peak_bytes = around.given_bytes + seen.peak_bytes
        over = peak_bytes - plan.budget_bytes
        with self._lock:
            known = self._seen_at(situation.sizes)
            if known | lesson == known:
                return
            taught = replace(situation, lesson=situation.lesson | lesson)
            if over <= 0 and not self.planner.fits(taught, thorough=False):
                return
            self.seen[situation.sizes] = known | lesson
        if situation.sizes == self.planner.sizes.hints:
            self.planner.keep_lesson(known | lesson)
        told = _told(lesson)
        LOG.info(
            "a step was watched: %s at its peak of %s planned; %s",
            format_bytes(peak_bytes),
            format_bytes(plan.predicted_held_bytes),
            told,
        )
        if over > 0:
            _warn(
                f"this step took {peak_bytes} bytes, {over} ({format_bytes(over)}) more than its "
                f"budget of {plan.budget_bytes}: {told}. The next step's plan leaves room for that"
            )

    def _find(
        self, values: Sequence[object], sizes: Values
    ) -> tuple[Situation, list[Tensor | None]]:
        """What a call with these primals finds, and the leaves among them that get gradients."""
        leaves: list[Tensor | None] = [None] * len(values)
        existing: list[int] = []
        added: list[int] = []
        waiting = list(self.in_flight)
        alone = self.contributors.alone
        for primal, value in enumerate(values):
            leaf = leaf_of(value)
            if leaf is None:
                continue
            made = primal in self.gradients
            if leaf.grad is None and not (made and self.accumulate):
                leaves[primal] = leaf if made else None
                continue
            leaves[primal] = leaf
            existing.append(primal)
            if not made:
                continue  # a frozen one's
            if leaf.grad is None or (primal in alone and not waiting and adds(leaf)):
                added.append(primal)
        situation = Situation(
            sizes,
            frozenset(existing),
            frozenset(added),
            len(waiting),
            sum(step.held_bytes for step in waiting),
            self.in_flight.kept_bytes(waiting),
            self.optimizers.more_bytes,
            torch_compat.bucket_bytes(),
        )
        lesson = self._seen_at(sizes) | self.lessons.get(situation.kind, NO_LESSON)
        cleared = situation.kind in self.cleared
        if cleared or lesson != NO_LESSON:
            situation = replace(situation, lesson=lesson, cleared=cleared)
        return situation, leaves

    def _new_plan(self, situation: Situation) -> tuple[Situation, Planned]:
        """A plan for a situation.

        Where nothing fits beside gradients that exist, but would if they were gone before the
        backward, they are taken to be, until a backward shows otherwise.

        Steps that wait were planned without knowing of this one. Where nothing fits beside what
        they hold, but would beside the least that they could, this step takes the least that it
        can, and they leave room for it from now on.
        """
        try:
            return situation, self.planner.again(situation)
        except BudgetError as error:
            cleared = replace(situation, cleared=True)
            stays = self.accumulate or situation.kind in self.kept
            if situation.existing and not stays and self.planner.fits(cleared):
                self.cleared.add(situation.kind)
                return cleared, self.planner.again(cleared)
            if situation.waiting or situation.kept_bytes:
                gc.collect()  # what nobody can run backwards, or see, any more
                waiting = list(self.in_flight)
                held_bytes = sum(step.held_bytes for step in waiting)
                held_bytes += self.in_flight.kept_bytes(waiting)
                if held_bytes < situation.waiting_bytes + situation.kept_bytes:
                    raise _LessHeldError from None
            if not self._taught_waiting(situation):
                if self.planner.grown(error):
                    return situation, self.planner.again(situation)
                raise self.planner.advised(error, situation) from None
        planned = self.planner.again(situation, least=True)
        plan = planned.plan
        budget_bytes = self.planner.budget.nbytes or 0
        over = plan.counted_bytes - budget_bytes
        _warn(
            f"this step takes {plan.counted_bytes} bytes, {over} ({format_bytes(over)}) more than "
            f"its budget of {budget_bytes}: {situation.waiting} earlier ones hold "
            f"{situation.waiting_bytes} bytes for their backward, and were planned without "
            "knowing of this one. From now on they leave room for it"
        )
        return situation, planned

    def _taught_waiting(self, situation: Situation) -> bool:
        """Whether steps that wait could leave room for a further one; then they will."""
        room = self.planner.room_bytes(situation)
        lessons: list[tuple[Step, Lesson]] = []
        for step in sorted(self.in_flight, key=lambda step: step.number, reverse=True):
            lesson = self.lessons.get(step.situation.kind, NO_LESSON) | Lesson(room_bytes=room)
            alone = replace(step.situation, lesson=lesson)
            family: Family = step.plan.family
            if not family.planner.fits(alone):
                return False
            lessons.append((step, lesson))
            room += step.held_bytes
        for step, lesson in lessons:
            step.plan.family._teach(step.situation, lesson)
        return bool(lessons)

    def _as_good(self, situation: Situation) -> Compiled | None:
        """A plan for a call that found less and still fits, or one that recomputes nothing.

        No other is faster. Where the allocator's blocks are replayed, sums say nothing.
        """
        if self.planner.joint.device.type == "cuda":
            return None
        now = self.planner.around(situation)
        for other, compiled in reversed(self.plans.items()):
            plan = compiled.planned.plan
            if other.sizes != situation.sizes or other.added != situation.added:
                continue
            then = self.planner.around(other)
            more = (
                now.given_bytes - then.given_bytes,
                now.turn_bytes - then.turn_bytes,
                now.tangent_bytes - then.tangent_bytes,
            )
            fits = plan.counted_bytes + sum(max(0, n) for n in more) <= plan.budget_bytes
            kept = not (compiled.planned.graphs.recomputes or compiled.planned.graphs.arena)
            if fits and (min(more) >= 0 or kept):
                return compiled
        return None

    def _plan_for(
        self, situation: Situation, on_new: Callable[[Compiled], None] | None
    ) -> tuple[Situation, Compiled]:
        """The plan for a situation, one that is there or a new one; and what it takes for true."""
        with self._lock:
            compiled = self.plans.pop(situation, None) or self._as_good(situation)
            if compiled is None:
                situation, planned = self._new_plan(situation)
                compiled = Compiled(planned, self, self.planner.around(situation).given_bytes)
                _tell(planned.plan)
                if on_new is not None:
                    on_new(compiled)
                if planned.plan.counted_bytes > (self.planner.budget.nbytes or 0):
                    return situation, compiled  # for this time only
            if len(self.plans) >= MOST_PLANS:
                self.plans.pop(next(iter(self.plans)))
            self.plans[situation] = compiled
            return situation, compiled


def _lesson_of(seen: Levels, planned: int, around: Surroundings) -> Lesson:
    """What a step needed beyond its plan, by which it was to allocate ``planned`` bytes."""
    slack = SCALARS * SCALAR_BYTES
    left = 0 if seen.taken_bytes is None else seen.taken_bytes - seen.left_bytes
    turn = seen.turn_bytes - seen.left_bytes
    own = max(seen.forward_bytes, seen.backward_bytes)
    if left > around.tangent_bytes + slack:
        own -= left - around.tangent_bytes
    return Lesson(
        turn_bytes=turn if turn > around.turn_bytes + slack else 0,
        left_bytes=left if left > around.tangent_bytes + slack else 0,
        more_bytes=own - planned if own > planned + slack else 0,
    )


def _told(lesson: Lesson) -> str:
    named = (
        (lesson.turn_bytes, "were allocated between forward and backward"),
        (lesson.left_bytes, "of that were still there in the backward"),
        (lesson.more_bytes, "more than was planned were allocated in the graphs"),
    )
    return ", ".join(f"{format_bytes(nbytes)} {what}" for nbytes, what in named if nbytes)


def _warn(message: str) -> None:
    warnings.warn(message, BudgetWarning, stacklevel=3)


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
