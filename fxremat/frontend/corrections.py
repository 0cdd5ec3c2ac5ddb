"""What the steps of a plan cache have taught: how those to come are planned."""

from __future__ import annotations

import warnings
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace

from fxremat.errors import BudgetWarning
from fxremat.frontend.loop import Loop
from fxremat.frontend.pipeline import Planner
from fxremat.passes.joint.sizes import Values
from fxremat.planner.context import NO_CORRECTION, Correction, StepContext
from fxremat.planner.context_bytes import SCALARS, ContextBytes
from fxremat.progress import LOG
from fxremat.report.plan import Plan
from fxremat.runtime.profile import MemoryProfile
from fxremat.runtime.steps import SCALAR_BYTES, Step
from fxremat.units import format_bytes

MOST_WATCHED = 2
"""Sizes at which steps are watched: what a loss takes at others follows from these."""

MOST_MISSED = 3
"""Steps in a row whose loss had another gradient than in the step before: so it goes on."""

_Kind = tuple[int, bool]


@dataclass(slots=True)
class Corrections:
    """Corrections that the steps of one plan cache have taught.

    Attributes:
        planner: of the plan cache.
        loop: around the model; ``planning`` is held by whoever asks what would fit.
        seen: what steps that were watched have taught, by sizes.
        several: of several steps at once, by kind of context.
        cleared: kinds whose gradients must be gone before the backward, or nothing fits.
        kept: kinds whose gradients were not.
        missed: so many steps in a row had a loss with another gradient than the one before.
        scaled: there were too many of these.
        changes: how often any of that has changed.
    """

    planner: Planner
    loop: Loop
    seen: dict[Values, Correction] = field(default_factory=dict)
    several: dict[_Kind, Correction] = field(default_factory=dict)
    cleared: set[_Kind] = field(default_factory=set)
    kept: set[_Kind] = field(default_factory=set)
    missed: int = 0
    scaled: bool = False
    changes: int = 0

    @staticmethod
    def of(planner: Planner, loop: Loop) -> Corrections:
        """Corrections of a plan cache that is new: those that other processes have learned."""
        if planner.together is not None:  # others may know of others
            return Corrections(planner, loop)
        known = planner.known_correction()
        seen = {planner.step.sizes.hints: known} if known != NO_CORRECTION else {}
        return Corrections(planner, loop, seen)

    def applied(self, context: StepContext) -> StepContext:
        """``context`` with the corrections that contexts like it have taught.

        Where as many steps wait as may, and one of them is like this one, another will come while
        this one waits: it leaves room for that at once.
        """
        if context.waiting >= self.planner.step.caller.in_flight:
            waiting = self.loop.in_flight.waiting()
            if any(step.context.kind == context.kind for step in waiting):
                self._leave_room(context)
        correction = self._seen_at(context.sizes) | self.of_kind(context)
        cleared = context.kind in self.cleared
        if cleared or self.scaled or correction != NO_CORRECTION:
            return replace(context, correction=correction, cleared=cleared, scaled=self.scaled)
        return context

    def of_kind(self, context: StepContext) -> Correction:
        """The correction that several steps at once have taught for contexts of this kind."""
        return self.several.get(context.kind, NO_CORRECTION)

    def teach(self, context: StepContext, correction: Correction) -> None:
        """Let steps in contexts of this kind be planned for ``correction`` too from now on."""
        with self.loop.planning:
            self.several[context.kind] = self.of_kind(context) | correction
            self.changes += 1

    def teach_waiting(self, context: StepContext) -> bool:
        """Whether steps that wait could leave room for a further one; then they will."""
        room_bytes = self.planner.room_bytes(context)
        taught: list[tuple[Step, Corrections, Correction]] = []
        for step in sorted(self.loop.in_flight, key=lambda step: step.number, reverse=True):
            own: Corrections = step.plan.plan_cache.corrections
            correction = own.of_kind(step.context) | Correction(room_bytes=room_bytes)
            if not own.planner.fits(replace(step.context, correction=correction)):
                return False
            taught.append((step, own, correction))
            room_bytes += step.held_bytes
        for step, own, correction in taught:
            own.teach(step.context, correction)
        return bool(taught)

    def _leave_room(self, context: StepContext) -> None:
        known = self.of_kind(context)
        if known.room_bytes:
            return
        room = Correction(room_bytes=self.planner.room_bytes(context))
        if self.planner.fits(replace(context, correction=known | room)):
            self.teach(context, room)

    def take(self, seen: dict[Values, Correction]) -> None:
        """Have steps that were watched taught just that, by sizes."""
        with self.loop.planning:
            if seen != self.seen:
                self.seen = seen
                self.changes += 1

    def are_watched(self, sizes: Values) -> bool:
        """Whether steps of these sizes may teach."""
        return sizes in self.seen or len(self.seen) < MOST_WATCHED

    def may_clear(self, context: StepContext) -> bool:
        """Whether gradients that a call finds may be gone before its backward."""
        return bool(context.existing) and context.kind not in self.kept

    def clear(self, context: StepContext) -> None:
        """Take gradients that calls in such contexts find to be gone before the backward."""
        with self.loop.planning:
            self.cleared.add(context.kind)
            self.changes += 1

    def foresaw(self, *, is_so: bool) -> None:
        """Note whether the gradient of a loss was the one that it had in the step before."""
        self.missed = 0 if is_so else self.missed + 1
        if self.missed == MOST_MISSED:
            LOG.info("a loss's gradient is another each time: none are computed beside it any more")
            self._scale(so=True)

    def unscaled(self, context: StepContext) -> StepContext:
        """``context``, as nothing new could be measured for it: steps will show once more that
        gradients of losses are others each time.
        """
        self.missed = 0
        self._scale(so=False)
        return replace(context, scaled=False)

    def _scale(self, *, so: bool) -> None:
        with self.loop.planning:
            self.scaled = so
            self.changes += 1

    def gradients_stayed(self, context: StepContext) -> None:
        """Note that gradients that a forward found were there when its backward began."""
        with self.loop.planning:
            self.kept.add(context.kind)
            if context.kind in self.cleared:
                self.cleared.discard(context.kind)
                self.changes += 1
        if context.cleared:
            more = sum(context.gradient_bytes(self.planner.step.joint))
            warn(
                f"this step may take {more} bytes ({format_bytes(more)}) more than its budget of "
                f"{self.planner.budget.nbytes}: gradients that exist during its forward are still "
                "there in its backward. From the next step on they are planned for"
            )

    def gradients_came(self, context: StepContext, came: Sequence[Set[int]]) -> None:
        """Note that gradients that a forward had not found were there when its backward began.

        Args:
            context: in which it ran.
            came: of which primals: those that have one, and those of which autograd holds another.
        """
        step = self.planner.step
        found = [replace(context, existing=frozenset(primals)) for primals in came]
        more = sum(sum(each.gradient_bytes(step.joint)) for each in found)
        around = step.around(replace(context, correction=NO_CORRECTION))
        self.teach(context, Correction(left_bytes=around.tangent_bytes + more))

    def learn(self, context: StepContext, plan: Plan, given_bytes: int, seen: MemoryProfile) -> int:
        """Learn from a step that was watched to its end; returns its peak.

        What stayed within the budget teaches nothing that would forbid it.

        Args:
            context: what its call found.
            plan: what it followed.
            given_bytes: what was there beside it where the plan was made.
            seen: what it took.
        """
        around = self.planner.step.around(context)
        late_bytes = self.planner.step.late_bytes  # of what is given; there is seen of it what is
        planned_bytes = plan.predicted_held_bytes - given_bytes + late_bytes
        correction = _correction_of(seen, planned_bytes, around)
        peak_bytes = around.given_bytes - late_bytes + seen.peak_bytes
        over = peak_bytes - plan.budget_bytes
        with self.loop.planning:
            known = self._seen_at(context.sizes)
            if known | correction == known:
                return peak_bytes
            taught = replace(context, correction=context.correction | correction)
            if over <= 0 and not self.planner.fits(taught, thorough=False):
                return peak_bytes
            self.seen[context.sizes] = known | correction
            self.changes += 1
        if context.sizes == self.planner.step.sizes.hints:
            self.planner.keep_correction(known | correction)
        told = _described(correction)
        LOG.info(
            "a step was watched: %s at its peak of %s planned; %s",
            format_bytes(peak_bytes),
            format_bytes(plan.predicted_held_bytes),
            told,
        )
        if over > 0:
            warn(
                f"this step took {peak_bytes} bytes, {over} ({format_bytes(over)}) more than its "
                f"budget of {plan.budget_bytes}: {told}. The next step's plan leaves room for that"
            )
        return peak_bytes

    def _seen_at(self, sizes: Values) -> Correction:
        """The correction that watched steps have taught; of other sizes, scaled by the outputs."""
        if not self.seen or sizes in self.seen:
            return self.seen.get(sizes, NO_CORRECTION)
        found, step = NO_CORRECTION, self.planner.step
        own = step.tangent_bytes(sizes)
        for other, correction in self.seen.items():
            if correction != NO_CORRECTION:
                found |= correction.times(own / max(step.tangent_bytes(other), 1))
        return found


def _correction_of(seen: MemoryProfile, planned: int, around: ContextBytes) -> Correction:
    """What a step needed beyond its plan, by which it was to allocate ``planned`` bytes."""
    slack = SCALARS * SCALAR_BYTES
    left = 0 if seen.taken_bytes is None else seen.taken_bytes - seen.left_bytes
    turn = seen.turn_bytes - seen.left_bytes
    own = max(seen.forward_bytes, seen.backward_bytes)
    if left > around.tangent_bytes + slack:
        own -= left - around.tangent_bytes
    return Correction(
        turn_bytes=turn if turn > around.turn_bytes + slack else 0,
        left_bytes=left if left > around.tangent_bytes + slack else 0,
        more_bytes=own - planned if own > planned + slack else 0,
    )


def _described(correction: Correction) -> str:
    named = (
        (correction.turn_bytes, "were allocated between forward and backward"),
        (correction.left_bytes, "of that were still there in the backward"),
        (correction.more_bytes, "more than was planned were allocated in the graphs"),
    )
    return ", ".join(f"{format_bytes(nbytes)} {what}" for nbytes, what in named if nbytes)


def warn_counted(peak_bytes: int, budget_bytes: int) -> None:
    """Warn of a step over its budget that was counted by the allocator, but not watched."""
    over = peak_bytes - budget_bytes
    warn(
        f"this step took {peak_bytes} bytes, {over} ({format_bytes(over)}) more than its budget of "
        f"{budget_bytes}, as CUDA's allocator has counted with what other threads took meanwhile. "
        "The next one is watched"
    )


def warn(message: str) -> None:
    """Warn of a step that takes more than its budget."""
    warnings.warn(message, BudgetWarning, stacklevel=3)
