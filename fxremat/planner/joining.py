"""Candidate schedules of a step whose forward is a join of branches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from fxremat.ir import (
    Compute,
    Forward,
    Join,
    JoinCosts,
    JoinProblem,
    Schedule,
)
from fxremat.ir.schedule import BACKWARD, KINDS, Codes, coded, decoded
from fxremat.passes.stages.linearize import Line
from fxremat.passes.stages.order import any_order
from fxremat.planner.generators import Setting, ceilings
from fxremat.planner.join import Branching, branchings_of, build_join, build_join_costs

LEAST_SLOTS, MOST_SLOTS = 200, 2000
"""Slots of each table of the join."""

MOST_CHOICES = 800_000_000
"""Looked at to fill a table unless told otherwise: a second or so."""

TABLE_BYTES = 1 << 28
"""Of each table, at most."""

CHAIN_SLOTS = 500
"""Slots of each table of the equivalent chain."""


def join_schedules(setting: Setting, *, most_choices: int = MOST_CHOICES) -> Iterator[Codes]:
    """Schedules of the join solver, for budgets from the least to all that can be used.

    Stages have the numbers that they have on the line. Nothing where the line is no join.

    Args:
        setting: what schedules are asked for.
        most_choices: looked at to fill a table; where that is too few for the stages as they
            are, neighbours are merged.
    """
    line = setting.line
    for branching in branchings_of(line):
        # Loading numba takes longer than all else in the package: not at import.
        from fxremat.solvers.join.coarse import with_turn  # noqa: PLC0415

        join, costs = _join_of(setting, branching)
        yield from _in_orders(line, _solve_join(join, costs, branching, most_choices))
        if len(join.trunk) > 1 and branching.ends[-1] == line.branch_ends[-1]:
            turn = with_turn(join, costs, extra_bytes=_turn_bytes(setting))
            found = _solve_join(turn.join, turn.costs, branching, most_choices, refine=turn.refine)
            yield from _in_orders(line, found)


def equivalent_schedules(setting: Setting) -> Iterator[Codes]:
    """Those of the chain whose stages are the branches' stages as far from the trunk.

    Nothing where the line is no join.
    """
    line = setting.line
    for branching in branchings_of(line):
        join, costs = _join_of(setting, branching)
        coder = _Coder(branching.on_line)
        yield from _in_orders(line, map(coder.codes, _solve_equivalent(join, costs)))


def _join_of(setting: Setting, branching: Branching) -> tuple[Join, JoinCosts]:
    costs = build_join_costs(setting.costs, setting.line, branching, setting.context_bytes)
    return build_join(setting.chain, branching), costs


def _turn_bytes(setting: Setting) -> int:
    """Peak of the trunk, forward and back, beyond what is held before, with everything kept."""
    start, kept = setting.line.branch_ends[-1], setting.kept
    held_bytes, peaks = setting.context_bytes.given_bytes, [kept.turn_bytes]
    for op, peak, held in zip(kept.ops, kept.peaks_bytes, kept.held_bytes, strict=True):
        if op.stage >= start:
            peaks.append(peak)
        elif isinstance(op, Forward):
            held_bytes = held
    return max(peaks) - held_bytes


@dataclass(frozen=True, slots=True)
class _Coder:
    """Codes of schedules of which each operation alone is known to be some of the line's."""

    on_line: Callable[[Schedule], Schedule]
    known: dict[Compute, list[int]] = field(default_factory=dict)

    def codes(self, ops: Iterable[Compute]) -> Codes:
        """Of the whole schedule."""
        codes: list[int] = []
        for op in ops:
            own = self.known.get(op)
            if own is None:
                own = self.known[op] = coded(self.on_line(Schedule((op,)))).tolist()
            codes += own
        return np.array(codes, dtype=np.int64)


def _solve_join(
    join: Join,
    costs: JoinCosts,
    branching: Branching,
    most_choices: int,
    *,
    refine: Callable[[Schedule], Schedule] = lambda schedule: schedule,
) -> Iterator[Codes]:
    """Schedules of ``join`` as those of the line; ``refine`` gives one of the branching's join."""
    from fxremat.solvers.join import JoinPlans, least_budget  # noqa: PLC0415
    from fxremat.solvers.join.coarse import coarsen  # noqa: PLC0415
    from fxremat.solvers.join.numbers import kept_bytes  # noqa: PLC0415

    coarse = coarsen(join, costs, most_work=most_choices // LEAST_SLOTS)
    slots = _slots(coarse.join, most_choices)
    coder = _Coder(lambda schedule: branching.on_line(refine(coarse.refine(schedule))))
    least_bytes, least = least_budget(coarse.join, coarse.costs)
    yield coder.codes(least.computations)
    full_bytes = kept_bytes(join, costs)
    for ceiling in ceilings(full_bytes, least_bytes, costs.fixed_bytes):
        plans = JoinPlans.build(coarse.join, coarse.costs, max_budget_bytes=ceiling, slots=slots)
        for budget_bytes in plans.distinct_budgets():
            yield coder.codes(plans.operations(budget_bytes))


def _slots(join: Join, most_choices: int) -> int:
    """As many as the table has room and time for."""
    from fxremat.solvers.join.coarse import work_of  # noqa: PLC0415
    from fxremat.solvers.join.numbers import state_count  # noqa: PLC0415

    lengths = [len(line) for line in join.lines]
    room = TABLE_BYTES // (8 * state_count(lengths))
    return max(min(room, most_choices // work_of(lengths), MOST_SLOTS), min(LEAST_SLOTS, room), 1)


def _solve_equivalent(join: Join, costs: JoinCosts) -> Iterator[Sequence[Compute]]:
    from fxremat.solvers import store_all  # noqa: PLC0415
    from fxremat.solvers.join.equiv import as_join_schedule, equivalent_chain  # noqa: PLC0415
    from fxremat.solvers.rotor import RotorTable, least_budget  # noqa: PLC0415

    problem = JoinProblem(join, costs, 0)
    level = equivalent_chain(problem)
    least_bytes, least = least_budget(level.chain, level.costs)
    yield as_join_schedule(problem, least).computations
    full_bytes = store_all.peak_bytes(level.chain, level.costs)
    for ceiling in ceilings(full_bytes, least_bytes, costs.fixed_bytes):
        table = RotorTable.build(
            level.chain, level.costs, max_budget_bytes=ceiling, slots=CHAIN_SLOTS
        )
        for budget_bytes in table.distinct_budgets():
            schedule = decoded(table.codes(budget_bytes))
            yield as_join_schedule(problem, schedule).computations


def _in_orders(line: Line, schedules: Iterable[Codes]) -> Iterator[Codes]:
    """Each with branches run forward in the order of the graph, and as it is where allowed.

    Branches are independent of each other, so until the backward begins their forwards may be
    put in any order that keeps each branch's. What is held at the turn is the same.
    """
    free = any_order(line)
    segment = np.array([line.segments.at(stage) for stage in range(len(line.stages))])
    for codes in schedules:
        yield in_graph_order(segment, codes)
        if free:
            yield codes


def in_graph_order(segment: Codes, codes: Codes) -> Codes:
    """A schedule with the segments run forward one after the other, as the line has them.

    Args:
        segment: of each stage.
        codes: the schedule.
    """
    turn = int(np.argmax(codes % KINDS == BACKWARD))
    order = np.argsort(segment[codes[:turn] // KINDS], kind="stable")
    return np.concatenate([codes[:turn][order], codes[turn:]])
