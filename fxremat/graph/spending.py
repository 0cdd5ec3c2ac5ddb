"""The work that planning may put into forms of a graph that are not needed to fit."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fxremat.effort import Effort
from fxremat.passes.joint.graph import JointGraph
from fxremat.passes.split.run import Looks


@dataclass(slots=True)
class Spending:
    """The work that planning has spent on forms that were not needed to fit a budget.

    Work is counted in looks at an operation, not in seconds, so plans are the same in any process.

    Attributes:
        effort: how much may be spent, in looks.
        spent: looks so far at forms that were not needed.
        is_spent: whether a form was skipped, as the effort is spent.
    """

    effort: Effort
    spent: int = 0
    is_spent: bool = False

    def looks(self, joint: JointGraph, *, needed: bool, in_step: bool) -> Looks | None:
        """Return a counter that limits the search for one more form; ``None``: no effort is left.

        Args:
            joint: the graph.
            needed: whether nothing fits without the form: then there is no limit.
            in_step: whether a training step waits for it.
        """
        if needed:
            return Looks()
        operations = len(joint.forward) + len(joint.backward)
        effort = self.effort
        most = effort.scale * max(effort.looks, effort.looks_each * operations) - self.spent
        if in_step:
            most = min(most, effort.scale * effort.looks_in_step)
        left = most - effort.looks_to_plan * operations
        self.is_spent = left <= 0
        return None if self.is_spent else Looks(None if math.isinf(left) else int(left))

    def allows_search(self, joint: JointGraph, forms: int) -> bool:
        """Return whether ``forms`` forms may be searched again while a training step waits.

        It limits only searches that are not needed to fit a budget.
        """
        operations = len(joint.forward) + len(joint.backward)
        effort = self.effort
        looks = forms * effort.looks_to_search * operations
        return looks <= effort.scale * effort.looks_in_step

    def spend(self, looks: Looks, joint: JointGraph, *, taken: bool) -> bool:
        """Add the work on a form that was not needed; return whether it stayed within its limit.

        Args:
            looks: the counter that :meth:`looks` has returned, after the search.
            joint: the graph.
            taken: whether the form was new, so that it was measured and planned.
        """
        operations = len(joint.forward) + len(joint.backward)
        self.spent += looks.count + (self.effort.looks_to_plan * operations if taken else 0)
        self.is_spent = looks.are_out
        return not looks.are_out
