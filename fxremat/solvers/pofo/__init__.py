"""Recomputation and offloading together, optimal among memory-persistent schedules."""

from __future__ import annotations

from fxremat.ir import Infeasible, Problem, Schedule, Solution, Solved
from fxremat.solvers import rotor
from fxremat.solvers.pofo.build import build
from fxremat.solvers.pofo.emit import fluid_schedule, fluid_seconds, whole_schedule
from fxremat.solvers.pofo.search import Decision, least_memory, limits_of, search
from fxremat.solvers.pofo.steps import plan_of


def solve(
    problem: Problem, *, slots: int = 50, width: int = 8, labels: int = 2000, whole: bool = False
) -> Solution:
    sweep = build(problem, slots=slots, width=width)
    least_bytes, decisions = least_memory(sweep)
    least_bytes += problem.costs.fixed_bytes
    if problem.budget_bytes < least_bytes:
        return Infeasible(least_bytes)
    limits = limits_of(sweep)
    limits.best_s[0] = fluid_seconds(plan_of(sweep, decisions), sweep.budget, problem.link)
    alone = rotor.solve(problem, slots=slots)
    if isinstance(alone, Solved) and alone.makespan_s < limits.best_s[0]:
        limits.best_s[0] = alone.makespan_s
    for most, recompute in ((labels, False), (labels // 20 + 1, True), (labels, True)):
        found = search(sweep, limits, most=most, recompute=recompute)
        if found.decisions is not None:
            decisions = found.decisions
        if not found.lost and recompute:
            break
    plan = plan_of(sweep, decisions)
    if whole:
        moved = Solved(*whole_schedule(plan, sweep.budget, problem.link))
        if isinstance(alone, Solved) and alone.makespan_s <= moved.makespan_s:
            return alone
        return moved
    seconds = fluid_seconds(plan, sweep.budget, problem.link)
    if isinstance(alone, Solved) and alone.makespan_s <= seconds:
        return alone
    return Solved(fluid_schedule(plan, sweep.budget, problem.link), seconds)
