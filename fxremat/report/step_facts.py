"""What is known of a step that several captured graphs make: a plan for each, within one budget."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fxremat.report.modules import span
from fxremat.report.plan import Plan
from fxremat.units import Counted

_COMMENT = re.compile(r"\s*#.*")


@dataclass(frozen=True, slots=True)
class RegionRow:
    """A call of one graph in a step.

    Attributes:
        plan: that the call followed; its peaks are of all that was there beside it.
        module: where in the model the parameters are that it reads; empty where nobody knows.
        ended_by: the user's line at which capturing ended, and why; empty where that was asked for,
            or is not known, or the step ends there.
        held_bytes: that it keeps from its forward to its backward, its outputs included.
        forward_peak_bytes, backward_peak_bytes: most that the whole step holds while it runs.
        between_bytes: most that is there from its forward to what comes next, beyond what was there
            when the step began and what this and earlier regions hold: what code between allocates.
        between_back_bytes: the same after its backward, gradients that were made included.
        between_s: seconds from its forward to the next one's, and back, that no graph takes;
            ``None``: they were not measured, or it is the last.
    """

    plan: Plan
    module: str
    ended_by: str
    held_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    between_bytes: int
    between_back_bytes: int
    between_s: float | None


@dataclass(frozen=True, slots=True)
class StepFacts:
    """A step that several captured graphs make, one after the other, under one byte budget.

    Attributes:
        budget: the budget as it was written, such as ``"6 GiB"``.
        budget_bytes: the budget in bytes.
        least_budget_bytes: the least peak of any plans together that were found.
        baseline_peak_bytes: the peak where every graph keeps everything.
        predicted_peak_bytes: the peak of these plans, with all that was seen beside them in steps
            that were watched, in blocks as the device's allocator hands them out.
        predicted_reserved_bytes: bytes that the allocator has taken from the device at most.
        measured_peak_bytes: the peak of the latest step that followed these plans and was watched;
            ``None``: none was.
        there_bytes: bytes allocated when the step begins, and bytes that are left free.
        regions: calls of graphs, in the order of their forwards.
    """

    budget: str | int | float
    budget_bytes: int
    least_budget_bytes: int
    baseline_peak_bytes: int
    predicted_peak_bytes: int
    predicted_reserved_bytes: int
    measured_peak_bytes: int | None
    there_bytes: int
    regions: tuple[RegionRow, ...]

    @property
    def budget_on(self) -> Counted:
        """The bytes that all budgets are for: ``"allocated"`` or ``"reserved"`` ones."""
        return self.regions[0].plan.budget_on

    @property
    def counted_bytes(self) -> int:
        """The predicted peak in the bytes that the budget is for, allocated or reserved."""
        reserved = self.budget_on == "reserved"
        return self.predicted_reserved_bytes if reserved else self.predicted_peak_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory, to which storages of all regions travel."""
        return sum(row.plan.host_bytes for row in self.regions)

    @property
    def between_s(self) -> float | None:
        """Seconds between graphs, in both directions; ``None``: they were not measured yet."""
        found = [row.between_s for row in self.regions if row.between_s is not None]
        return sum(found) if found or len(self.regions) == 1 else None

    @property
    def predicted_s(self) -> float:
        """Seconds of all graphs, and between them as far as that was measured.

        A loss outside the model, and what else comes between the last forward and its backward,
        are not in it.
        """
        return sum(row.plan.predicted_s for row in self.regions) + (self.between_s or 0.0)

    @property
    def baseline_s(self) -> float:
        """Predicted seconds of the step with nothing recomputed, between graphs included."""
        return sum(row.plan.baseline_s for row in self.regions) + (self.between_s or 0.0)

    @property
    def forward_code(self) -> str:
        """The forwards of all regions as Python, one after the other; alike ones once."""
        return self._code(range(len(self.regions)), lambda plan: plan.forward_code)

    @property
    def backward_code(self) -> str:
        """The backwards of all regions as Python, the last region's first; alike ones once."""
        places = range(len(self.regions) - 1, -1, -1)
        return self._code(places, lambda plan: plan.backward_code)

    def _code(self, places: Iterable[int], code_of: Callable[[Plan], str]) -> str:
        alike: dict[str, list[int]] = {}
        for place in places:
            code = _COMMENT.sub("", code_of(self.regions[place].plan))  # comments tell peaks
            alike.setdefault(code, []).append(place)
        return "\n\n".join(
            f"# {self._headline(sorted(own))}\n{code_of(self.regions[own[0]].plan).strip()}"
            for own in alike.values()
        ) + ("\n" if alike else "")

    def _headline(self, places: list[int]) -> str:
        """Numbers of regions, counted from 1, and what ended them."""
        runs: list[list[int]] = []
        for place in places:
            if not runs or runs[-1][1] + 1 != place:
                runs.append([place, place])
            runs[-1][1] = place
        numbers = ", ".join(span(first + 1, last + 1) for first, last in runs)
        reasons = dict.fromkeys(filter(None, (self.regions[place].ended_by for place in places)))
        ended = f", ended by {'; '.join(reasons)}" if reasons else ""
        return f"region {numbers}{ended}" if len(places) == 1 else f"regions {numbers}{ended}"
