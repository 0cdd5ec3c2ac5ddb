"""The choice of a plan: what a budget means for a graph, and the fastest candidate within it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxremat.graph.further import conditions_of, grow_faster, grow_smaller, wants_faster
from fxremat.graph.graph import Graph
from fxremat.graph.pool import Pool, below_s, fastest, frontier_over, least_of
from fxremat.graph.pools import pools
from fxremat.graph.shortfall import growth
from fxremat.options.budget import Budget, TrainingBudget
from fxremat.planner.context.step_context import StepContext
from fxremat.planner.decision.candidates import Candidate
from fxremat.planning.usual import usual_loop
from fxremat.progress import LOG
from fxremat.report.frontier import Frontier

LEAST = Budget("min")


@dataclass(frozen=True, slots=True)
class Chosen:
    """A candidate that was chosen for a call, and what it was chosen from.

    Attributes:
        pool: the pool of its variant.
        candidate: the fastest that keeps to the budget.
        traced: the pool of the traced variant.
        budget_bytes: the bytes that the candidate keeps to.
        least_bytes: the least feasible budget.
        full_bytes: the peak with everything kept.
        frontier: the least time at every other budget.
        usual: what later steps of the usual training loop hold beyond what this call did, and its
            bytes.
        zeros_budget_bytes: the least budget of a loop that sets gradients to zero.
        forms_left: number of forms that the effort did not allow to search.
    """

    pool: Pool
    candidate: Candidate
    traced: Pool
    budget_bytes: int
    least_bytes: int
    full_bytes: int
    frontier: Frontier
    usual: tuple[tuple[str, int], ...] = ()
    zeros_budget_bytes: int = 0
    forms_left: int = 0


@dataclass(frozen=True, slots=True)
class Needs:
    """The bytes that steps need in several contexts.

    Attributes:
        full_bytes: the peak with everything kept.
        least_bytes: the least budget.
        first_bytes: the least budget in the first context.
        most_bytes: the largest least budget of all contexts.
        pools, context: the candidates and the context that ``least_bytes`` is of.
    """

    full_bytes: int
    least_bytes: int
    first_bytes: int
    most_bytes: int
    pools: list[Pool]
    context: StepContext


def choose(
    graph: Graph, context: StepContext, budget: TrainingBudget, *, least: bool = False
) -> Chosen:
    """Return the fastest candidate for a call that keeps to the budget.

    Further variants are searched only while one of them could still help.

    Args:
        graph: the captured graph.
        context: the context of the call.
        budget: the budget of the model.
        least: choose the candidate of the least peak, even above the budget.

    Raises:
        BudgetError: no candidate fits.
        CostError: an operation cannot be measured.
    """
    limit = LEAST if least else budget.now
    contexts = (context,) if least else budget_contexts(graph, context, budget)
    needed = must_fit(graph, budget)
    available = pools(graph, contexts[0], limit.nbytes, needed=needed)
    if limit.nbytes is None and not context.region:
        available = _within_share(graph, contexts, limit, available)
    needs = needs_in(graph, contexts)
    budget_bytes = _resolved(graph, budget, limit, needs)
    for later in contexts[1:]:  # what they need is searched now, not in the middle of a step
        pools(graph, later, budget_bytes, needed=False)
    if contexts[0] != context:
        available = pools(graph, context, budget_bytes, needed=needed)
    traced, least_bytes = available[0], needs.least_bytes
    pool, candidate = fastest(available, budget_bytes)
    call = conditions_of(graph, context)
    while wants_faster(graph, call, traced, candidate.total_s) and grow_faster(
        graph, call, available, budget_bytes, below_s(available, candidate)
    ):
        available = pools(graph, context, budget_bytes, needed=needed)
        pool, candidate = fastest(available, budget_bytes)
        least_bytes = needs_in(graph, contexts).least_bytes
    further, is_one = graph.further, len(contexts) == 1
    chosen = Chosen(
        pool,
        candidate,
        traced,
        budget_bytes,
        least_bytes,
        full_bytes=traced.full_bytes,
        frontier=frontier_over(available if is_one else needs.pools),
        forms_left=len(further.left or ()) if further.spending.is_spent else 0,
    )
    if is_one:
        return chosen
    before, after = (dict(graph.described(each)) for each in (context, contexts[-1]))
    return replace(
        chosen,
        full_bytes=needs.full_bytes,
        usual=growth(before, after),
        zeros_budget_bytes=needs.most_bytes,
    )


def must_fit(graph: Graph, budget: TrainingBudget) -> bool:
    """Return whether a call must keep to the present budget.

    It need not in a running job where the budget is ``"min"``, which grows instead.
    """
    return not (graph.started and budget.grows)


def fits(
    graph: Graph, context: StepContext, budget: TrainingBudget, *, search: bool = True
) -> bool:
    """Return whether a candidate keeps a call to the budget.

    Args:
        graph: the captured graph.
        context: the context of the call.
        budget: the budget of the model, already resolved.
        search: whether to search for further candidates if no cached one fits.
    """
    assert budget.nbytes is not None
    limit = budget.nbytes if search else None
    available = pools(graph, context, limit, needed=must_fit(graph, budget))
    return least_of(available).least_bytes <= budget.nbytes


# What budgets are resolved for


def budget_contexts(
    graph: Graph, context: StepContext, budget: TrainingBudget
) -> tuple[StepContext, ...]:
    """Return the contexts that a budget is resolved for: the call's, or those of the usual loop.

    A budget must reach the least peak in the first one. A share of the memory, ``"min"`` and the
    least budget that a plan names are resolved for the one of the first two that needs more; an
    error names the least of the last one, too.
    """
    if graph.started or not _is_usual(graph, context, budget):
        return (context,)
    loop = usual_loop(graph, context)
    return loop.cleared, loop.between, loop.zeros


def usual_context(graph: Graph, context: StepContext, budget: TrainingBudget) -> StepContext:
    """Return the context of the usual loop that the least budget is of, at a call's sizes.

    Where the usual loop is not assumed, it is ``context``.
    """
    if not _is_usual(graph, context, budget):
        return context
    loop = usual_loop(graph, replace(context, kept_bytes=0))
    each = (loop.cleared, loop.between)
    return max(each, key=lambda own: least_of(pools(graph, own, None, run=False)).least_bytes)


def _is_usual(graph: Graph, context: StepContext, budget: TrainingBudget) -> bool:
    """Return whether later steps are assumed to be those of the usual training loop."""
    return graph.caller.in_flight == 1 and not context.region and budget.usual


def needs_in(graph: Graph, contexts: Sequence[StepContext]) -> Needs:
    """Return the bytes that steps need in one context, or in those of :func:`budget_contexts`."""
    each = [pools(graph, context, None) for context in contexts]
    full, least = [], []
    for context, available in zip(contexts, each, strict=True):
        full.append(all_in_flight(graph, context, available[0].full_bytes))
        least.append(all_in_flight(graph, context, least_of(available).least_bytes))
    most = max(range(len(contexts[:2])), key=lambda i: (least[i], full[i]))
    return Needs(
        full_bytes=max(full[:2]),
        least_bytes=least[most],
        first_bytes=least[0],
        most_bytes=max(least),
        pools=each[most],
        context=contexts[most],
    )


def all_in_flight(graph: Graph, context: StepContext, nbytes: int) -> int:
    """Return the peak bytes with as many steps in flight as there may be.

    Args:
        graph: the captured graph.
        context: the context of one of the steps.
        nbytes: the peak of that step, with the steps that are in flight so far.
    """
    count = graph.caller.in_flight
    if count == 1 or context.waiting >= count:
        return nbytes
    given_bytes = graph.held(context).given_bytes
    others_bytes = context.waiting_bytes + context.others_bytes
    alike_bytes = given_bytes - others_bytes + count * (nbytes - given_bytes)
    return max(nbytes, alike_bytes)  # those that wait may hold more than this one


def share_in_flight(graph: Graph, context: StepContext, budget: TrainingBudget) -> StepContext:
    """Return ``context`` with bytes of the budget reserved for further steps in flight.

    The budget that the model leaves is shared equally among as many steps as may be in flight,
    since each may be the next whose backward runs.
    """
    count = graph.caller.in_flight
    if count == 1 or context.waiting >= count:
        return context
    given_bytes = graph.held(context).given_bytes - context.waiting_bytes
    if budget.nbytes is None:  # a share of what so many take, or the least of it
        available = pools(graph, context, None)
        nbytes = budget.written.bytes_of(
            full_bytes=all_in_flight(graph, context, available[0].full_bytes),
            least_bytes=all_in_flight(graph, context, least_of(available).least_bytes),
        )
        if graph.peers is not None:
            nbytes = graph.peers.agree("the budget", int, nbytes, lambda n: max(n.values()))
        budget.set(nbytes)
    assert budget.nbytes is not None
    others_bytes = (count - 1) * ((budget.nbytes - given_bytes) // count)
    return replace(context, others_bytes=max(0, others_bytes - context.waiting_bytes))


def resolve_again(graph: Graph, context: StepContext, budget: TrainingBudget) -> None:
    """Raise a budget that is a share, or ``"min"``, to the bytes that it means in ``context``.

    It is never lowered: earlier steps may have taken that much.
    """
    needs = needs_in(graph, (context,))
    nbytes = budget.written.bytes_of(full_bytes=needs.full_bytes, least_bytes=needs.least_bytes)
    if nbytes > (budget.nbytes or 0):
        LOG.info("the budget %r is now %d bytes", budget.written.written, nbytes)
        budget.set(nbytes)


def _resolved(graph: Graph, budget: TrainingBudget, limit: Budget, needs: Needs) -> int:
    """Return the bytes that a budget means.

    An error names the operation with the least peak, which takes seconds to find in a large step.
    So it is found only if the error is raised, not if a later step grows the budget or runs with a
    warning.
    """
    raises = not graph.started or (budget.may_raise and not budget.grows)
    return limit.resolve(
        full_bytes=needs.full_bytes,
        least_bytes=needs.least_bytes,
        first_bytes=needs.first_bytes,
        most_bytes=needs.most_bytes,
        needed_by=lambda: least_of(needs.pools).describe_least() if raises else "",
        also_held=graph.described(needs.context),
        hint=graph.hint + ("" if budget.accepted else budget.hint),
    )


def _within_share(
    graph: Graph, contexts: Sequence[StepContext], limit: Budget, available: list[Pool]
) -> list[Pool]:
    """Search variants until one fits a budget that is a share or ``"min"``; return all pools."""
    call = conditions_of(graph, contexts[0])
    full_bytes = needs_in(graph, contexts).full_bytes
    nbytes = limit.bytes_of(full_bytes=full_bytes, least_bytes=0)
    while (least_bytes := least_of(available).least_bytes) > nbytes:
        if not grow_smaller(graph, call, least_bytes, needed=nbytes > 0):
            break
        available = pools(graph, contexts[0], None)
    return available
