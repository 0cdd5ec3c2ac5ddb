"""Schedules of small joins by CP-SAT: the best of all memory-persistent ones.

A sequence of operations is a number of steps; each step runs one operation (``F_none``,
``F_ck``, ``F_all``, ``B``, or ``F_all`` and ``B`` as a rebuild) of one stage, or is idle at the
end. What is held between steps follows, boundary by boundary and line by line (a line is a
branch or the trunk). What is searched are the memory-persistent schedules: operations of
several branches may alternate in any way, so that the optimum may be below that of the
canonical schedules that the solver ``join`` finds. Its schedule is where the search starts.

``default_steps`` are enough where every run of forwards ends in a backward or in the trunk.

Exact in bytes; exact in seconds under the conditions in ``scale``. Exponential in the worst
case: meant for two branches of two or three stages.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fxremat.ir import (
    Backward,
    Compute,
    Forward,
    Infeasible,
    Join,
    JoinProblem,
    Keep,
    Schedule,
    Solution,
    Solved,
    TimedOut,
)
from fxremat.solvers.cpsat.join_steps import Model, Step, build
from fxremat.solvers.cpsat.scale import MOST_PRESOLVED, Ticks
from fxremat.solvers.join import general
from fxremat.solvers.sequences import seconds_of

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpSolver, IntVar


def default_steps(join: Join) -> int:
    """``n (n + 1) / 2 + n T`` for a branch of ``n`` stages, ``T (T + 3) / 2 + 1`` for a trunk."""
    turns = len(join.trunk)
    trunk = turns * (turns + 1) // 2 + turns + 1
    return trunk + sum(n * (n + 1) // 2 + n * turns for n in map(len, join.branches))


def solve(
    problem: JoinProblem,
    *,
    steps: int | None = None,
    time_limit_s: float = 60.0,
    workers: int = 1,
) -> Solution:
    """The fastest memory-persistent schedule within the budget, proved by CP-SAT.

    Args:
        problem: the join, its costs and the budget.
        steps: of a schedule, at most; ``None``: ``default_steps``.
        time_limit_s: of each search, that for time and that for the least budget.
        workers: threads of CP-SAT.

    Returns:
        ``Solved``; ``Infeasible`` with the exact least budget; or ``TimedOut`` with the best
        schedule so far (at least the canonical one) and a bound, infinite if only the least
        budget was not found.

    Raises:
        ValueError: a storage lies in two boundaries of a line, or the sizes are too large to
            add up.
    """
    from ortools.sat.python import cp_model  # noqa: PLC0415  (half a second, for few)

    _check_sharing(problem.join)
    count = default_steps(problem.join) if steps is None else steps
    canonical = general.solve(problem)
    search = cp_model.CpSolver()
    search.parameters.max_time_in_seconds = time_limit_s
    search.parameters.num_workers = workers

    model = build(cp_model.CpModel(), problem, count)
    ticks = _minimize_seconds(model, problem)
    if isinstance(canonical, Solved):
        _hint(model, canonical.schedule.computations)
    search.parameters.cp_model_presolve = model.most_coefficients <= MOST_PRESOLVED
    status = search.solve(model.cp)
    if status == cp_model.OPTIMAL:
        return _found(search, model, problem)
    if status == cp_model.INFEASIBLE:
        if isinstance(canonical, Solved):  # too few steps were allowed
            return TimedOut(canonical, 0.0)
        model = build(cp_model.CpModel(), problem, count, any_budget=True)
        model.cp.minimize(model.budget)
        if search.solve(model.cp) != cp_model.OPTIMAL:
            return TimedOut(None, math.inf)
        return Infeasible(round(search.value(model.budget)) * model.unit_bytes)
    best = canonical if isinstance(canonical, Solved) else None
    if status == cp_model.FEASIBLE:
        found = _found(search, model, problem)
        best = found if best is None or found.makespan_s < best.makespan_s else best
    bound_s = _bound_s(search, model, problem, ticks)
    return TimedOut(best, bound_s if best is None else min(bound_s, best.makespan_s))


def _check_sharing(join: Join) -> None:
    for line, chain in enumerate(join.lines):
        seen: set[int] = set()
        for boundary in chain.boundaries:
            for storage in boundary:
                if storage in seen:
                    raise ValueError(f"storage {storage} lies in two boundaries of line {line}")
                seen.add(storage)


def _minimize_seconds(model: Model, problem: JoinProblem) -> Ticks:
    """Backwards are left out: each runs once."""
    stages = [stage for line in problem.costs.lines for stage in line]
    longest_s = sum(max(stage.forward_s, stage.rebuild_s) for stage in stages)
    durations = [t for stage in stages for t in (stage.forward_s, stage.rebuild_s)]
    ticks = Ticks.of(durations, total_s=len(model.steps) * longest_s)
    model.cp.minimize(
        sum(
            ticks.count(stage.forward_s) * (step.none[i] + step.ck[i] + step.all[i])
            + ticks.count(stage.rebuild_s) * step.rebuild[i]
            for step in model.steps
            for i, stage in enumerate(stages)
        )
    )
    return ticks


def _bound_s(search: CpSolver, model: Model, problem: JoinProblem, ticks: Ticks) -> float:
    bound = search.best_objective_bound
    if not ticks.exact:
        bound -= len(model.steps) / 2
    backward_s = sum(stage.backward_s for line in problem.costs.lines for stage in line)
    return max(0.0, ticks.seconds(bound)) + backward_s


def _ways(step: Step, stage: int) -> list[tuple[tuple[Compute, ...], IntVar]]:
    forward = {keep: Forward(stage, keep) for keep in Keep}
    return [
        ((forward[Keep.NONE],), step.none[stage]),
        ((forward[Keep.INPUT],), step.ck[stage]),
        ((forward[Keep.ALL],), step.all[stage]),
        ((forward[Keep.ALL], Backward(stage)), step.rebuild[stage]),
        ((Backward(stage),), step.back[stage]),
    ]


def _hint(model: Model, ops: tuple[Compute, ...]) -> None:
    """Let the search start from a schedule."""
    ran: set[int] = set()
    index = 0
    for step in model.steps:
        chosen: tuple[Compute, ...] = ()
        if index < len(ops):
            op = ops[index]
            pair = ops[index : index + 2]
            again = isinstance(op, Forward) and op.keep is Keep.ALL and op.stage in ran
            chosen = pair if again and pair[1:] == (Backward(op.stage),) else (op,)
            ran.add(op.stage)
            index += len(chosen)
        for stage in range(len(step.none)):
            for way, variable in _ways(step, stage):
                model.cp.add_hint(variable, way == chosen)


def _found(search: CpSolver, model: Model, problem: JoinProblem) -> Solved:
    ops: list[Compute] = []
    for step in model.steps:
        for stage in range(len(step.none)):
            for way, variable in _ways(step, stage):
                if search.boolean_value(variable):
                    ops += way
    return Solved(Schedule(tuple(ops)), seconds_of(problem.costs.stages, ops))
