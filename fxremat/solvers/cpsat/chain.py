"""Schedules of small chains by CP-SAT, memory-persistent or not.

A sequence of operations is cut into *runs*: forwards of consecutive stages ``s, s + 1, …``,
each reading what the one before wrote, and then at most one backward. Every run and stage
has four variables (``F_none``, ``F_ck``, ``F_all``, or ``F_all`` and ``B`` as a rebuild);
what is held between runs follows. Memory is bounded at every forward and backward, storage
by storage: one that several values share counts once.

What is searched are the sequences in which no forward writes a boundary that is held
(``persistent``: those that are, see ``rotor``), in at most a given number of runs. For
memory-persistent schedules ``L + 1`` runs are enough: each ends in a backward, except that the
last stage may run once before its rebuild. For others no such bound is known: ``more_runs`` says
how many runs without a backward there may be, and the optimum is that of such schedules.

Where storages lie in several boundaries, a schedule that is not persistent can hold a
storage twice, written in two runs. What is held is then told apart by the run that wrote it.

Exact in bytes; exact in seconds under the conditions in ``scale``. Exponential in the worst
case: meant for chains of up to about eight stages.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fxremat.ir import (
    Backward,
    Compute,
    Forward,
    Infeasible,
    Keep,
    Problem,
    Schedule,
    Solution,
    Solved,
    TimedOut,
)
from fxremat.solvers import rotor
from fxremat.solvers.cpsat.held import add_memory, all_bytes
from fxremat.solvers.cpsat.runs import Run, add_hint, add_runs
from fxremat.solvers.cpsat.scale import MOST_PRESOLVED, Ticks, byte_unit
from fxremat.solvers.sequences import seconds_of

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, CpSolver, IntVar


def solve(
    problem: Problem,
    *,
    persistent: bool = True,
    more_runs: int | None = None,
    time_limit_s: float = 60.0,
    workers: int = 1,
) -> Solution:
    """The fastest schedule within the budget, proved by CP-SAT.

    Args:
        problem: the chain, its costs and the budget; a link is not used.
        persistent: memory-persistent schedules only.
        more_runs: of a schedule that is not persistent, runs without a backward; ``None``:
            as many as there are stages.
        time_limit_s: of each search, that for time and that for the least budget.
        workers: threads of CP-SAT.

    Returns:
        ``Solved``; ``Infeasible`` with the exact least budget; or ``TimedOut`` with the best
        schedule so far (never slower than rotor's, if that has few enough runs) and a bound,
        infinite if only the least budget was not found.

    Raises:
        ValueError: the sizes are too large to add up.
    """
    from ortools.sat.python import cp_model  # noqa: PLC0415  (half a second, for few)

    count = len(problem.chain)
    runs = count + (1 if persistent else count if more_runs is None else more_runs)
    search = cp_model.CpSolver()
    search.parameters.max_time_in_seconds = time_limit_s
    search.parameters.num_workers = workers

    built = _Built(cp_model.CpModel(), problem, runs, persistent)
    search.parameters.cp_model_presolve = built.most_coefficients <= MOST_PRESOLVED
    built.minimize_seconds()
    best = _hinted(built, problem)
    status = search.solve(built.model)
    if status == cp_model.OPTIMAL:
        return built.found(search)
    if status != cp_model.INFEASIBLE:
        if status == cp_model.FEASIBLE:
            found = built.found(search)
            best = found if best is None or found.makespan_s < best.makespan_s else best
        bound_s = built.bound_s(search)
        return TimedOut(best, bound_s if best is None else min(bound_s, best.makespan_s))
    built = _Built(cp_model.CpModel(), problem, runs, persistent, any_budget=True)
    built.model.minimize(built.budget)
    if search.solve(built.model) != cp_model.OPTIMAL:
        return TimedOut(None, math.inf)
    return Infeasible(round(search.value(built.budget)) * built.unit_bytes)


def _hinted(built: _Built, problem: Problem) -> Solved | None:
    """Rotor's schedule, where the search starts; ``None`` if it has more runs, or does not fit.

    It is memory-persistent, and so one of those that are searched.
    """
    found = rotor.solve(problem)
    if isinstance(found, Solved) and add_hint(built.model, built.runs, found.schedule.computations):
        return found
    return None


class _Built:
    """The model of a problem."""

    def __init__(
        self,
        model: CpModel,
        problem: Problem,
        runs: int,
        persistent: bool,
        any_budget: bool = False,
    ) -> None:
        chain, costs = problem.chain, problem.costs
        sizes = list(all_bytes(chain, costs))
        self.model = model
        self.problem = problem
        self.unit_bytes = byte_unit(sizes)
        # Keeping everything needs no more than all sizes together.
        most = sum(sizes) // self.unit_bytes
        self.most_coefficients = 2 * most * runs  # instances of storages, gradients twice
        least = 0 if any_budget else min(most, problem.budget_bytes // self.unit_bytes)
        self.budget = model.new_int_var(least, most if any_budget else least, "budget")
        ways = [len(stage.options) + 1 for stage in costs.stages]
        self.runs = add_runs(model, ways, runs, persistent=persistent)
        add_memory(
            model,
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
        """Backwards are left out, but for what they rebuild: each runs once."""
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
        self.model.minimize(forwards + parts)

    def _rebuilds(self, run: Run, stage: int, option: int) -> IntVar:
        """At least 1 if the backward of ``stage`` is in ``run``, after that option."""
        found = self.model.new_bool_var("")
        self.model.add_bool_or(~run.back[stage], ~run.held_after[stage][option], found)
        return found

    def bound_s(self, search: CpSolver) -> float:
        """Below any schedule, durations as they were given."""
        bound = search.best_objective_bound
        if not self.ticks.exact:
            bound -= (len(self.runs) + 1) * len(self.problem.chain) / 2
        backward_s = sum(stage.backward_s for stage in self.problem.costs.stages)
        return max(0.0, self.ticks.seconds(bound)) + backward_s

    def found(self, search: CpSolver) -> Solved:
        """The schedule that the search ended with."""
        ops: list[Compute] = []
        for run in self.runs:
            ops += _ops(search, run)
        return Solved(Schedule(tuple(ops)), seconds_of(self.problem.costs.stages, ops))


def _ops(search: CpSolver, run: Run) -> list[Compute]:
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
