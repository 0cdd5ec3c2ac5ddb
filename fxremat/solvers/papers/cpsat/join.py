"""Optimal memory-persistent schedules of small joins by CP-SAT.

A sequence of operations is a number of steps. Each step runs one operation (``F_none``, ``F_ck``,
``F_all``, ``B``, or ``F_all`` and ``B`` as a rebuild) of one stage, or is idle at the end. The
operations determine what is held between steps, boundary by boundary and line by line (a line is a
branch or the trunk). The search covers all memory-persistent schedules. Operations of several
branches may alternate in any way, so the optimum may be below that of the canonical schedules of
the solver ``join``. The search starts from that solver's schedule.

``default_steps`` suffice where every run of forwards ends in a backward or in the trunk.

It is exact in bytes, and exact in seconds under the conditions in ``scale``. Complexity:
exponential in the worst case; meant for two branches of two or three stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fxremat.ir import (
    Backward,
    Compute,
    Forward,
    Join,
    JoinProblem,
    Keep,
    Schedule,
    Solution,
    Solved,
    TimedOut,
)
from fxremat.solvers.join import general
from fxremat.solvers.papers.cpsat.join_steps import JoinSteps, StepVariables
from fxremat.solvers.papers.cpsat.scale import Ticks
from fxremat.solvers.papers.cpsat.search import fastest, least_budget, new_search
from fxremat.solvers.sequences import seconds_of

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpSolver, IntVar


def default_steps(join: Join) -> int:
    """Return the default maximum number of steps of a schedule, each of which is one operation.

    It is ``n (n + 1) / 2 + n T`` per branch of ``n`` stages, plus ``T (T + 3) / 2 + 1``, for ``T``
    trunk stages.
    """
    trunk_stages = len(join.trunk)
    trunk = trunk_stages * (trunk_stages + 1) // 2 + trunk_stages + 1
    return trunk + sum(n * (n + 1) // 2 + n * trunk_stages for n in map(len, join.branches))


def solve(
    problem: JoinProblem,
    *,
    steps: int | None = None,
    time_limit_s: float = 60.0,
    workers: int = 1,
) -> Solution:
    """Find the fastest memory-persistent schedule within the budget by CP-SAT, with proof.

    ``rotor`` defines memory-persistent. A step of a schedule is one operation of one stage.

    Args:
        problem: the join, its costs and the budget.
        steps: maximum number of steps of a schedule; ``None``: ``default_steps``.
        time_limit_s: seconds for each of two searches, for time and for the least budget.
        workers: number of CP-SAT's threads.

    Returns:
        ``Solved``; ``Infeasible`` with the exact least budget; or ``TimedOut`` with the best
        schedule so far (never worse than the canonical one) and a lower bound in seconds. The bound
        is infinite if only the search for the least budget timed out.

    Raises:
        ValueError: a storage is in two boundaries of a line, or the sizes are too large to add up.
    """
    _check_sharing(problem.join)
    count = default_steps(problem.join) if steps is None else steps
    canonical = general.solve(problem)
    incumbent = canonical if isinstance(canonical, Solved) else None
    search = new_search(time_limit_s=time_limit_s, workers=workers)
    model = _Model(problem, count)
    model.minimize_seconds()
    if incumbent is not None:
        model.hint(incumbent.schedule.computations)
    solution = fastest(search, model, incumbent)
    if solution is not None:
        return solution
    if incumbent is not None:  # ``steps`` is too low for any schedule
        return TimedOut(incumbent, 0.0)
    model = _Model(problem, count, any_budget=True)
    return least_budget(search, model.cp, model.budget, model.unit_bytes)


def _check_sharing(join: Join) -> None:
    for line, chain in enumerate(join.lines):
        earlier: set[int] = set()
        for boundary in chain.boundaries:
            for storage in boundary:
                if storage in earlier:
                    raise ValueError(f"storage {storage} lies in two boundaries of line {line}")
                earlier.add(storage)


class _Model(JoinSteps):
    """CP-SAT model of the schedules of a join, with their time as objective."""

    def minimize_seconds(self) -> None:
        """Set the objective: least seconds of forwards and rebuilds; each backward runs once."""
        longest_s = sum(max(stage.forward_s, stage.rebuild_s) for stage in self.costs)
        durations = [t for stage in self.costs for t in (stage.forward_s, stage.rebuild_s)]
        self.ticks = Ticks.of(durations, total_s=len(self.steps) * longest_s)
        self.cp.minimize(
            sum(
                self.ticks.count(stage.forward_s) * (step.none[i] + step.ck[i] + step.all[i])
                + self.ticks.count(stage.rebuild_s) * step.rebuild[i]
                for step in self.steps
                for i, stage in enumerate(self.costs)
            )
        )

    def bound_s(self, search: CpSolver) -> float:
        """Return the lower bound in seconds that a search found for the time of any schedule."""
        bound_s = self.ticks.at_least(search.best_objective_bound, durations=len(self.steps))
        return bound_s + sum(stage.backward_s for stage in self.costs)

    def hint(self, ops: tuple[Compute, ...]) -> None:
        """Give the schedule ``ops`` to the search as its start."""
        ran: set[int] = set()
        index = 0
        for step in self.steps:
            chosen: tuple[Compute, ...] = ()
            if index < len(ops):
                op = ops[index]
                pair = ops[index : index + 2]
                again = isinstance(op, Forward) and op.keep is Keep.ALL and op.stage in ran
                chosen = pair if again and pair[1:] == (Backward(op.stage),) else (op,)
                ran.add(op.stage)
                index += len(chosen)
            for way, variable in _ways(step):
                self.cp.add_hint(variable, way == chosen)

    def solution(self, search: CpSolver) -> Solved:
        """Return the best schedule that a search found."""
        ways = (pair for step in self.steps for pair in _ways(step))
        ops = [op for way, variable in ways if search.boolean_value(variable) for op in way]
        return Solved(Schedule(tuple(ops)), seconds_of(self.costs, ops))


def _ways(step: StepVariables) -> Iterator[tuple[tuple[Compute, ...], IntVar]]:
    """Yield the operations that a step may run, each with the variable that is 1 if it does.

    A rebuild is two operations.
    """
    for i in range(len(step.none)):
        forward, back = {keep: Forward(i, keep) for keep in Keep}, Backward(i)
        yield (forward[Keep.NONE],), step.none[i]
        yield (forward[Keep.INPUT],), step.ck[i]
        yield (forward[Keep.ALL],), step.all[i]
        yield (forward[Keep.ALL], back), step.rebuild[i]
        yield (back,), step.back[i]
