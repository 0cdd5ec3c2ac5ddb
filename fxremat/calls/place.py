"""The choice of what optimizer state and gradients live in host memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fxremat.errors import BudgetError
from fxremat.graph.graph import Graph
from fxremat.graph.pool import fastest, least_of
from fxremat.graph.pools import pools
from fxremat.loop.placement import Placement
from fxremat.options.budget import TrainingBudget
from fxremat.planner.context.step_context import StepContext
from fxremat.planning.choose import Needs, all_in_flight, budget_contexts, choose, needs_in
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
    here. ``"min"`` is the least of all placements. Where several are equal, the one with less in
    host memory is returned.

    Args:
        graph: the captured graph, which is the whole model.
        budget: the budget of the model.
        placements: the choices, from nothing to everything in host memory.
        context_with: returns the context of the captured call with a placement.

    Raises:
        BudgetError: no placement fits; the error is that of the least one.
        CostError: an operation cannot be measured.
    """
    choice = _Choice(graph, budget, placements, context_with)
    if len(placements) == 1:
        return placements[0]
    if budget.written.grows:
        return choice.least()
    full_bytes = choice.full_bytes()
    if budget.nbytes is None:
        budget.set(budget.written.bytes_of(full_bytes=full_bytes, least_bytes=0))
    assert budget.nbytes is not None
    if full_bytes <= budget.nbytes:
        return placements[0]
    # A search that is left may show candidates for all placements.
    best, best_s = choice.fitting() if graph.further.left != [] else (None, math.inf)
    best, best_s = choice.fastest_at_hand(best, best_s)
    if best is None:
        best, best_s = choice.fitting()
    LOG.info(
        "%s of optimizer state and %s of gradients are in host memory, %s per step",
        format_bytes(best.state_bytes),
        format_bytes(best.gradient_bytes),
        format_seconds(best_s),
    )
    return best


@dataclass(frozen=True, slots=True)
class _Choice:
    """The placements of a graph and their needs; for the attributes see `choose_placement`."""

    graph: Graph
    budget: TrainingBudget
    placements: Sequence[Placement]
    context_with: Callable[[Placement], StepContext]

    def needs(self, placement: Placement) -> Needs:
        """Return the bytes that steps need with a placement, of the candidates at hand."""
        context = self.context_with(placement)
        contexts = budget_contexts(self.graph, context, self.budget)
        pools(self.graph, contexts[0], None)
        return needs_in(self.graph, contexts)

    def full_bytes(self) -> int:
        """Return the peak with everything kept, and all training state on the device."""
        contexts = budget_contexts(self.graph, self.context_with(self.placements[0]), self.budget)
        kept = ((each, pools(self.graph, each, None)[0].full_bytes) for each in contexts[:2])
        return max(all_in_flight(self.graph, each, nbytes) for each, nbytes in kept)

    def least(self) -> Placement:
        """Return the placement of the least budget.

        A search for less memory changes which one that is: what an optimizer's step has on the
        device counts more, the less the planned step takes.
        """
        least = self.placements[-1]
        for _ in range(MOST_SEARCHES):
            choose(self.graph, self.context_with(least), self.budget)
            before, least = least, min(self.placements, key=lambda own: self.needs(own).least_bytes)
            if least is before:
                break
        return least

    def fitting(self) -> tuple[Placement, float]:
        """Return a placement that fits the budget, and its seconds, after a full search.

        Raises:
            BudgetError: none fits.
        """
        refused: list[BudgetError] = []
        for placement in reversed(self.placements):  # mostly the one of least memory first
            try:
                chosen = choose(self.graph, self.context_with(placement), self.budget)
            except BudgetError as error:
                refused.append(error.with_traceback(None))
            else:
                return placement, chosen.candidate.total_s + placement.transfer_s
        raise min(refused, key=lambda error: error.least_budget_bytes or 0)

    def fastest_at_hand(
        self, best: Placement | None, best_s: float
    ) -> tuple[Placement | None, float]:
        """Return the fastest placement and its seconds, of the candidates at hand.

        Placements that are slower by their transfers are left out.

        Args:
            best: a placement that fits, or ``None``.
            best_s: its seconds.
        """
        first, *_ = budget_contexts(self.graph, self.context_with(self.placements[0]), self.budget)
        available = pools(self.graph, first, None)
        computing_s = min(pool.search.baseline.total_s for pool in available)
        for placement in self.placements:
            if computing_s + placement.transfer_s >= best_s:
                continue
            seconds = self.seconds_at_hand(placement)
            if seconds is not None and seconds < best_s:
                best, best_s = placement, seconds
        return best, best_s

    def seconds_at_hand(self, placement: Placement) -> float | None:
        """Return the seconds of the fastest step with a placement, of the candidates at hand.

        ``None``: none of them fits.
        """
        budget_bytes, context = self.budget.nbytes, self.context_with(placement)
        assert budget_bytes is not None
        first, *_ = budget_contexts(self.graph, context, self.budget)
        for each in (first, context):
            available = pools(self.graph, each, None)
            if least_of(available).least_bytes > budget_bytes:
                return None
        _, candidate = fastest(available, budget_bytes)
        return candidate.total_s + placement.transfer_s


MOST_SEARCHES = 3
"""How often a placement of less memory is searched for."""
