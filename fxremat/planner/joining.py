"""Candidate schedules of a step whose forward is a join of branches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import takewhile

from fxremat.costs.cost import Progress
from fxremat.ir import (
    Backward,
    Forward,
    Join,
    JoinCosts,
    JoinProblem,
    Schedule,
    Solved,
)
from fxremat.ir.coded import Codes, coded
from fxremat.passes.emit.program import keep_all
from fxremat.passes.stages.firsts import any_order
from fxremat.passes.stages.linearize import Line
from fxremat.planner.generators import Setting, ceilings
from fxremat.planner.join import Branching, branchings_of, build_join, build_join_costs
from fxremat.simulate import simulate as simulate_chain
from fxremat.simulate.join import simulate

LEAST_SLOTS, MOST_SLOTS = 200, 2000
"""Slots of each table of the join."""

MOST_CHOICES = 800_000_000
"""Looked at to fill a table unless told otherwise: a second or so."""

TABLE_BYTES = 1 << 28
"""Of each table, at most."""

CHAIN_SLOTS = 500
"""Slots of each table of the equivalent chain."""


def join_schedules(
    setting: Setting, progress: Progress, *, most_choices: int = MOST_CHOICES
) -> Iterator[Codes]:
    """Schedules of the join solver, for budgets from the least to all that can be used.

    Stages have the numbers that they have on the line. Nothing where the line is no join.

    Args:
        setting: what schedules are asked for.
        progress: told of each table.
        most_choices: looked at to fill a table; where that is too few for the stages as they
            are, neighbours are merged.
    """
    # Loading numba takes longer than all else in the package: not at import.
    from fxremat.solvers.join.coarse import with_turn  # noqa: PLC0415

    line = setting.line
    for branching in branchings_of(line):
        join, costs = _join_of(setting, branching)
        found = _solve_join(join, costs, progress, most_choices)
        yield from _in_orders(line, map(branching.on_line, found))
        if len(join.trunk) > 1 and branching.ends[-1] == line.branch_ends[-1]:
            turn = with_turn(join, costs, extra_bytes=_turn_bytes(setting))
            found = map(turn.refine, _solve_join(turn.join, turn.costs, progress, most_choices))
            yield from _in_orders(line, map(branching.on_line, found))


def equivalent_schedules(setting: Setting, progress: Progress) -> Iterator[Codes]:
    """Those of the chain whose stages are the branches' stages as far from the trunk.

    Nothing where the line is no join.
    """
    line = setting.line
    for branching in branchings_of(line):
        join, costs = _join_of(setting, branching)
        found = _solve_equivalent(join, costs, progress)
        yield from _in_orders(line, map(branching.on_line, found))


def _join_of(setting: Setting, branching: Branching) -> tuple[Join, JoinCosts]:
    costs = build_join_costs(setting.costs, setting.line, branching, setting.surroundings)
    return build_join(setting.chain, branching), costs


def _turn_bytes(setting: Setting) -> int:
    """Peak of the trunk, forward and back, beyond what is held before, with everything kept."""
    start, kept = setting.line.branch_ends[-1], setting.kept
    held_bytes, peaks = setting.surroundings.given_bytes, [kept.turn_bytes]
    for op, peak, held in zip(kept.ops, kept.peaks_bytes, kept.held_bytes, strict=True):
        if op.stage >= start:
            peaks.append(peak)
        elif isinstance(op, Forward):
            held_bytes = held
    return max(peaks) - held_bytes


def _solve_join(
    join: Join, costs: JoinCosts, progress: Progress, most_choices: int
) -> Iterator[Schedule]:
    from fxremat.solvers.join import JoinPlans, least_budget  # noqa: PLC0415
    from fxremat.solvers.join.coarse import coarsen  # noqa: PLC0415

    coarse = coarsen(join, costs, most_work=most_choices // LEAST_SLOTS)
    slots = _slots(coarse.join, most_choices)
    least_bytes, least = least_budget(coarse.join, coarse.costs)
    yield coarse.refine(least)
    full_bytes = simulate(join, costs, keep_all(len(join))).peak_bytes
    for done, ceiling in enumerate(ceilings(full_bytes, least_bytes, costs.fixed_bytes)):
        progress("solving the join", done, done + 1)
        plans = JoinPlans.build(coarse.join, coarse.costs, max_budget_bytes=ceiling, slots=slots)
        for budget_bytes in plans.distinct_budgets():
            solution = plans.schedule(budget_bytes)
            if isinstance(solution, Solved):
                yield coarse.refine(solution.schedule)


def _slots(join: Join, most_choices: int) -> int:
    """As many as the table has room and time for."""
    from fxremat.solvers.join.coarse import states_of, work_of  # noqa: PLC0415

    lengths = [len(line) for line in join.lines]
    room = TABLE_BYTES // (8 * states_of(lengths))
    return max(min(room, most_choices // work_of(lengths), MOST_SLOTS), min(LEAST_SLOTS, room), 1)


def _solve_equivalent(join: Join, costs: JoinCosts, progress: Progress) -> Iterator[Schedule]:
    from fxremat.solvers.join.equiv import as_join_schedule, equivalent_chain  # noqa: PLC0415
    from fxremat.solvers.rotor import RotorTable, least_budget  # noqa: PLC0415

    problem = JoinProblem(join, costs, 0)
    level = equivalent_chain(problem)
    least_bytes, least = least_budget(level.chain, level.costs)
    yield as_join_schedule(problem, least)
    full = keep_all(len(level.chain))
    full_bytes = simulate_chain(level.chain, level.costs, full).peak_bytes
    for done, ceiling in enumerate(ceilings(full_bytes, least_bytes, costs.fixed_bytes)):
        progress("solving the equivalent chain", done, done + 1)
        table = RotorTable.build(
            level.chain, level.costs, max_budget_bytes=ceiling, slots=CHAIN_SLOTS
        )
        for budget_bytes in table.distinct_budgets():
            solution = table.schedule(budget_bytes)
            if isinstance(solution, Solved):
                yield as_join_schedule(problem, solution.schedule)


def _in_orders(line: Line, schedules: Iterable[Schedule]) -> Iterator[Codes]:
    """Each with branches run forward in the order of the graph, and as it is where allowed.

    Branches are independent of each other, so until the backward begins their forwards may be
    put in any order that keeps each branch's. What is held at the turn is the same.
    """
    free = any_order(line)
    for schedule in schedules:
        yield coded(in_graph_order(line, schedule))
        if free:
            yield coded(schedule)


def in_graph_order(line: Line, schedule: Schedule) -> Schedule:
    """``schedule`` with the segments run forward one after the other, as the line has them."""
    ops = schedule.computations
    before = list(takewhile(lambda op: not isinstance(op, Backward), ops))
    before.sort(key=lambda op: line.segments.at(op.stage))
    return Schedule((*before, *ops[len(before) :]))
