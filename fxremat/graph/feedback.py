"""Feedback: what is learned from the steps of one graph, for the plans of later steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace

from fxremat.passes.joint.sizes import Values
from fxremat.planner.context.step_context import NO_CORRECTION, Correction, StepContext

MOST_WATCHED = 2
"""How many sizes steps are watched at: what a loss takes at others is computed from these."""

CHECKED = 2
"""Backwards of each graph that check if gradients of outputs are released, watched or not."""

MOST_MISSED = 3
"""Steps in a row whose loss has another gradient than in the step before, before that counts."""

OUTPUTS, GRADIENTS = HELD = "outputs of earlier steps", "gradients"
"""What may be held when a forward begins and freed when its backward does."""

Kind = tuple[int, bool]


def _by_what() -> dict[str, set[Kind]]:
    return {what: set() for what in HELD}


@dataclass(slots=True)
class Feedback:
    """What was learned from the steps of one graph, for plans of later steps.

    It is changed only under the lock of planning. A kind of context is the number of steps in
    flight and whether gradients exist.

    Attributes:
        corrections: by sizes, what measured steps needed beyond their plans.
        in_flight: by kind of context, what steps needed with several in flight.
        freed: kinds of context in which outputs of earlier steps are freed before the loss, or
            gradients before the backward: a step did so, or nothing fits otherwise.
        held_on: kinds of context in which a step did not free them.
        missed: steps in a row whose loss had another gradient than in the step before.
        scaled: whether ``missed`` has reached its limit: no gradient is computed with a loss then.
        tangents_stay: whether gradients of the outputs are held to the end of the backward.
        checked: number of backwards that have checked whether gradients of outputs are released.
        changes: how often what was learned has changed.
        new_gradients: the latest context in which gradients came to exist between a forward and its
            backward, and the primals that they belong to.
    """

    corrections: dict[Values, Correction] = field(default_factory=dict)
    in_flight: dict[Kind, Correction] = field(default_factory=dict)
    freed: dict[str, set[Kind]] = field(default_factory=_by_what)
    held_on: dict[str, set[Kind]] = field(default_factory=_by_what)
    missed: int = 0
    scaled: bool = False
    tangents_stay: bool = False
    checked: int = 0
    changes: int = 0
    new_gradients: tuple[StepContext, Sequence[Set[int]]] | None = None

    def of_kind(self, context: StepContext) -> Correction:
        """Return what steps in flight have shown to need in contexts of the kind of ``context``."""
        return self.in_flight.get(context.kind, NO_CORRECTION)

    def at(self, sizes: Values, tangent_bytes: Callable[[Values], int]) -> Correction:
        """Return the correction learned from steps of these sizes.

        At new sizes it is the one learned at other sizes, scaled by the bytes of the outputs'
        gradients.

        Args:
            sizes: the sizes of a call.
            tangent_bytes: returns the bytes of the gradients of the outputs at some sizes.
        """
        if not self.corrections or sizes in self.corrections:
            return self.corrections.get(sizes, NO_CORRECTION)
        correction, nbytes = NO_CORRECTION, tangent_bytes(sizes)
        for other, own in self.corrections.items():
            if own != NO_CORRECTION:
                correction |= own.times(nbytes / max(tangent_bytes(other), 1))
        return correction

    def are_watched(self, sizes: Values) -> bool:
        """Return whether steps of these sizes have their memory measured: the first sizes do."""
        return sizes in self.corrections or len(self.corrections) < MOST_WATCHED

    def take(self, corrections: dict[Values, Correction]) -> None:
        """Replace the corrections learned at all sizes by those of ``corrections``."""
        if corrections != self.corrections:
            self.corrections = corrections
            self.changes += 1

    def teach(self, context: StepContext, correction: Correction) -> None:
        """Raise the correction for contexts of the kind of ``context`` to ``correction``."""
        before = self.of_kind(context)
        if before | correction != before:
            self.in_flight[context.kind] = before | correction
            self.changes += 1

    def held(self, context: StepContext) -> StepContext:
        """Return ``context``; in it, outputs' gradients stay held if a backward has shown that."""
        if self.tangents_stay and not context.tangents_stay:
            return replace(context, tangents_stay=True)
        return context

    def corrected(self, context: StepContext, correction: Correction) -> StepContext:
        """Return ``context`` with ``correction`` and what was learned in contexts of its kind."""
        correction |= self.of_kind(context)
        released, cleared = (context.kind in self.freed[what] for what in HELD)
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
        """Yield copies of ``context`` that assume less memory to be held in the backward.

        They assume that outputs of earlier steps are freed before the loss, that gradients are
        freed before the backward, or both, except for what a step has shown to be held.

        Args:
            context: the context of a call.
            accumulates: whether gradients are never cleared between forward and backward.
        """
        held = {
            OUTPUTS: bool(context.kept_bytes) and not context.released,
            GRADIENTS: bool(context.existing) and not context.cleared and not accumulates,
        }
        kind = context.kind
        outputs, gradients = (held[what] and kind not in self.held_on[what] for what in HELD)
        if outputs:
            yield replace(context, released=True)
        if gradients:
            yield replace(context, cleared=True)
        if outputs and gradients:
            yield replace(context, released=True, cleared=True)

    def assume(self, context: StepContext) -> None:
        """Assume that all contexts of this kind free outputs and gradients as ``context`` does."""
        for what, is_freed in zip(HELD, (context.released, context.cleared), strict=True):
            if is_freed:
                self.freed[what].add(context.kind)
        self.changes += 1

    def scale(self, scaled: bool) -> None:
        """Set whether the gradient of the loss is assumed to differ from step to step."""
        self.scaled = scaled
        self.changes += 1
