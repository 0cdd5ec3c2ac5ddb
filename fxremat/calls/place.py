"""The choice of what optimizer state and gradients live in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fxremat.graph.graph import Graph
from fxremat.graph.pool import fastest, least_of
from fxremat.graph.pools import pools
from fxremat.loop.placement import Placement
from fxremat.options.budget import TrainingBudget
from fxremat.planner.context.step_context import StepContext
from fxremat.planning.choose import budget_contexts, choose, needs_in
from fxremat.progress import LOG
from fxremat.units import format_bytes, format_seconds


def choose_placement(
    graph: Graph,
    budget: TrainingBudget,
    placements: Sequence[Placement],
    context_with: Callable[[Placement], StepContext],
) -> Placement:
    """Return the placement with which a training step is fastest within the budget.

    A share of the memory is of what the step takes with everything on the device; it is resolved
    here. ``"min"`` is the least of all placements.

    Args:
        graph: the captured graph, which is the whole model.
        budget: the budget of the model.
        placements: the choices, from nothing to everything in host memory.
        context_with: returns the context of the captured call with a placement.

    Raises:
        BudgetError: nothing fits, even with everything in host memory.
        CostError: an operation cannot be measured.
    """
    nothing, *_, everything = placements
    if budget.written.grows:
        return everything
    contexts = budget_contexts(graph, context_with(nothing), budget)
    pools(graph, contexts[0], None)
    full_bytes = needs_in(graph, contexts).full_bytes
    if budget.nbytes is None:
        budget.set(budget.written.bytes_of(full_bytes=full_bytes, least_bytes=0))
    assert budget.nbytes is not None
    if full_bytes <= budget.nbytes:
        return nothing
    best, best_s = everything, _seconds(graph, budget, everything, context_with(everything))
    for placement in reversed(placements[:-1]):
        seconds = _seconds_at_hand(graph, budget, placement, context_with(placement))
        if seconds is not None and seconds < best_s:
            best, best_s = placement, seconds
    LOG.info(
        "%s of optimizer state and %s of gradients are in host memory, %s per step",
        format_bytes(best.state_bytes),
        format_bytes(best.gradient_bytes),
        format_seconds(best_s),
    )
    return best


def _seconds(
    graph: Graph, budget: TrainingBudget, placement: Placement, context: StepContext
) -> float:
    """Return the seconds of the fastest step with a placement, after a full search.

    Raises:
        BudgetError: nothing fits.
    """
    return choose(graph, context, budget).candidate.total_s + placement.transfer_s


def _seconds_at_hand(
    graph: Graph, budget: TrainingBudget, placement: Placement, context: StepContext
) -> float | None:
    """Return the seconds of the fastest step with a placement, of the candidates at hand.

    ``None``: none of them fits.
    """
    budget_bytes = budget.nbytes
    assert budget_bytes is not None
    first, *_ = budget_contexts(graph, context, budget)
    for each in (first, context):
        available = pools(graph, each, None)
        if least_of(available).least_bytes > budget_bytes:
            return None
    _, candidate = fastest(available, budget_bytes)
    return candidate.total_s + placement.transfer_s
