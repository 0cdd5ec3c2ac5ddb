"""The work that planning may put into forms of a graph that are not needed to fit."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fxremat.passes.joint.graph import JointGraph
from fxremat.passes.split.run import Looks

USUAL_LOOKS = 600_000
"""Looks at operations in a search of runs, at an effort of 1; each takes some 4 microseconds."""

LOOKS_EACH = 250
"""Looks for each operation of a graph, where these are more: a millisecond, half of what else
planning takes for it."""

LOOKS_TO_PLAN = 120
"""What it takes to measure and plan a form, for each of its operations, in looks."""

LOOKS_TO_SEARCH = 60
"""Of that, to search for schedules once it is measured."""

LOOKS_IN_STEP = 200_000
"""Looks of a plan that is made inside a training step: less than a second."""


@dataclass(slots=True)
class Spending:
    """The work that planning has spent on forms that were not needed to fit.

    Work is counted in operations, not in seconds, so plans are the same in any process.

    Attributes:
        asked: the effort, in multiples of the usual one.
        spent: looks so far at forms that were not needed.
        is_spent: whether a form was skipped, as the effort is spent.
    """

    asked: float
    spent: int = 0
    is_spent: bool = False

    def looks(self, joint: JointGraph, *, needed: bool, in_step: bool) -> Looks | None:
        """Return the looks that the search for one more form may take; ``None``: none.

        Args:
            joint: the graph.
            needed: whether nothing fits without the form: then there is no limit.
            in_step: whether a training step waits for it.
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
        """Return whether schedules of ``forms`` forms may be searched while a training step waits.

        Schedules that are needed to fit are searched without a limit.
        """
        operations = len(joint.forward) + len(joint.backward)
        return forms * LOOKS_TO_SEARCH * operations <= self.asked * LOOKS_IN_STEP

    def spend(self, looks: Looks, joint: JointGraph, *, taken: bool) -> bool:
        """Count the looks at a form that was not needed; return whether they were enough.

        Args:
            looks: as :meth:`looks` has returned them.
            joint: the graph.
            taken: whether the form was new, so that it was measured and planned.
        """
        operations = len(joint.forward) + len(joint.backward)
        self.spent += looks.count + (LOOKS_TO_PLAN * operations if taken else 0)
        self.is_spent = looks.are_out
        return not looks.are_out
