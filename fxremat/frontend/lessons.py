"""What the steps of a family have taught: how those to come are planned."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace

from fxremat.errors import BudgetWarning
from fxremat.frontend.pipeline import Planner
from fxremat.passes.joint.sizes import Values
from fxremat.planner.situation import NO_LESSON, Lesson, Situation
from fxremat.planner.surroundings import SCALARS, Surroundings
from fxremat.report.plan import Plan
from fxremat.runtime.levels import Levels
from fxremat.runtime.steps import SCALAR_BYTES
from fxremat.units import format_bytes

LOG = logging.getLogger("fxremat")

MOST_WATCHED = 2
"""Sizes at which steps are watched: what a loss takes at others follows from these."""

_Kind = tuple[int, bool]


@dataclass(slots=True)
class Lessons:
    """Of one family.

    Attributes:
        planner: of the family.
        planning: is held by whoever plans, or asks what would fit.
        seen: what steps that were watched have taught, by sizes.
        several: of several steps at once, by kind of situation.
        cleared: kinds whose gradients must be gone before the backward, or nothing fits.
        kept: kinds whose gradients were not.
    """

    planner: Planner
    planning: threading.RLock
    seen: dict[Values, Lesson] = field(default_factory=dict)
    several: dict[_Kind, Lesson] = field(default_factory=dict)
    cleared: set[_Kind] = field(default_factory=set)
    kept: set[_Kind] = field(default_factory=set)

    @staticmethod
    def of(planner: Planner, planning: threading.RLock) -> Lessons:
        """With what other processes have learned."""
        if planner.together is not None:  # others may know of others
            return Lessons(planner, planning)
        known = planner.known_lesson()
        seen = {planner.step.sizes.hints: known} if known != NO_LESSON else {}
        return Lessons(planner, planning, seen)

    def applied(self, situation: Situation) -> Situation:
        """``situation`` with what is known of its like."""
        lesson = self._seen_at(situation.sizes) | self.of_kind(situation)
        cleared = situation.kind in self.cleared
        if cleared or lesson != NO_LESSON:
            return replace(situation, lesson=lesson, cleared=cleared)
        return situation

    def of_kind(self, situation: Situation) -> Lesson:
        """What several steps at once have taught of its kind."""
        return self.several.get(situation.kind, NO_LESSON)

    def teach(self, situation: Situation, lesson: Lesson) -> None:
        """Let steps of its kind be planned for ``lesson`` too from now on."""
        with self.planning:
            self.several[situation.kind] = self.of_kind(situation) | lesson

    def are_watched(self, sizes: Values) -> bool:
        """Whether steps of these sizes may teach."""
        return sizes in self.seen or len(self.seen) < MOST_WATCHED

    def may_clear(self, situation: Situation) -> bool:
        """Whether gradients that a call finds may be gone before its backward."""
        return bool(situation.existing) and situation.kind not in self.kept

    def clear(self, situation: Situation) -> None:
        """Take gradients that such calls find to be gone before the backward."""
        with self.planning:
            self.cleared.add(situation.kind)

    def gradients_stayed(self, situation: Situation) -> None:
        """Gradients that a forward found were still there when its backward began."""
        with self.planning:
            self.kept.add(situation.kind)
            self.cleared.discard(situation.kind)
        if situation.cleared:
            more = sum(situation.gradient_bytes(self.planner.step.joint))
            warn(
                f"this step may take {more} bytes ({format_bytes(more)}) more than its budget of "
                f"{self.planner.budget.nbytes}: gradients that exist during its forward are still "
                "there in its backward. From the next step on they are planned for"
            )

    def gradients_came(self, situation: Situation, came: Sequence[Set[int]]) -> None:
        """Gradients that a forward had not found were there when its backward began.

        Args:
            situation: in which it ran.
            came: of which primals: those that have one, and those of which autograd holds another.
        """
        step = self.planner.step
        found = [replace(situation, existing=frozenset(primals)) for primals in came]
        more = sum(sum(each.gradient_bytes(step.joint)) for each in found)
        around = step.around(replace(situation, lesson=NO_LESSON))
        self.teach(situation, Lesson(left_bytes=around.tangent_bytes + more))

    def learn(self, situation: Situation, plan: Plan, given_bytes: int, seen: Levels) -> int:
        """A step was watched to its end; returns its peak.

        What stayed within the budget teaches nothing that would forbid it.

        Args:
            situation: what its call found.
            plan: what it followed.
            given_bytes: what was there beside it where the plan was made.
            seen: what it took.
        """
        around = self.planner.step.around(situation)
        late_bytes = self.planner.step.late_bytes  # of what is given; there is seen of it what is
        planned_bytes = plan.predicted_held_bytes - given_bytes + late_bytes
        lesson = _lesson_of(seen, planned_bytes, around)
        peak_bytes = around.given_bytes - late_bytes + seen.peak_bytes
        over = peak_bytes - plan.budget_bytes
        with self.planning:
            known = self._seen_at(situation.sizes)
            if known | lesson == known:
                return peak_bytes
            taught = replace(situation, lesson=situation.lesson | lesson)
            if over <= 0 and not self.planner.fits(taught, thorough=False):
                return peak_bytes
            self.seen[situation.sizes] = known | lesson
        if situation.sizes == self.planner.step.sizes.hints:
            self.planner.keep_lesson(known | lesson)
        told = _told(lesson)
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

    def _seen_at(self, sizes: Values) -> Lesson:
        """What watched steps have taught: of other sizes, as their outputs are larger."""
        if not self.seen or sizes in self.seen:
            return self.seen.get(sizes, NO_LESSON)
        found, step = NO_LESSON, self.planner.step
        own = step.tangent_bytes(sizes)
        for other, lesson in self.seen.items():
            if lesson != NO_LESSON:
                found |= lesson.times(own / max(step.tangent_bytes(other), 1))
        return found


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


def warn_counted(peak_bytes: int, budget_bytes: int) -> None:
    """Warn of a step that nobody has watched."""
    over = peak_bytes - budget_bytes
    warn(
        f"this step took {peak_bytes} bytes, {over} ({format_bytes(over)}) more than its budget of "
        f"{budget_bytes}, as CUDA's allocator has counted with what other threads took meanwhile. "
        "The next one is watched"
    )


def warn(message: str) -> None:
    """Warn of a step that takes more than its budget."""
    warnings.warn(message, BudgetWarning, stacklevel=3)
