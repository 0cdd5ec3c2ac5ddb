"""From what is offloaded to a solution."""

from __future__ import annotations

from collections.abc import Sequence

from fxremat.ir import Infeasible, Solved
from fxremat.solvers.offload.emit import emit
from fxremat.solvers.offload.line import Line
from fxremat.solvers.offload.phases import plan


def answer(line: Line, amounts: Sequence[float], *, whole: bool) -> Solved:
    """The ordered no-wait schedule that offloads ``amounts``, which must be enough."""
    planned = plan(line, amounts, whole=whole)
    assert planned is not None
    return Solved(emit(line, planned), planned.makespan_s)


def infeasible(line: Line) -> Infeasible | None:
    """Whether no amount of offloading is enough."""
    least = line.least_budget_bytes
    return Infeasible(least) if line.budget < least else None
