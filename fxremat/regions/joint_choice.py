"""What a graph may leave for its backward: plans among which a step of several calls chooses."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

from fxremat.errors import CostError
from fxremat.graph.further import search_again
from fxremat.graph.graph import Graph
from fxremat.graph.pool import Pool
from fxremat.graph.pools import least_bytes
from fxremat.options.budget import Budget
from fxremat.planner.candidates import Candidate
from fxremat.planner.context import Correction, StepContext
from fxremat.progress import LOG
from fxremat.ranks.combine import Chosen
from fxremat.solvers import knapsack
from fxremat.solvers.knapsack import Call, Choice
from fxremat.units import format_bytes

SHARES = (1.0, 0.5, 0.25, 0.125, 0.0)
"""Shares of what a region ever allocates, taken to be at the turn where plans are looked for."""


def alone(context: StepContext, beside: Correction, host_bytes: int | None = None) -> StepContext:
    """What a region's call finds, where all that is beside its graph is in ``beside``.

    Args:
        context: what it finds.
        beside: what is there beside it.
        host_bytes: of host memory, left for it; ``None``: as much as it takes.
    """
    return replace(
        context,
        waiting=0,
        waiting_bytes=0,
        kept_bytes=0,
        state_bytes=0,
        networks_bytes=0,
        spread_bytes=0,
        correction=beside,
        region=True,
        host_bytes=host_bytes,
    )


def _own_bytes(graph: Graph, context: StepContext) -> int:
    """All that a graph ever allocates."""
    return sum(graph.at(context.sizes)[0].line.joint.storages.nbytes)


def leaving_least(graph: Graph, context: StepContext, host_bytes: int | None = None) -> StepContext:
    """A region's call that is to leave least, whatever else that takes; see :func:`alone`."""
    return alone(context, Correction(turn_bytes=_own_bytes(graph, context)), host_bytes)


def leaving_little(
    graph: Graph,
    context: StepContext,
    budget_bytes: int,
    beside: Correction,
    host_bytes: int | None,
    *,
    needed: bool,
) -> StepContext:
    """A region's call that is to leave least of all that keeps to a budget; see :func:`alone`.

    The turn takes what the budget leaves beside the least: what leaves more is over it, and of what
    leaves that, only what takes more itself.

    Args:
        graph: that is called.
        context: what it finds.
        budget_bytes: of the step.
        beside: ``more_bytes``: what is there when it begins; ``left_bytes``: gradients of others
            that are there when its backward begins, and were not before.
        host_bytes: of host memory, left for it; ``None``: as much as it takes.
        needed: it must keep to the budget as it is.
    """
    least = leaving_least(graph, context, host_bytes)
    own_bytes = graph.given_bytes(least)
    held_bytes = least_bytes(graph, least, None) - own_bytes - least.correction.turn_bytes
    room = Correction(
        more_bytes=beside.more_bytes - own_bytes,
        turn_bytes=max(0, budget_bytes - beside.more_bytes - held_bytes),
        left_bytes=graph.tangent_bytes(context.sizes) + beside.left_bytes,
    )
    found = alone(context, room, host_bytes)
    # Where none fits, further variants are searched.
    with contextlib.suppress(CostError):  # as in a profiler, where no further form is measured
        least_bytes(graph, found, budget_bytes, needed=needed)
    return found


def choices_of(graph: Graph, context: StepContext) -> tuple[Choice, ...]:
    """Plans of a graph that no other beats in all of bytes held, both peaks, seconds and, where
    that is limited, host memory.

    What travels in them is known to the planner from then on. The last one keeps everything.
    """
    own_bytes = _own_bytes(graph, context)
    found: dict[Choice, tuple[int, Candidate]] = {}
    for share in SHARES:
        beside = Correction(turn_bytes=int(share * own_bytes))
        pools = search_again(
            graph, replace(context, waiting_bytes=0, correction=beside, region=True)
        )
        for place, pool in enumerate(pools):
            for candidate in pool.graded():
                found.setdefault(_choice(pool, candidate), (place, candidate))
        kept = _choice(pools[0], pools[0].baseline)
    found.pop(kept, None)
    best = [choice for choice in found if not any(_beats(other, choice) for other in found)]
    chosen = [found[choice] for choice in best]
    graph.sent[context.sizes] = tuple(
        tuple(candidate for own, candidate in chosen if own == place and candidate.moves)
        for place in range(len(pools))
    )
    return (*best, kept)


def chosen_for(
    calls: Sequence[Call],
    budget: Budget,
    *,
    there_bytes: int,
    first_bytes: int = 0,
    host_bytes: int | None = None,
) -> Chosen:
    """Plans for all calls of a step, the fastest together.

    Args:
        calls: with their choices.
        budget: that they share.
        there_bytes: what is there when the step begins.
        first_bytes: most beside that, before the first call.
        host_bytes: most host memory that they may take; ``None``: as much as they take.

    Raises:
        BudgetError: none fit.
    """
    least = knapsack.least(calls, host_bytes=host_bytes)
    least_bytes = there_bytes + max(first_bytes, least.peak_bytes)
    kept_bytes = knapsack.peak_bytes(calls, [len(call.choices) - 1 for call in calls])
    full_bytes = there_bytes + max(first_bytes, kept_bytes)
    if budget.grows:
        budget = budget.settled(least_bytes)
    budget_bytes = budget.resolve(
        full_bytes=full_bytes,
        least_bytes=least_bytes,
        needed_by=lambda: _needed_by(calls, least.peak_bytes, host_bytes, there_bytes),
    )
    found = knapsack.solve(calls, budget_bytes=budget_bytes - there_bytes, host_bytes=host_bytes)
    assert found is not None  # the least one fits
    LOG.info(
        "%d regions: peak %s of %s",
        len(calls),
        format_bytes(there_bytes + found.peak_bytes),
        format_bytes(budget_bytes),
    )
    besides = (
        Correction(
            more_bytes=call.forward_bytes,
            turn_bytes=room - call.forward_bytes,
            left_bytes=call.backward_bytes - call.forward_bytes,
        )
        for call, room in zip(calls, knapsack.rooms(calls, found.chosen), strict=True)
    )
    choices = (call.choices[i] for call, i in zip(calls, found.chosen, strict=True))
    return Chosen(tuple(choices), tuple(besides), budget_bytes, least_bytes, full_bytes)


def _needed_by(
    calls: Sequence[Call], least_bytes: int, host_bytes: int | None, there_bytes: int
) -> str:
    """What the least budget of a step is needed for.

    Args:
        calls: of the step.
        least_bytes: that they need, within host memory.
        host_bytes: most of that; ``None``: as much as it takes.
        there_bytes: what is there at the step's begin.
    """
    needed_by = "its region" if len(calls) == 1 else f"{len(calls)} regions together"
    free = knapsack.least(calls)
    if host_bytes is None or free.peak_bytes >= least_bytes:
        return needed_by
    nbytes = there_bytes + free.peak_bytes
    return (
        f"{needed_by}, as HostMemory(limit=) leaves them {host_bytes} bytes "
        f"({format_bytes(host_bytes)}) of host memory: with {free.host_bytes} "
        f"({format_bytes(free.host_bytes)}) {nbytes} bytes ({format_bytes(nbytes)}) of the device "
        "would do"
    )


def _choice(pool: Pool, candidate: Candidate) -> Choice:
    search = pool.search
    evaluation, around = search.evaluator.evaluation(candidate), search.setting.context_bytes
    turn, peaks_bytes = evaluation.turn, evaluation.peaks_bytes
    return Choice(
        evaluation.turn_bytes - around.given_bytes - around.loss_point_bytes,
        max((*peaks_bytes[:turn], around.given_bytes)) - around.given_bytes,
        max((*peaks_bytes[turn:], evaluation.end_bytes)) - around.given_bytes,
        candidate.total_s,
        candidate.host_bytes if pool.host_limited else 0,
    )


def _beats(one: Choice, other: Choice) -> bool:
    return one != other and (
        one.held_bytes <= other.held_bytes
        and one.forward_bytes <= other.forward_bytes
        and one.backward_bytes <= other.backward_bytes
        and one.seconds <= other.seconds
        and one.host_bytes <= other.host_bytes
    )
