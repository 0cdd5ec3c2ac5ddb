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
from fxremat.solvers.cpsat.join_steps import JoinSteps, StepVariables
from fxremat.solvers.cpsat.scale import Ticks
from fxremat.solvers.cpsat.search import fastest, least_budget, new_search
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
    _check_sharing(problem.join)
    count = default_steps(problem.join) if steps is None else steps
    canonical = general.solve(problem)
    known = canonical if isinstance(canonical, Solved) else None
    search = new_search(time_limit_s=time_limit_s, workers=workers)
    model = _Model(problem, count)
    model.minimize_seconds()
    if known is not None:
        model.hint(known.schedule.computations)
    found = fastest(search, model, known)
    if found is not None:
        return found
    if known is not None:  # too few steps were allowed
        return TimedOut(known, 0.0)
    model = _Model(problem, count, any_budget=True)
    return least_budget(search, model.cp, model.budget, model.unit_bytes)


def _check_sharing(join: Join) -> None:
    for line, chain in enumerate(join.lines):
        seen: set[int] = set()
        for boundary in chain.boundaries:
            for storage in boundary:
                if storage in seen:
                    raise ValueError(f"storage {storage} lies in two boundaries of line {line}")
                seen.add(storage)


class _Model(JoinSteps):
    """The steps as operations, and their time."""

    def minimize_seconds(self) -> None:
        """Backwards are left out: each runs once."""
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
        """Below any schedule, durations as they were given."""
        bound_s = self.ticks.at_least(search.best_objective_bound, durations=len(self.steps))
        return bound_s + sum(stage.backward_s for stage in self.costs)

    def hint(self, ops: tuple[Compute, ...]) -> None:
        """Let the search start from a schedule."""
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

    def found(self, search: CpSolver) -> Solved:
        """The schedule that a search ended with."""
        ways = (pair for step in self.steps for pair in _ways(step))
        ops = [op for way, variable in ways if search.boolean_value(variable) for op in way]
        return Solved(Schedule(tuple(ops)), seconds_of(self.costs, ops))


def _ways(step: StepVariables) -> Iterator[tuple[tuple[Compute, ...], IntVar]]:
    """What a step may be, and whether it is."""
    for i in range(len(step.none)):
        forward, back = {keep: Forward(i, keep) for keep in Keep}, Backward(i)
        yield (forward[Keep.NONE],), step.none[i]
        yield (forward[Keep.INPUT],), step.ck[i]
        yield (forward[Keep.ALL],), step.all[i]
        yield (forward[Keep.ALL], back), step.rebuild[i]
        yield (back,), step.back[i]
