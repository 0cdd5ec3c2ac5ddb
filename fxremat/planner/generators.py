"""Where schedules come from: a generator gives those of one solver, for all budgets at once.

A solver's model rounds and simplifies; what it finds is evaluated exactly afterwards. Solving
for many budgets and keeping each schedule's exact peak finds, for any budget, the fastest that
truly fits, and makes time and peak monotonic in the budget.

Where the loss is outside, the turn is a stage of its own, and what is held then is for the
solver to choose. Most often it is all that the last stage keeps, which takes no time to get
back. A line whose last stage meets the turn itself has these schedules and no others
(``kept_over_turn``): each budget's best among them are candidates beside the best of all, for
the sake of local search, which may get further from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import wraps

import numpy as np

from fxremat.ir import Chain, Costs, Infeasible, Problem, Solved, StageCosts
from fxremat.ir.schedule import ALL, BACKWARD, KINDS, Codes, coded
from fxremat.passes.stages.linearize import Line
from fxremat.planner.context_bytes import ContextBytes
from fxremat.planner.evaluation import Evaluation

SLOTS = 500
"""Slots of each table; a few tables with ever lower ceilings keep rounding small."""


BUDGETS = 17
"""At which a solver is asked that has no table of all budgets."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What schedules are asked for.

    Attributes:
        line: the stages.
        chain: these and their storages.
        costs: of the stages.
        context_bytes: memory beside the graphs.
        kept: the evaluation of keeping everything.
    """

    line: Line
    chain: Chain
    costs: Costs
    context_bytes: ContextBytes
    kept: Evaluation


Generator = Callable[[Setting], Iterator[Codes]]
"""Gives schedules for budgets from the least to all that can be used."""


def chain_schedules(setting: Setting) -> Iterator[Codes]:
    """Optimal persistent schedules of the line, by rotor."""
    # Loading numba takes longer than all else in the package: not at import.
    from fxremat.solvers import store_all  # noqa: PLC0415
    from fxremat.solvers.rotor import RotorTable, least_budget  # noqa: PLC0415

    chain, costs = setting.chain, setting.costs
    full_bytes = store_all.peak_bytes(chain, costs)
    least_bytes, least = least_budget(chain, costs)
    yield coded(least)
    for ceiling in ceilings(full_bytes, least_bytes, costs.fixed_bytes):
        table = RotorTable.build(chain, costs, max_budget_bytes=ceiling, slots=SLOTS)
        yield from map(table.codes, table.distinct_budgets())


def solved_by(name: str) -> Generator:
    """Schedules of the line by a solver of ``fxremat.solvers.named``, whatever it rounds.

    It is asked at ``BUDGETS`` budgets, evenly from the least that it can do with to that of
    keeping everything.
    """

    def schedules(setting: Setting) -> Iterator[Codes]:
        from fxremat.solvers import store_all  # noqa: PLC0415
        from fxremat.solvers.named import solve  # noqa: PLC0415

        chain, costs = setting.chain, setting.costs
        least = solve(name, Problem(chain, costs, 0))
        least_bytes = least.least_budget_bytes if isinstance(least, Infeasible) else 0
        more_bytes = max(0, store_all.peak_bytes(chain, costs) - least_bytes)
        for step in range(BUDGETS):
            budget_bytes = least_bytes + more_bytes * step // (BUDGETS - 1)
            found = solve(name, Problem(chain, costs, budget_bytes))
            if isinstance(found, Solved):
                yield coded(found.schedule)

    return schedules


def ceilings(full_bytes: int, least_bytes: int, floor_bytes: int) -> Iterator[int]:
    """Ever lower budgets, so that rounding stays small relative to each."""
    ceiling = full_bytes
    while ceiling > least_bytes:
        yield ceiling
        ceiling = floor_bytes + (ceiling - floor_bytes) // 4


def kept_over_turn(generator: Generator) -> Generator:
    """``generator`` for the line whose last stage with operations meets the turn.

    It gives schedules of the whole line, and none where ``generator`` finds these itself: the
    line has no turn of its own, or its last backward needs as much as the turn in any case.
    """

    @wraps(generator)
    def schedules(setting: Setting) -> Iterator[Codes]:
        if not _turn_counts(setting):
            return
        turn = (len(setting.chain) - 1) * KINDS
        for codes in generator(_without_turn(setting)):
            first = int(np.argmax(codes % KINDS == BACKWARD))
            yield np.insert(codes, first, [turn + ALL, turn + BACKWARD])

    return schedules


def _turn_counts(setting: Setting) -> bool:
    """Whether the turn is a stage beside others, and may need more than the last backward."""
    line = setting.line
    first = line.segments.start(line.segments.trunk)  # of those that the turn may be merged with
    if not line.ends_at_turn or len(line.stages) - first < 2:
        return False
    last = setting.costs.stages[-2]
    return _meets_turn(last, setting.context_bytes) != _beside(last)


def _without_turn(setting: Setting) -> Setting:
    """``setting`` of the line without its turn, which its last stage then is charged with."""
    *others, last, _turn = setting.costs.stages
    stages = (*others, _meets_turn(last, setting.context_bytes))
    chain = setting.chain
    return replace(
        setting,
        line=replace(setting.line, stages=setting.line.stages[:-1]),
        chain=Chain(chain.storages, chain.boundaries[:-1], chain.stages[:-1]),
        costs=Costs(stages, setting.costs.fixed_bytes),
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


def _meets_turn(last: StageCosts, context_bytes: ContextBytes) -> StageCosts:
    """The same, with the loss computed while its saved set is held."""
    alone, turn_bytes = _beside(last), context_bytes.turn_bytes
    return replace(
        alone,
        backward_extra_bytes=max(alone.backward_extra_bytes, turn_bytes),
        options=tuple(
            replace(option, backward_extra_bytes=max(option.backward_extra_bytes, turn_bytes))
            for option in alone.options
        ),
    )
