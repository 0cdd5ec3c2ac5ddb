"""What a graph may leave for its backward: plans among which a step of several calls chooses."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from fxremat.frontend.agreed import Chosen
from fxremat.frontend.budget import Budget
from fxremat.frontend.pipeline import Planner
from fxremat.planner.pool import Candidate
from fxremat.planner.search import Search
from fxremat.planner.situation import Beside, Situation
from fxremat.solvers import knapsack
from fxremat.solvers.knapsack import Call, Choice
from fxremat.units import format_bytes

LOG = logging.getLogger("fxremat")

SHARES = (1.0, 0.5, 0.25, 0.125, 0.0)
"""Of all that a region ever allocates: so much else is at the turn where plans are looked for."""


def least_beside(planner: Planner, situation: Situation) -> Beside:
    """Beside a call that is to leave least, whatever else that takes."""
    table = planner.step.at(situation.sizes)[0].measured.line.joint.storages
    return Beside(0, sum(table.nbytes), 0)


def alone(situation: Situation) -> Situation:
    """What a call finds, but for what is beside its graph: that is in ``beside``."""
    return replace(
        situation, waiting=0, waiting_bytes=0, kept_bytes=0, state_bytes=0, spread_bytes=0
    )


def leaving_least(planner: Planner, situation: Situation) -> Situation:
    """A call that is to leave least."""
    return replace(alone(situation), beside=least_beside(planner, situation))


def choices_of(planner: Planner, situation: Situation) -> tuple[Choice, ...]:
    """Plans of a graph that no other beats in all of bytes held, both peaks and seconds.

    The last one keeps everything.
    """
    whole_bytes = least_beside(planner, situation).turn_bytes
    found: dict[Choice, None] = {}
    for share in SHARES:
        beside = Beside(0, int(share * whole_bytes), 0)
        ways = planner.schedules.searched(replace(situation, waiting_bytes=0, beside=beside))
        for way in ways:
            found.update(dict.fromkeys(_choice(way.search, c) for c in way.search.pool.members))
        kept = _choice(ways[0].search, ways[0].search.baseline)
    found.pop(kept)
    best = [choice for choice in found if not any(_beats(other, choice) for other in found)]
    return (*best, kept)


def chosen_for(calls: Sequence[Call], budget: Budget, *, there_bytes: int) -> Chosen:
    """Plans for all calls of a step, the fastest together.

    Args:
        calls: with their choices.
        budget: that they share.
        there_bytes: what is there when the step begins.

    Raises:
        BudgetError: none fit.
    """
    least_bytes = there_bytes + knapsack.least(calls).peak_bytes
    kept_bytes = knapsack.peak_bytes(calls, [len(call.choices) - 1 for call in calls])
    if budget.grows and least_bytes > (budget.nbytes or 0):
        budget = replace(budget, nbytes=least_bytes)
    budget_bytes = budget.resolve(
        full_bytes=there_bytes + kept_bytes,
        least_bytes=least_bytes,
        needed_by=f"{len(calls)} regions together",
    )
    found = knapsack.solve(calls, budget_bytes=budget_bytes - there_bytes)
    assert found is not None  # the least one fits
    LOG.info(
        "%d regions: peak %s of %s",
        len(calls),
        format_bytes(there_bytes + found.peak_bytes),
        format_bytes(budget_bytes),
    )
    besides = (
        Beside(
            call.forward_bytes,
            room - call.forward_bytes,
            call.backward_bytes - call.forward_bytes,
        )
        for call, room in zip(calls, knapsack.rooms(calls, found.chosen), strict=True)
    )
    choices = (call.choices[i] for call, i in zip(calls, found.chosen, strict=True))
    return Chosen(tuple(choices), tuple(besides), budget_bytes)


def _choice(search: Search, candidate: Candidate) -> Choice:
    evaluation, around = search.evaluator.evaluation(candidate), search.setting.surroundings
    turn, peaks_bytes = evaluation.turn, evaluation.peaks_bytes
    return Choice(
        evaluation.turn_bytes - around.given_bytes - around.turn_bytes,
        max(peaks_bytes[:turn]) - around.given_bytes,
        max((*peaks_bytes[turn:], evaluation.end_bytes)) - around.given_bytes,
        candidate.total_s,
    )


def _beats(one: Choice, other: Choice) -> bool:
    return one != other and (
        one.held_bytes <= other.held_bytes
        and one.forward_bytes <= other.forward_bytes
        and one.backward_bytes <= other.backward_bytes
        and one.seconds <= other.seconds
    )
