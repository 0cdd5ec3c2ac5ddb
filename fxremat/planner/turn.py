"""Schedules that keep over the turn what the last stage keeps.

Where the loss is outside, the turn is a stage of its own, and what is held then is for the
solver to choose. Most often it is all that the last stage keeps, which takes no time to get
back. A line whose last stage meets the turn itself has these schedules and no others: each
budget's best among them are candidates beside the best of all, for the sake of local search,
which may get further from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps

from fxremat.costs.cost import Progress
from fxremat.costs.options import Options
from fxremat.ir import Backward, Chain, Costs, Forward, Keep, Schedule, StageCosts
from fxremat.planner.candidate import Sweeps
from fxremat.planner.sweep import Surroundings

Planner = Callable[[Sweeps, Chain, Progress], Iterator[Schedule]]
"""Gives schedules for budgets from the least to all that can be used."""


def kept_over_turn(planner: Planner) -> Planner:
    """``planner`` for the line whose last stage with operations meets the turn.

    It gives schedules of the whole line, and none where ``planner`` finds these itself: the
    line has no turn of its own, or its last backward needs as much as the turn in any case.
    """

    @wraps(planner)
    def schedules(sweeps: Sweeps, chain: Chain, progress: Progress) -> Iterator[Schedule]:
        if not _turn_counts(sweeps):
            return
        for schedule in planner(_merged_sweeps(sweeps), _without_last(chain), progress):
            yield _with_turn(schedule, turn=len(chain) - 1)

    return schedules


def _turn_counts(sweeps: Sweeps) -> bool:
    """Whether the turn is a stage beside others, and may need more than the last backward."""
    line = sweeps.line
    first = line.segments.start(line.segments.trunk)  # of those that the turn may be merged with
    if not line.ends_at_turn or len(line.stages) - first < 2:
        return False
    return _meets_turn(sweeps.costs.stages[-2], sweeps.surroundings) != _beside(
        sweeps.costs.stages[-2]
    )


def _merged_sweeps(sweeps: Sweeps) -> Sweeps:
    """``sweeps`` of the line without its turn, which its last stage then is charged with."""
    *others, last, _turn = sweeps.costs.stages
    stages = (*others, _meets_turn(last, sweeps.surroundings))
    return replace(
        sweeps,
        line=replace(sweeps.line, stages=sweeps.line.stages[:-1]),
        options=Options(sweeps.options.parts[:-1], sweeps.options.masks[:-1]),
        costs=Costs(stages, sweeps.costs.fixed_bytes),
    )


def _beside(last: StageCosts) -> StageCosts:
    """A stage before the turn as the last one: the gradients after it are its backward's."""
    held_bytes = last.gradient_bytes
    return replace(
        last,
        gradient_bytes=0,
        backward_extra_bytes=last.backward_extra_bytes + held_bytes,
        rebuild_bytes=last.rebuild_bytes + held_bytes,
        options=tuple(
            replace(option, backward_extra_bytes=option.backward_extra_bytes + held_bytes)
            for option in last.options
        ),
    )


def _meets_turn(last: StageCosts, surroundings: Surroundings) -> StageCosts:
    """The same, with the loss computed while its saved set is held."""
    alone, turn_bytes = _beside(last), surroundings.turn_bytes
    return replace(
        alone,
        backward_extra_bytes=max(alone.backward_extra_bytes, turn_bytes),
        options=tuple(
            replace(option, backward_extra_bytes=max(option.backward_extra_bytes, turn_bytes))
            for option in alone.options
        ),
    )


def _without_last(chain: Chain) -> Chain:
    return Chain(chain.storages, chain.boundaries[:-1], chain.stages[:-1])


def _with_turn(schedule: Schedule, *, turn: int) -> Schedule:
    """``schedule`` with the turn right before its first backward."""
    ops = schedule.computations
    place = next(i for i, op in enumerate(ops) if isinstance(op, Backward))
    return Schedule((*ops[:place], Forward(turn, Keep.ALL), Backward(turn), *ops[place:]))
