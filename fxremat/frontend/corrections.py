"""What the steps of a plan cache have taught: how those to come are planned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace

from fxremat.frontend.loop import Loop
from fxremat.frontend.pipeline import Planner
from fxremat.frontend.shortfall import excess_bytes, warn
from fxremat.passes.joint.sizes import Values
from fxremat.planner.context import NO_CORRECTION, Correction, StepContext
from fxremat.planner.context_bytes import SCALARS, ContextBytes
from fxremat.progress import LOG
from fxremat.runtime.profile import MemoryProfile
from fxremat.runtime.steps import SCALAR_BYTES, Step
from fxremat.units import format_bytes

MOST_WATCHED = 2
"""Sizes at which steps are watched: what a loss takes at others follows from these."""

CHECKED = 2
"""Backwards after which each graph's gradients of outputs are looked for, watched or not."""

MOST_MISSED = 3
"""Steps in a row whose loss had another gradient than in the step before: so it goes on."""

_Kind = tuple[int, bool]

_OUTPUTS, _GRADIENTS = _HELD = "outputs of earlier steps", "gradients"
"""What a forward may begin with, and its backward without."""


@dataclass(slots=True)
class Corrections:
    """Corrections that the steps of one plan cache have taught.

    Attributes:
        planner: of the plan cache.
        loop: around the model; ``planning`` is held by whoever asks what would fit.
        seen: what steps that were watched have taught, by sizes.
        several: of several steps at once, by kind of context.
        gone: kinds whose outputs of earlier steps are gone before the loss, and kinds whose
            gradients are gone before the backward: as steps have shown, or as nothing fits else.
        stayed: kinds where a step has shown that they are not.
        missed: so many steps in a row had a loss with another gradient than the one before.
        scaled: there were too many of these.
        checked: so many backwards have shown whether gradients of outputs are released.
        changes: how often any of that has changed.
    """

    planner: Planner
    loop: Loop
    seen: dict[Values, Correction] = field(default_factory=dict)
    several: dict[_Kind, Correction] = field(default_factory=dict)
    gone: dict[str, set[_Kind]] = field(default_factory=lambda: {what: set() for what in _HELD})
    stayed: dict[str, set[_Kind]] = field(default_factory=lambda: {what: set() for what in _HELD})
    missed: int = 0
    scaled: bool = False
    checked: int = 0
    changes: int = 0
    _came: tuple[StepContext, Sequence[Set[int]]] | None = None

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
        released, cleared = (context.kind in self.gone[what] for what in _HELD)
        released &= bool(context.kept_bytes)
        cleared &= bool(context.existing)
        if cleared or released or self.scaled or correction != NO_CORRECTION:
            return replace(
                context,
                correction=correction,
                cleared=cleared,
                released=released,
                scaled=self.scaled,
            )
        return context

    def held(self, context: StepContext) -> StepContext:
        """``context``, as backwards have shown who holds gradients of the outputs."""
        if self.planner.tangents_stay and not context.tangents_stay:
            return replace(context, tangents_stay=True)
        return context

    def checks_tangents(self, *, watched: bool) -> bool:
        """Whether a backward that begins is to show if gradients of outputs are released.

        Processes that follow the same plans look at the same steps.
        """
        if self.planner.tangents_stay or not self.planner.step.joint.released:
            return False
        return self.checked < CHECKED or (watched and self.planner.together is None)

    def saw_tangents(self, *, released: bool) -> None:
        """Note whether a backward has released the gradients of its outputs."""
        with self.loop.planning:
            self.checked += 1
            if not released:
                self.planner.tangents_stay = True
                self.changes += 1

    def of_kind(self, context: StepContext) -> Correction:
        """The correction that several steps at once have taught for contexts of this kind."""
        return self.several.get(context.kind, NO_CORRECTION)

    def teach(self, context: StepContext, correction: Correction) -> None:
        """Let steps in contexts of this kind be planned for ``correction`` too from now on."""
        with self.loop.planning:
            known = self.of_kind(context)
            if known | correction != known:
                self.several[context.kind] = known | correction
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

    def relaxed(self, context: StepContext) -> Iterator[StepContext]:
        """Contexts in which less is held in the backward, unless a step has shown otherwise.

        Outputs of earlier steps may be gone before the loss, and gradients before the backward.
        """
        held = {
            _OUTPUTS: bool(context.kept_bytes) and not context.released,
            _GRADIENTS: bool(context.existing)
            and not context.cleared
            and not self.loop.caller.accumulate,
        }
        outputs, gradients = (
            held[what] and context.kind not in self.stayed[what] for what in _HELD
        )
        if outputs:
            yield replace(context, released=True)
        if gradients:
            yield replace(context, cleared=True)
        if outputs and gradients:
            yield replace(context, released=True, cleared=True)

    def assume(self, context: StepContext) -> None:
        """Take for granted in like contexts what ``context`` says of outputs and gradients."""
        with self.loop.planning:
            for what, so in zip(_HELD, (context.released, context.cleared), strict=True):
                if so:
                    self.gone[what].add(context.kind)
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

    def backward_began(self, context: StepContext, *, outputs: bool, gradients: bool) -> None:
        """Learn what of that which a forward began with is still held at its backward.

        Args:
            context: in which the forward ran.
            outputs: outputs of earlier steps are.
            gradients: gradients are.
        """
        if context.kept_bytes:
            self._learn_held(context, _OUTPUTS, outputs, context.released)
        if context.existing and not self.loop.caller.accumulate:
            self._learn_held(context, _GRADIENTS, gradients, context.cleared)

    def _learn_held(self, context: StepContext, what: str, held: bool, assumed_gone: bool) -> None:
        kind = context.kind
        gone, stayed = self.gone[what], self.stayed[what]
        if kind in stayed or (kind in gone and not held):
            return
        if not held and self.planner.together is not None:
            return  # processes that follow the same plans would have to see it at the same call
        with self.loop.planning:
            if held:
                stayed.add(kind)
                gone.discard(kind)
            else:
                gone.add(kind)
            self.changes += 1
        if held and assumed_gone:
            gradient_bytes = sum(context.gradient_bytes(self.planner.step.joint))
            nbytes = gradient_bytes if what == _GRADIENTS else context.kept_bytes
            if not excess_bytes(nbytes, 0):
                return
            warn(
                f"this step may take {nbytes} bytes ({format_bytes(nbytes)}) more than its budget "
                f"of {self.planner.budget.nbytes}: {what} that exist during its forward are still "
                "held in its backward. From the next step on the plan leaves room for them"
            )

    def gradients_came(self, context: StepContext, came: Sequence[Set[int]]) -> None:
        """Note that gradients that a forward had not found were there when its backward began.

        Args:
            context: in which it ran.
            came: of which primals: those that have one, and those of which autograd holds another.
        """
        if self._came == (context, came):  # what that teaches is taught
            return
        self._came = context, came
        step = self.planner.step
        found = [replace(context, existing=frozenset(primals)) for primals in came]
        more = sum(sum(each.gradient_bytes(step.joint)) for each in found)
        around = step.around(replace(context, correction=NO_CORRECTION))
        self.teach(context, Correction(left_bytes=around.tangent_bytes + more))

    def learn(
        self, context: StepContext, planned: Taken, seen: MemoryProfile, *, is_first: bool
    ) -> int:
        """Learn from a step that was watched to its end; returns its peak.

        What stayed within the budget teaches nothing that would forbid it.

        Args:
            context: of its call.
            planned: what its plan was to take.
            seen: what it took.
            is_first: no step ran before it. What later ones free may be a variable of the loop that
                was allocated before, such as the last loss: they show no less than was known.
        """
        around = self.planner.step.around(context)
        late_bytes = self.planner.step.late_bytes  # given, but not allocated by this process
        correction = _correction_of(
            seen, planned.allocated_bytes + late_bytes, around, is_first=is_first
        )
        if self.held(context) != context:
            correction = replace(correction, more_bytes=0)  # the next plan counts them as held
        peak_bytes = around.given_bytes - late_bytes + seen.peak_bytes
        slack = SCALARS * SCALAR_BYTES  # which are given, and allocated again by the step
        over = peak_bytes - slack - (self.planner.budget.nbytes or peak_bytes)
        with self.loop.planning:
            known = self._seen_at(context.sizes)
            if known | correction == known:
                return peak_bytes
            taught = replace(context, correction=context.correction | correction)
            if over <= 0 and not self.planner.fits(taught, thorough=False):
                return peak_bytes
            self.seen[context.sizes] = known | correction
            self.changes += self.planner.step.around(taught) != around
        if context.sizes == self.planner.step.sizes.hints:
            self.planner.keep_correction(replace(known | correction, observed=False))
        what = _described(correction, around)
        LOG.info(
            "a step was watched: %s at its peak of %s planned; %s",
            format_bytes(peak_bytes),
            format_bytes(planned.peak_bytes),
            what,
        )
        over = excess_bytes(peak_bytes - slack, self.planner.budget.nbytes or peak_bytes)
        if over and peak_bytes > planned.peak_bytes:
            warn(
                f"this step took {peak_bytes} bytes, {over} ({format_bytes(over)}) more than its "
                f"budget of {self.planner.budget.nbytes}: "
                f"{what or 'an operation took more than when it was measured'}. The next step's "
                "plan leaves room for that"
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


@dataclass(frozen=True, slots=True)
class Taken:
    """What a plan says that a step takes.

    Attributes:
        peak_bytes: most that is held.
        allocated_bytes: of that, what the step itself allocates.
    """

    peak_bytes: int
    allocated_bytes: int


def _correction_of(
    seen: MemoryProfile, planned_bytes: int, around: ContextBytes, *, is_first: bool
) -> Correction:
    """What a step took at the loss point and held in its backward, and what else beyond its plan.

    Of what was gone by then the context says so by itself, so it is no part of either.
    """
    slack = SCALARS * SCALAR_BYTES
    whole = seen.taken_bytes is not None
    left = 0 if seen.taken_bytes is None else seen.taken_bytes - seen.left_bytes
    left += seen.gone_bytes
    loss_point = seen.turn_bytes - seen.left_bytes + seen.released_bytes
    if not is_first:
        left, loss_point = max(left, around.tangent_bytes), max(loss_point, around.turn_bytes)
    taken = max(seen.forward_bytes, seen.backward_bytes)
    if left > around.tangent_bytes + slack:
        taken -= left - around.tangent_bytes
    pairs = ((around.turn_bytes, loss_point), (around.tangent_bytes, left))
    observed = whole and any(abs(assumed - found) > slack for assumed, found in pairs)
    # More than was assumed teaches, though the step was not seen to its end.
    sizes = []
    for assumed, found in pairs:
        differs = abs(assumed - found) > slack and (observed or found > assumed)
        sizes.append(found if differs else assumed * observed)
    return Correction(
        turn_bytes=sizes[0],
        left_bytes=sizes[1],
        more_bytes=taken - planned_bytes if taken > planned_bytes + slack else 0,
        observed=observed,
    )


def _described(correction: Correction, around: ContextBytes) -> str:
    slack = SCALARS * SCALAR_BYTES
    loss_point, left = correction.turn_bytes, correction.left_bytes
    named = (
        (
            loss_point if loss_point > around.turn_bytes + slack else 0,
            "were allocated between forward and backward",
        ),
        (
            left if left > around.tangent_bytes + slack else 0,
            "of that were still held in the backward",
        ),
        (correction.more_bytes, "more than was planned were allocated in the graphs"),
    )
    return ", ".join(f"{format_bytes(nbytes)} {what}" for nbytes, what in named if nbytes)


def warn_counted(peak_bytes: int, budget_bytes: int) -> None:
    """Warn of a step over its budget that was counted by the allocator, but not watched."""
    over = excess_bytes(peak_bytes, budget_bytes)
    if not over:
        return
    warn(
        f"this step took {peak_bytes} bytes, {over} ({format_bytes(over)}) more than its budget of "
        f"{budget_bytes}, as CUDA's allocator has counted with what other threads took meanwhile. "
        "The next one is watched"
    )
