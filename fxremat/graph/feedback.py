"""Feedback: what the steps of one graph have shown, for the plans of later steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace

from fxremat.passes.joint.sizes import Values
from fxremat.planner.context import NO_CORRECTION, Correction, StepContext

MOST_WATCHED = 2
"""Sizes at which steps are watched: what a loss takes at other sizes follows from these."""

CHECKED = 2
"""Backwards of each graph in which the gradients of outputs are looked for, watched or not."""

MOST_MISSED = 3
"""Steps in a row whose loss had another gradient than in the step before."""

OUTPUTS, GRADIENTS = HELD = "outputs of earlier steps", "gradients"
"""What a forward may begin with, and its backward without."""

Kind = tuple[int, bool]


def _by_what() -> dict[str, set[Kind]]:
    return {what: set() for what in HELD}


@dataclass(slots=True)
class Feedback:
    """What the steps of one graph have shown.

    Whoever changes it holds the lock of planning.

    Attributes:
        seen: corrections of watched steps, by sizes.
        several: corrections of steps in flight together, by kind of context.
        gone: kinds of context in which outputs of earlier steps are freed before the loss, or
            gradients before the backward: steps have shown it, or nothing fits otherwise.
        stayed: kinds of context in which a step has shown that they are not.
        missed: steps in a row whose loss had another gradient than in the step before.
        scaled: there were too many of these, so no gradient is computed with a loss any more.
        tangents_stay: somebody holds gradients of the outputs to the end of the backward.
        checked: backwards that have shown whether gradients of outputs are released.
        changes: how often any of that has changed.
        came: the latest gradients that appeared between a forward and its backward.
    """

    seen: dict[Values, Correction] = field(default_factory=dict)
    several: dict[Kind, Correction] = field(default_factory=dict)
    gone: dict[str, set[Kind]] = field(default_factory=_by_what)
    stayed: dict[str, set[Kind]] = field(default_factory=_by_what)
    missed: int = 0
    scaled: bool = False
    tangents_stay: bool = False
    checked: int = 0
    changes: int = 0
    came: tuple[StepContext, Sequence[Set[int]]] | None = None

    def of_kind(self, context: StepContext) -> Correction:
        """Return the correction of steps in flight together, for contexts of this kind."""
        return self.several.get(context.kind, NO_CORRECTION)

    def at(self, sizes: Values, tangent_bytes: Callable[[Values], int]) -> Correction:
        """Return the correction of watched steps; that of other sizes is scaled by the outputs.

        Args:
            sizes: of a call.
            tangent_bytes: returns the bytes of the gradients of the outputs at some sizes.
        """
        if not self.seen or sizes in self.seen:
            return self.seen.get(sizes, NO_CORRECTION)
        correction, nbytes = NO_CORRECTION, tangent_bytes(sizes)
        for other, seen in self.seen.items():
            if seen != NO_CORRECTION:
                correction |= seen.times(nbytes / max(tangent_bytes(other), 1))
        return correction

    def are_watched(self, sizes: Values) -> bool:
        """Return whether steps of these sizes may teach."""
        return sizes in self.seen or len(self.seen) < MOST_WATCHED

    def take(self, seen: dict[Values, Correction]) -> None:
        """Replace the corrections of watched steps."""
        if seen != self.seen:
            self.seen = seen
            self.changes += 1

    def teach(self, context: StepContext, correction: Correction) -> None:
        """Plan contexts of this kind for ``correction`` too from now on."""
        before = self.of_kind(context)
        if before | correction != before:
            self.several[context.kind] = before | correction
            self.changes += 1

    def held(self, context: StepContext) -> StepContext:
        """Return ``context`` with who holds gradients of the outputs, as backwards have shown."""
        if self.tangents_stay and not context.tangents_stay:
            return replace(context, tangents_stay=True)
        return context

    def corrected(self, context: StepContext, correction: Correction) -> StepContext:
        """Return ``context`` with all feedback for contexts like it."""
        correction |= self.of_kind(context)
        released, cleared = (context.kind in self.gone[what] for what in HELD)
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

    def relaxed(self, context: StepContext, *, accumulates: bool) -> Iterator[StepContext]:
        """Yield contexts in which less is held in the backward, unless a step has shown otherwise.

        Outputs of earlier steps may be freed before the loss, and gradients before the backward.

        Args:
            context: of a call.
            accumulates: gradients are never cleared between forward and backward.
        """
        held = {
            OUTPUTS: bool(context.kept_bytes) and not context.released,
            GRADIENTS: bool(context.existing) and not context.cleared and not accumulates,
        }
        outputs, gradients = (held[what] and context.kind not in self.stayed[what] for what in HELD)
        if outputs:
            yield replace(context, released=True)
        if gradients:
            yield replace(context, cleared=True)
        if outputs and gradients:
            yield replace(context, released=True, cleared=True)

    def assume(self, context: StepContext) -> None:
        """Assume in like contexts what ``context`` says of outputs and gradients."""
        for what, gone in zip(HELD, (context.released, context.cleared), strict=True):
            if gone:
                self.gone[what].add(context.kind)
        self.changes += 1

    def scale(self, scaled: bool) -> None:
        """Note whether gradients of losses differ from step to step."""
        self.scaled = scaled
        self.changes += 1
