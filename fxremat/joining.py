"""Candidate schedules of a step whose forward is a join of branches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, takewhile

from fxremat.ir import (
    Backward,
    Chain,
    Compute,
    Forward,
    Join,
    JoinCosts,
    JoinProblem,
    Schedule,
    Solved,
)
from fxremat.passes.branches import TRUNK, branch_at
from fxremat.passes.candidate import Sweeps
from fxremat.passes.cost import Progress
from fxremat.passes.firsts import any_order
from fxremat.passes.join import build_join, build_join_costs
from fxremat.passes.linearize import Line
from fxremat.passes.program import keep_all
from fxremat.simulate import simulate as simulate_chain
from fxremat.simulate.join import simulate

LEAST_SLOTS, MOST_SLOTS = 200, 2000
"""Slots of each table of the join."""

MOST_CHOICES = 800_000_000
"""Looked at to fill a table: a second or so."""

TABLE_BYTES = 1 << 28
"""Of each table, at most."""

CHAIN_SLOTS = 500
"""Slots of each table of the equivalent chain."""


def join_schedules(sweeps: Sweeps, stages: Chain, progress: Progress) -> Iterator[Schedule]:
    """Schedules of the join solver, for budgets from the least to all that can be used.

    Stages have the numbers that they have on the line. Nothing where the line is no join.
    """
    # Loading numba takes longer than all else in the package: not at import.
    from fxremat.solvers.join.coarse import with_turn  # noqa: PLC0415

    line = sweeps.line
    if line.branch_ends:
        join, costs = _join_of(sweeps, stages)
        found = [_solve_join(join, costs, progress)]
        if len(join.trunk) > 1:
            turn = with_turn(join, costs, extra_bytes=_turn_bytes(sweeps))
            found.append(map(turn.refine, _solve_join(turn.join, turn.costs, progress)))
        yield from _in_orders(line, chain.from_iterable(found))


def equivalent_schedules(sweeps: Sweeps, stages: Chain, progress: Progress) -> Iterator[Schedule]:
    """Those of the chain whose stages are the branches' stages as far from the trunk.

    Nothing where the line is no join.
    """
    line = sweeps.line
    if line.branch_ends:
        join, costs = _join_of(sweeps, stages)
        yield from _in_orders(line, _solve_equivalent(join, costs, progress))


def _join_of(sweeps: Sweeps, stages: Chain) -> tuple[Join, JoinCosts]:
    join_costs = build_join_costs(sweeps.costs, sweeps.line, sweeps.surroundings)
    return build_join(stages, sweeps.line), join_costs


def _turn_bytes(sweeps: Sweeps) -> int:
    """Peak of the trunk, forward and back, beyond what is held before, with everything kept."""
    start = sweeps.line.branch_ends[-1]
    kept = sweeps.candidate(keep_all(len(sweeps.line.stages)))
    held_bytes, peaks = sweeps.surroundings.given_bytes, [kept.sweep.turn_bytes]
    for call, peak, held in zip(
        kept.program.calls, kept.sweep.peaks_bytes, kept.sweep.held_bytes, strict=True
    ):
        if call.op.stage >= start:
            peaks.append(peak)
        elif isinstance(call.op, Forward):
            held_bytes = held
    return max(peaks) - held_bytes


def _solve_join(join: Join, costs: JoinCosts, progress: Progress) -> Iterator[Schedule]:
    from fxremat.solvers.join import JoinPlans, least_budget  # noqa: PLC0415
    from fxremat.solvers.join.coarse import coarsen  # noqa: PLC0415

    coarse = coarsen(join, costs, most_work=MOST_CHOICES // LEAST_SLOTS)
    slots = _slots(coarse.join)
    least_bytes, least = least_budget(coarse.join, coarse.costs)
    yield coarse.refine(least)
    full_bytes = simulate(join, costs, keep_all(len(join))).peak_bytes
    for done, ceiling in enumerate(_ceilings(full_bytes, least_bytes, costs.fixed_bytes)):
        progress("solving the join", done, done + 1)
        plans = JoinPlans.build(coarse.join, coarse.costs, max_budget_bytes=ceiling, slots=slots)
        for budget_bytes in plans.distinct_budgets():
            solution = plans.schedule(budget_bytes)
            if isinstance(solution, Solved):
                yield coarse.refine(solution.schedule)


def _slots(join: Join) -> int:
    """As many as the table has room and time for."""
    from fxremat.solvers.join.coarse import states_of, work_of  # noqa: PLC0415

    lengths = [len(line) for line in join.lines]
    room = TABLE_BYTES // (8 * states_of(lengths))
    return max(min(room, MOST_CHOICES // work_of(lengths), MOST_SLOTS), min(LEAST_SLOTS, room), 1)


def _solve_equivalent(join: Join, costs: JoinCosts, progress: Progress) -> Iterator[Schedule]:
    from fxremat.solvers.join.equiv import as_join_schedule, equivalent_chain  # noqa: PLC0415
    from fxremat.solvers.rotor import RotorTable, least_budget  # noqa: PLC0415

    problem = JoinProblem(join, costs, 0)
    level = equivalent_chain(problem)
    least_bytes, least = least_budget(level.chain, level.costs)
    yield as_join_schedule(problem, least)
    full = keep_all(len(level.chain))
    full_bytes = simulate_chain(level.chain, level.costs, full).peak_bytes
    for done, ceiling in enumerate(_ceilings(full_bytes, least_bytes, costs.fixed_bytes)):
        progress("solving the equivalent chain", done, done + 1)
        table = RotorTable.build(
            level.chain, level.costs, max_budget_bytes=ceiling, slots=CHAIN_SLOTS
        )
        for budget_bytes in table.distinct_budgets():
            solution = table.schedule(budget_bytes)
            if isinstance(solution, Solved):
                yield as_join_schedule(problem, solution.schedule)


def _ceilings(full_bytes: int, least_bytes: int, floor_bytes: int) -> Iterator[int]:
    """Ever lower budgets, so that rounding stays small relative to each."""
    ceiling = full_bytes
    while ceiling > least_bytes:
        yield ceiling
        ceiling = floor_bytes + (ceiling - floor_bytes) // 4


def _in_orders(line: Line, schedules: Iterator[Schedule]) -> Iterator[Schedule]:
    """Each with branches run forward in the order of the graph, and as it is where allowed.

    Until the trunk runs, branches are independent of each other, so their forwards may be put
    in any order that keeps each branch's. What is held at the trunk is the same.
    """
    free = any_order(line)
    for schedule in schedules:
        yield _in_graph_order(line, schedule)
        if free:
            yield schedule


def _in_graph_order(line: Line, schedule: Schedule) -> Schedule:
    ends = line.branch_ends

    def is_before_trunk(op: Compute) -> bool:
        return not isinstance(op, Backward) and branch_at(ends, op.stage) != TRUNK

    ops = schedule.computations
    before = list(takewhile(is_before_trunk, ops))
    before.sort(key=lambda op: branch_at(ends, op.stage))
    return Schedule((*before, *ops[len(before) :]))
