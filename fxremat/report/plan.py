"""A plan: what was decided for one captured step, and why."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fxremat.report.facts import PlanFacts


@dataclass(frozen=True, slots=True)
class Plan(PlanFacts):
    """The schedule of a training step under a byte budget: its facts, and what to do with them."""

    def with_overhead(self, seconds: float) -> Plan:
        """The plan of a step that takes ``seconds`` beside its calls."""
        more = seconds - self.overhead_s
        return replace(
            self,
            overhead_s=seconds,
            predicted_s=self.predicted_s + more,
            baseline_s=self.baseline_s + more,
            lower_bound_s=self.lower_bound_s + more,
            frontier=self.frontier.delayed(more),
        )

    def explain(self) -> str:
        """Print the plan as a table, and return what was printed."""
        # Only now: rich may be missing, and draws a random number when it is imported.
        from fxremat.report.text import print_plan  # noqa: PLC0415

        return print_plan(self)
