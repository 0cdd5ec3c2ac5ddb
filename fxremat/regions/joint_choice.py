"""The plans that a region may follow, and the choice among those of all calls of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

from fxremat.errors import CostError
from fxremat.graph.further import conditions_of, search_again
from fxremat.graph.graph import Graph
from fxremat.graph.pool import Pool
from fxremat.graph.pools import least_bytes
from fxremat.options.budget import Budget
from fxremat.planner.context.step_context import Correction, StepContext
from fxremat.planner.decision.candidates import Candidate
from fxremat.progress import LOG
from fxremat.ranks.combine import Chosen
from fxremat.solvers import knapsack
from fxremat.solvers.knapsack import Call, Choice
from fxremat.units import format_bytes


def region_context(
    context: StepContext, correction: Correction, host_bytes: int | None = None
) -> StepContext:
    """Return a context for a call in a step of several graphs.

    All that is held besides the graph is replaced by ``correction``, which counts it.

    Args:
        context: the context of the call.
        correction: the bytes held besides the graph.
        host_bytes: host memory that the call may take; ``None``: no limit.
    """
    return replace(
        context,
        waiting=0,
        waiting_bytes=0,
        kept_bytes=0,
        state_bytes=0,
        networks_bytes=0,
        wrapped_bytes=0,
        correction=correction,
        region=True,
        host_bytes=host_bytes,
    )


def _all_storage_bytes(graph: Graph, context: StepContext) -> int:
    return sum(graph.at(context.sizes)[0].line.joint.storages.nbytes)


def context_to_hold_least(
    graph: Graph, context: StepContext, host_bytes: int | None = None
) -> StepContext:
    """Return a context for which the best plan is the one that holds least for its backward.

    See :func:`region_context` for the arguments.
    """
    correction = Correction(loss_point_bytes=_all_storage_bytes(graph, context))
    return region_context(context, correction, host_bytes)


def context_to_hold_least_within(
    graph: Graph,
    context: StepContext,
    budget_bytes: int,
    held: Correction,
    host_bytes: int | None,
    *,
    needed: bool,
) -> StepContext:
    """Return a context for which the best plan holds least, of those that keep to a budget.

    All that the budget leaves beyond the least is assumed to be allocated at the loss point: a plan
    that holds more exceeds the budget there, and so does one that takes more otherwise.

    Args:
        graph: the graph that is called.
        context: the context of the call.
        budget_bytes: what the step may take.
        held: ``more_bytes``: what is held when the call begins; ``left_bytes``: gradients of other
            calls that come to exist before its backward begins.
        host_bytes: host memory that the call may take; ``None``: no limit.
        needed: whether the call must keep to the present budget, whatever searching for a plan
            takes.
    """
    least = context_to_hold_least(graph, context, host_bytes)
    given_bytes = graph.held(least).given_bytes
    held_bytes = least_bytes(graph, least, None) - given_bytes - least.correction.loss_point_bytes
    room = Correction(
        more_bytes=held.more_bytes - given_bytes,
        loss_point_bytes=max(0, budget_bytes - held.more_bytes - held_bytes),
        left_bytes=graph.tangent_bytes(context.sizes) + held.left_bytes,
    )
    planned = region_context(context, room, host_bytes)
    # Where nothing fits, this searches further variants.
    with contextlib.suppress(CostError):  # in a profiler no further form can be measured
        least_bytes(graph, planned, budget_bytes, needed=needed)
    return planned


def choices_of(graph: Graph, context: StepContext) -> tuple[Choice, ...]:
    """Return the plans of a graph that no other dominates, last the one that keeps everything.

    A plan dominates another one if it is no worse in bytes held, both peaks, seconds and, if it is
    limited, host memory. Later searches of the graph consider the transfers of these plans.
    """
    all_bytes = _all_storage_bytes(graph, context)
    candidates: dict[Choice, tuple[int, Candidate]] = {}
    for share in graph.options.effort.loss_point_shares:
        correction = Correction(loss_point_bytes=int(share * all_bytes))
        own = replace(context, waiting_bytes=0, correction=correction, region=True)
        pools = search_again(graph, conditions_of(graph, own))
        for index, pool in enumerate(pools):
            for candidate in pool.graded():
                candidates.setdefault(_choice(pool, candidate), (index, candidate))
        kept = _choice(pools[0], pools[0].baseline)
    candidates.pop(kept, None)
    best = [one for one in candidates if not any(_dominates(other, one) for other in candidates)]
    chosen = [candidates[choice] for choice in best]
    graph.sent[context.sizes] = tuple(
        tuple(candidate for own, candidate in chosen if own == index and candidate.moves)
        for index in range(len(pools))
    )
    return (*best, kept)


def choose_together(
    calls: Sequence[Call],
    budget: Budget,
    *,
    base_bytes: int,
    most_states: int,
    first_bytes: int = 0,
    host_bytes: int | None = None,
) -> Chosen:
    """Return one plan for each call of a step, so that the step is fastest within a budget.

    Args:
        calls: the calls, with their choices.
        budget: the budget that they share.
        base_bytes: what is held when the step begins.
        most_states: how many pairs of bytes and seconds the search keeps after each call.
        first_bytes: the most bytes before the first call, beyond ``base_bytes``.
        host_bytes: host memory that they may take together; ``None``: no limit.

    Raises:
        BudgetError: no plans fit together.
    """
    least = knapsack.least(calls, most_states=most_states, host_bytes=host_bytes)
    least_bytes = base_bytes + max(first_bytes, least.peak_bytes)
    kept_bytes = knapsack.peak_bytes(calls, [len(call.choices) - 1 for call in calls])
    full_bytes = base_bytes + max(first_bytes, kept_bytes)
    if budget.grows:
        budget = budget.resolved_to(least_bytes)
    budget_bytes = budget.resolve(
        full_bytes=full_bytes,
        least_bytes=least_bytes,
        needed_by=lambda: _needed_by(calls, least.peak_bytes, host_bytes, base_bytes, most_states),
    )
    solved = knapsack.solve(
        calls,
        budget_bytes=budget_bytes - base_bytes,
        most_states=most_states,
        host_bytes=host_bytes,
    )
    assert solved is not None  # the least one fits
    LOG.info(
        "%d regions: peak %s of %s",
        len(calls),
        format_bytes(base_bytes + solved.peak_bytes),
        format_bytes(budget_bytes),
    )
    corrections = (
        Correction(
            more_bytes=call.forward_bytes,
            loss_point_bytes=room_bytes - call.forward_bytes,
            left_bytes=call.backward_bytes - call.forward_bytes,
        )
        for call, room_bytes in zip(calls, knapsack.rooms(calls, solved.chosen), strict=True)
    )
    choices = (call.choices[i] for call, i in zip(calls, solved.chosen, strict=True))
    return Chosen(tuple(choices), tuple(corrections), budget_bytes, least_bytes, full_bytes)


def _needed_by(
    calls: Sequence[Call],
    least_bytes: int,
    host_bytes: int | None,
    base_bytes: int,
    most_states: int,
) -> str:
    """Return what needs the least budget of a step, as a phrase for an error.

    Args:
        calls: the calls of the step.
        least_bytes: what they need within host memory.
        host_bytes: the limit of host memory; ``None``: no limit.
        base_bytes: what is held when the step begins.
        most_states: as of :func:`choose_together`.
    """
    needed_by = "its region" if len(calls) == 1 else f"{len(calls)} regions together"
    free = knapsack.least(calls, most_states=most_states)
    if host_bytes is None or free.peak_bytes >= least_bytes:
        return needed_by
    nbytes = base_bytes + free.peak_bytes
    return (
        f"{needed_by}, because HostMemory(limit=) allows {host_bytes} bytes "
        f"({format_bytes(host_bytes)}) of host memory (with {free.host_bytes}, "
        f"{format_bytes(free.host_bytes)}, {nbytes} bytes, {format_bytes(nbytes)}, of the device "
        "suffice)"
    )


def _choice(pool: Pool, candidate: Candidate) -> Choice:
    """Return what a candidate holds, allocates and takes, for the choice among calls of a step."""
    evaluation, held = pool.search.evaluator.evaluation(candidate), pool.held
    loss_point, peaks_bytes = evaluation.loss_point, evaluation.peaks_bytes
    return Choice(
        evaluation.loss_point_bytes - held.given_bytes - held.loss_point_more_bytes,
        max((*peaks_bytes[:loss_point], held.given_bytes)) - held.given_bytes,
        max((*peaks_bytes[loss_point:], evaluation.end_bytes)) - held.given_bytes,
        candidate.total_s,
        candidate.host_bytes if pool.host_limited else 0,
    )


def _dominates(one: Choice, other: Choice) -> bool:
    """Return whether ``one`` is no worse than ``other`` in anything, and not equal to it."""
    return one != other and (
        one.held_bytes <= other.held_bytes
        and one.forward_bytes <= other.forward_bytes
        and one.backward_bytes <= other.backward_bytes
        and one.seconds <= other.seconds
        and one.host_bytes <= other.host_bytes
    )
