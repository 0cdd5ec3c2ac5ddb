"""How much work planning may put into forms of a step that are not needed to fit."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fxremat.passes.joint.graph import JointGraph
from fxremat.passes.split.run import Looks

USUAL_LOOKS = 600_000
"""At operations, in search of runs, at an effort of 1: some 4 microseconds each."""

LOOKS_EACH = 250
"""For each operation of a step, where that is more: a millisecond, half of what it takes else."""

LOOKS_TO_PLAN = 120
"""What it takes to measure and plan a form, for each of its operations, in such looks."""

LOOKS_TO_SEARCH = 60
"""Of that, to search for schedules once it is measured."""

LOOKS_IN_STEP = 200_000
"""Of a plan that is made inside a training step: less than a second."""


@dataclass(slots=True)
class Spending:
    """The work that planning has spent on forms that were not needed to fit.

    Work is counted in operations, not in seconds, so plans are the same in any process.

    Attributes:
        asked: in multiples of what is usual.
        spent: looks up to now, at forms that were not needed.
        is_spent: a form was not looked at for it.
    """

    asked: float
    spent: int = 0
    is_spent: bool = False

    def looks(self, joint: JointGraph, *, needed: bool, in_step: bool) -> Looks | None:
        """What the search for one more form may take; ``None``: none may be looked at.

        Args:
            joint: the step.
            needed: nothing fits without it: no effort is too much.
            in_step: a training step waits for it.
        """
        if needed:
            return Looks()
        operations = len(joint.forward) + len(joint.backward)
        most = self.asked * max(USUAL_LOOKS, LOOKS_EACH * operations) - self.spent
        if in_step:
            most = min(most, self.asked * LOOKS_IN_STEP)
        left = most - LOOKS_TO_PLAN * operations
        self.is_spent = left <= 0
        return None if self.is_spent else Looks(None if math.isinf(left) else int(left))

    def allows_search(self, joint: JointGraph, forms: int) -> bool:
        """Whether schedules of so many forms may be searched for anew while a training step waits,
        where that is not needed to fit.
        """
        operations = len(joint.forward) + len(joint.backward)
        return forms * LOOKS_TO_SEARCH * operations <= self.asked * LOOKS_IN_STEP

    def spend(self, looks: Looks, joint: JointGraph, *, taken: bool) -> bool:
        """Count what a form took that was not needed, and that was ``taken`` for a further one.

        Returns whether the looks were enough.
        """
        operations = len(joint.forward) + len(joint.backward)
        self.spent += looks.count + (LOOKS_TO_PLAN * operations if taken else 0)
        self.is_spent = looks.are_out
        return not looks.are_out
