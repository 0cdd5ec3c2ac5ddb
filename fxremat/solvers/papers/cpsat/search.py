"""Searches of CP-SAT, which is imported with the first of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from fxremat.ir import Infeasible, Solution, Solved, TimedOut

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, CpSolver, IntVar


class Model(Protocol):
    """A CP-SAT model of the schedules of a problem, with their time as the objective.

    Attributes:
        cp: the model.
        presolved: whether its coefficients are small enough for presolve, see ``scale``.
    """

    cp: CpModel
    presolved: bool

    def solution(self, search: CpSolver) -> Solved:
        """Return the best schedule that a search found."""

    def bound_s(self, search: CpSolver) -> float:
        """Return the lower bound in seconds that a search found for the time of any schedule."""


def new_model() -> CpModel:
    """Return a CP-SAT model without variables."""
    from ortools.sat.python import cp_model  # noqa: PLC0415  # takes half a second

    return cp_model.CpModel()


def new_search(*, time_limit_s: float, workers: int) -> CpSolver:
    """Return a CP-SAT solver with a time limit for each search and a number of threads."""
    from ortools.sat.python import cp_model  # noqa: PLC0415  # takes half a second

    search = cp_model.CpSolver()
    search.parameters.max_time_in_seconds = time_limit_s
    search.parameters.num_workers = workers
    return search


def fastest(search: CpSolver, model: Model, incumbent: Solved | None = None) -> Solution | None:
    """Find the best schedule of a model; ``None`` if the model is infeasible.

    If the time limit is reached, return ``TimedOut`` with the better one of the search's best
    schedule and ``incumbent``, a schedule that is valid in any case.
    """
    from ortools.sat.python import cp_model  # noqa: PLC0415  # takes half a second

    search.parameters.cp_model_presolve = model.presolved
    status = search.solve(model.cp)
    if status == cp_model.INFEASIBLE:
        return None
    solution = model.solution(search) if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None
    if solution is not None and status == cp_model.OPTIMAL:
        return solution
    if incumbent is None or (solution is not None and solution.makespan_s < incumbent.makespan_s):
        incumbent = solution
    bound_s = model.bound_s(search)
    return TimedOut(incumbent, bound_s if incumbent is None else min(bound_s, incumbent.makespan_s))


def least_budget(
    search: CpSolver, cp: CpModel, budget: IntVar, unit_bytes: int
) -> Infeasible | TimedOut:
    """Find the least value of the model's variable ``budget``.

    Returns:
        ``Infeasible`` with that value in bytes; ``TimedOut`` if the time limit is reached.
    """
    from ortools.sat.python import cp_model  # noqa: PLC0415  # takes half a second

    cp.minimize(budget)
    if search.solve(cp) != cp_model.OPTIMAL:
        return TimedOut(None, math.inf)
    return Infeasible(round(search.value(budget)) * unit_bytes)
