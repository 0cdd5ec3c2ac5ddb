"""A plan in a few lines, as ``print`` shows it."""

from __future__ import annotations

from fxremat.report.peak import holders_of, shortened
from fxremat.report.plan import AnyPlan, StepPlan, plans_of
from fxremat.report.summary import bound_of_least, compared, what_is_done
from fxremat.units import format_bytes, plural

WIDTH = 100
"""The maximum width of the line with the largest holder of the peak, in columns."""


def shortly(plan: AnyPlan) -> str:
    """Return a summary of a plan in a few lines."""
    budget, least, predicted, kept = map(
        format_bytes,
        (
            plan.budget_bytes,
            plan.least_budget_bytes,
            plan.predicted_peak_bytes,
            plan.baseline_peak_bytes,
        ),
    )
    seen_bytes = plan.measured_peak_bytes
    measured = "" if seen_bytes is None else f", measured {format_bytes(seen_bytes)}"
    regions = plan.regions if isinstance(plan, StepPlan) else ()
    what = f"StepPlan of {plural(len(regions), 'region')}" if regions else "Plan"
    largest = _largest(plan)
    return (
        f"{what} within {budget} (the least feasible budget is {bound_of_least(plan)}{least})\n"
        f"  peak: predicted {predicted}{measured}; {kept} with everything kept\n"
        f"{largest}"
        f"  time: predicted {compared(plan)}\n"
        f"  how:  {what_is_done(*plans_of(plan))}\n"
        "  more: explain(), save_html(path), forward_code, backward_code"
    )


def _largest(plan: AnyPlan) -> str:
    """Return a line that names what holds the most bytes at the peak; empty if it is unknown."""
    if not all(own.memory.count for own in plans_of(plan)):
        return ""
    most = holders_of(plan)[0]
    made = f" ({most.line.place})" if most.line else ""
    text = f"  most: {format_bytes(most.nbytes)} at the peak, {most.origin}{made}"
    return shortened(text, WIDTH) + "\n"
