"""Optimal schedules of small chains by CP-SAT, memory-persistent or not.

A sequence of operations is cut into *runs*: forwards of consecutive stages ``s, s + 1, …``, each
reading what the one before wrote, and then at most one backward. Every run and stage has four
variables (``F_none``, ``F_ck``, ``F_all``, or ``F_all`` and ``B`` as a rebuild), which determine
what is held between runs. Memory is bounded at every forward and backward, storage by storage: one
that several values share counts once.

The search covers the sequences of at most a given number of runs in which no forward writes a
boundary that is held, or only the memory-persistent ones of them (``persistent``, see ``rotor``).
For memory-persistent schedules ``L + 1`` runs suffice: each ends in a backward, except that the
last stage may run once before its rebuild. For others no such bound is known. ``more_runs`` limits
the number of runs without a backward, and the optimum is that of such schedules.

Where storages are in several boundaries, a schedule that is not persistent can hold a storage
twice, written in two runs. Copies are then distinguished by the run that wrote them.

It is exact in bytes, and exact in seconds under the conditions in ``scale``. Complexity:
exponential in the worst case; meant for chains of up to about eight stages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxremat.ir import (
    Backward,
    Compute,
    Forward,
    Keep,
    Problem,
    Schedule,
    Solution,
    Solved,
)
from fxremat.solvers import rotor
from fxremat.solvers.papers.cpsat.held import add_memory, all_bytes
from fxremat.solvers.papers.cpsat.runs import RunVariables, add_hint, add_runs
from fxremat.solvers.papers.cpsat.scale import MOST_PRESOLVED, Ticks, byte_unit
from fxremat.solvers.papers.cpsat.search import fastest, least_budget, new_model, new_search
from fxremat.solvers.sequences import seconds_of

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpSolver, IntVar


def solve(
    problem: Problem,
    *,
    persistent: bool = True,
    more_runs: int | None = None,
    time_limit_s: float = 60.0,
    workers: int = 1,
) -> Solution:
    """Find the fastest schedule within the budget by CP-SAT, with proof of optimality.

    A run is consecutive forwards and at most one backward; every schedule is a sequence of runs.

    Args:
        problem: the chain, its costs and the budget. A link is not used.
        persistent: whether only memory-persistent schedules are searched.
        more_runs: maximum number of runs without a backward, if not ``persistent``; ``None``: the
            number of stages.
        time_limit_s: seconds for each of two searches, for time and for the least budget.
        workers: number of CP-SAT's threads.

    Returns:
        ``Solved``; ``Infeasible`` with the exact least budget; or ``TimedOut`` with the best
        schedule so far and a lower bound in seconds. That schedule is never slower than rotor's, if
        rotor's has few enough runs. The bound is infinite if only the search for the least budget
        timed out.

    Raises:
        ValueError: the sizes are too large to add up.
    """
    count = len(problem.chain)
    runs = count + (1 if persistent else count if more_runs is None else more_runs)
    search = new_search(time_limit_s=time_limit_s, workers=workers)
    model = _Runs(problem, runs, persistent)
    model.minimize_seconds()
    solution = fastest(search, model, _hinted(model, problem))
    if solution is not None:
        return solution
    model = _Runs(problem, runs, persistent, any_budget=True)
    return least_budget(search, model.cp, model.budget, model.unit_bytes)


def _hinted(model: _Runs, problem: Problem) -> Solved | None:
    """Give rotor's schedule to the search as its start.

    Returns:
        That schedule; ``None`` if it has too many runs, or does not fit.
    """
    solution = rotor.solve(problem)
    if not isinstance(solution, Solved):
        return None
    hinted = add_hint(model.cp, model.runs, solution.schedule.computations)
    return solution if hinted else None


class _Runs:
    """CP-SAT model of the schedules of a problem that consist of at most ``runs`` runs."""

    def __init__(
        self, problem: Problem, runs: int, persistent: bool, any_budget: bool = False
    ) -> None:
        chain, costs = problem.chain, problem.costs
        sizes = list(all_bytes(chain, costs))
        self.cp = new_model()
        self.problem = problem
        self.unit_bytes = byte_unit(sizes)
        # Keeping everything needs no more than all sizes together.
        most = sum(sizes) // self.unit_bytes
        # A constraint sums up all instances of storages; gradients count twice.
        self.presolved = 2 * most * runs <= MOST_PRESOLVED
        least = 0 if any_budget else min(most, problem.budget_bytes // self.unit_bytes)
        self.budget = self.cp.new_int_var(least, most if any_budget else least, "budget")
        ways = [len(stage.options) + 1 for stage in costs.stages]
        self.runs = add_runs(self.cp, ways, runs, persistent=persistent)
        add_memory(
            self.cp,
            chain,
            costs,
            self.runs,
            persistent=persistent,
            unit_bytes=self.unit_bytes,
            budget=self.budget,
        )
        longest_s = sum(max(stage.forward_s, stage.rebuild_s) for stage in costs.stages)
        durations = [t for stage in costs.stages for t in (stage.forward_s, stage.rebuild_s)]
        parts = [option.recompute_s for stage in costs.stages for option in stage.options]
        total_s = runs * longest_s + sum(parts)
        self.ticks = Ticks.of([*durations, *parts], total_s=total_s)

    def minimize_seconds(self) -> None:
        """Set the objective: least seconds of forwards and rebuilds; each backward runs once."""
        count = self.ticks.count
        forwards = sum(
            count(stage.forward_s) * (run.forward[i] - run.rebuild[i])
            + count(stage.rebuild_s) * run.rebuild[i]
            for run in self.runs
            for i, stage in enumerate(self.problem.costs.stages)
        )
        parts = sum(
            count(option.recompute_s) * self._rebuilds(run, i, o)
            for run in self.runs
            for i, stage in enumerate(self.problem.costs.stages)
            for o, option in enumerate(stage.options, start=1)
        )
        self.cp.minimize(forwards + parts)

    def _rebuilds(self, run: RunVariables, stage: int, option: int) -> IntVar:
        """Return a variable that is 1 if ``run`` ends with this backward after ``option``."""
        rebuilds = self.cp.new_bool_var("")
        self.cp.add_bool_or(~run.back[stage], ~run.held_after[stage][option], rebuilds)
        return rebuilds

    def bound_s(self, search: CpSolver) -> float:
        """Return the lower bound in seconds that a search found for the time of any schedule."""
        durations = (len(self.runs) + 1) * len(self.problem.chain)
        bound_s = self.ticks.at_least(search.best_objective_bound, durations=durations)
        return bound_s + sum(stage.backward_s for stage in self.problem.costs.stages)

    def solution(self, search: CpSolver) -> Solved:
        """Return the best schedule that a search found."""
        ops: list[Compute] = []
        for run in self.runs:
            ops += _ops_of(search, run)
        return Solved(Schedule(tuple(ops)), seconds_of(self.problem.costs.stages, ops))


def _ops_of(search: CpSolver, run: RunVariables) -> list[Compute]:
    ops: list[Compute] = []
    for i in range(len(run.forward)):
        for keep, how in (
            (Keep.NONE, run.none),
            (Keep.INPUT, run.ck),
            (Keep.ALL, run.rebuild),
        ):
            if search.boolean_value(how[i]):
                ops.append(Forward(i, keep))
        for option, chosen in enumerate(run.option[i]):
            if search.boolean_value(chosen):
                ops.append(Forward(i, Keep.ALL, option))
    return ops + [Backward(i) for i, back in enumerate(run.back) if search.boolean_value(back)]
