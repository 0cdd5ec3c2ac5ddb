"""How CP-SAT is asked about a model; it is loaded with the first of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from fxremat.ir import Infeasible, Solution, Solved, TimedOut

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, CpSolver, IntVar


class Model(Protocol):
    """Schedules of a problem as variables, with their time as the objective.

    Attributes:
        cp: the model.
        presolved: its coefficients are small enough for presolve, see ``scale``.
    """

    cp: CpModel
    presolved: bool

    def found(self, search: CpSolver) -> Solved:
        """The schedule that a search ended with."""

    def bound_s(self, search: CpSolver) -> float:
        """Below any schedule, durations as they were given."""


def new_model() -> CpModel:
    """A model without variables."""
    from ortools.sat.python import cp_model  # noqa: PLC0415  (half a second, for few)

    return cp_model.CpModel()


def new_search(*, time_limit_s: float, workers: int) -> CpSolver:
    """A solver that takes so long for each search, in so many threads."""
    from ortools.sat.python import cp_model  # noqa: PLC0415  (half a second, for few)

    search = cp_model.CpSolver()
    search.parameters.max_time_in_seconds = time_limit_s
    search.parameters.num_workers = workers
    return search


def fastest(search: CpSolver, model: Model, known: Solved | None = None) -> Solution | None:
    """The best schedule of a model, or of what there is so far; ``None``: there is none."""
    from ortools.sat.python import cp_model  # noqa: PLC0415  (half a second, for few)

    search.parameters.cp_model_presolve = model.presolved
    status = search.solve(model.cp)
    if status == cp_model.INFEASIBLE:
        return None
    found = model.found(search) if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None
    if found is not None and status == cp_model.OPTIMAL:
        return found
    if known is None or (found is not None and found.makespan_s < known.makespan_s):
        known = found
    bound_s = model.bound_s(search)
    return TimedOut(known, bound_s if known is None else min(bound_s, known.makespan_s))


def least_budget(
    search: CpSolver, cp: CpModel, budget: IntVar, unit_bytes: int
) -> Infeasible | TimedOut:
    """The least ``budget`` of a model in which it is free."""
    from ortools.sat.python import cp_model  # noqa: PLC0415  (half a second, for few)

    cp.minimize(budget)
    if search.solve(cp) != cp_model.OPTIMAL:
        return TimedOut(None, math.inf)
    return Infeasible(round(search.value(budget)) * unit_bytes)
