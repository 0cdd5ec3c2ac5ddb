"""A plan that is held against an exact solver, where its chain is short enough for one."""

from __future__ import annotations

from dataclasses import replace

from fxremat.errors import ArgumentError
from fxremat.ir import Infeasible, Problem, Solved
from fxremat.optional import find
from fxremat.report.facts import CrossCheck
from fxremat.report.plan import Plan
from fxremat.solvers.named import solve
from fxremat.units import format_bytes

MOST_STAGES = 12
"""Stages of a chain: of more, CP-SAT rarely proves anything within a minute."""

TIME_LIMIT_S = 60.0
"""Seconds that one search may take."""


def refuse_check(offload: object) -> None:
    """Raise ``ArgumentError`` where no plan can be checked, before there is one.

    Args:
        offload: the argument of that name.
    """
    if offload:
        raise ArgumentError(
            f"offload is {offload!r} with check=True: must be False, since CP-SAT knows schedules "
            "that recompute alone. Leave one of them out",
            argument="offload",
            value=offload,
        )
    if find("ortools.sat.python.cp_model") is None:
        raise ArgumentError(
            "check is True, but ortools, which has CP-SAT, cannot be imported: pip install ortools",
            argument="check",
            value=True,
        )


def cross_checked(plan: Plan) -> Plan:
    """``plan`` with ``cross_check``, which is found from the plan alone."""
    return replace(plan, cross_check=_found(plan))


def _found(plan: Plan) -> CrossCheck:
    count = len(plan.chain)
    if plan.branch_ends:
        return CrossCheck(plan.predicted_s, why_not="too large for it, being a join of branches")
    if count > MOST_STAGES:
        why = f"too large for it, being of {count} stages, more than {MOST_STAGES}"
        return CrossCheck(plan.predicted_s, why_not=why)
    problem = Problem(plan.chain, plan.costs, plan.budget_bytes)
    found = solve("cpsat", problem, time_limit_s=TIME_LIMIT_S)
    if isinstance(found, Infeasible):
        least = format_bytes(found.least_budget_bytes)
        why = f"no schedule of whole stages fits, which take {least} at the least"
        return CrossCheck(plan.predicted_s, proven=True, why_not=why)
    best = found if isinstance(found, Solved) else found.incumbent
    if best is None:
        return CrossCheck(plan.predicted_s, why_not=f"it found none in {TIME_LIMIT_S:.0f} s")
    seconds = best.makespan_s + plan.overhead_s
    return CrossCheck(plan.predicted_s, seconds, proven=isinstance(found, Solved))
