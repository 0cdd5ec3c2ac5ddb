"""Calls of steps that have no profile yet: they follow plans that hold least for their backward."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fxremat.errors import BudgetError, CostError
from fxremat.graph.graph import Graph
from fxremat.graph.pools import least_bytes
from fxremat.loop.loop import Loop
from fxremat.options.budget import constrained
from fxremat.planner.context.step_context import NO_CORRECTION, Correction, StepContext
from fxremat.planning.choose import must_fit
from fxremat.regions.call_trace import CallTrace
from fxremat.regions.joint_choice import (
    context_to_hold_least,
    context_to_hold_least_within,
    region_context,
)
from fxremat.regions.joint_plans import margin_bytes
from fxremat.regions.read_parameters import ReadParameters
from fxremat.units import format_bytes

MOST_CONTEXTS = 512
"""Contexts of a graph's unplanned calls that are kept; the oldest go first."""

Contexts = dict[tuple[int, StepContext], StepContext]
"""The context that an unplanned call is planned for, by the budget and its own context."""


@dataclass(slots=True)
class UnplannedCalls:
    """Makes and caches the contexts of calls whose step has no profile yet."""

    _contexts: weakref.WeakKeyDictionary[Graph, Contexts] = field(
        default_factory=weakref.WeakKeyDictionary
    )

    def context(
        self,
        loop: Loop,
        graph: Graph,
        context: StepContext,
        trace: CallTrace | None,
        *,
        aside_bytes: int,
        read: ReadParameters,
        keeps_all: bool,
    ) -> StepContext:
        """Return a context for which the best plan is the one that holds least for its backward.

        If the budget is resolved, and no other process must compute the same, it is the best of
        those that keep to the budget. What is held is rounded up a little, so that calls with
        nearly the same follow one plan.

        Args:
            loop: the training loop of the model.
            graph: the graph that is called.
            context: the context of the call.
            trace: its step so far; ``None``: the step has not begun.
            aside_bytes: bytes of the budget that are set aside.
            read: parameters that calls have read.
            keeps_all: whether the best plan is to keep everything instead, within the budget.
        """
        budget_bytes, host_bytes = loop.budget.nbytes, loop.free_host_bytes()
        is_resolved = budget_bytes is not None or loop.budget.grows
        is_first = trace is None or not (trace.calls and graph.started)
        if trace is None or is_first or not is_resolved or loop.peers is not None:
            return context_to_hold_least(graph, context, host_bytes)
        base_bytes = (trace.base_bytes or 0) + context.waiting_bytes + aside_bytes
        base_bytes += -base_bytes % max(1, int(margin_bytes(loop.budget)))
        later_bytes = read.later_gradient_bytes(loop.call.resident(), trace.calls)
        held = Correction(more_bytes=base_bytes, left_bytes=later_bytes)
        if keeps_all:
            given_bytes = graph.held(region_context(context, NO_CORRECTION)).given_bytes
            room = Correction(
                more_bytes=held.more_bytes - given_bytes,
                left_bytes=graph.tangent_bytes(context.sizes) + held.left_bytes,
            )
            return region_context(context, room, host_bytes)
        if budget_bytes is None:  # "min", before any plan was made
            budget_bytes = _least_bytes(loop, graph, context, held)
        key = budget_bytes, region_context(context, held, host_bytes)
        contexts = self._contexts.setdefault(graph, {})
        if key not in contexts:
            while len(contexts) >= MOST_CONTEXTS:
                contexts.pop(next(iter(contexts)))
            contexts[key] = context_to_hold_least_within(
                graph,
                context,
                budget_bytes,
                held,
                host_bytes,
                needed=must_fit(graph, loop.budget),
            )
        return contexts[key]


def shortfall_of_region(
    loop: Loop,
    graph: Graph,
    context: StepContext,
    base_bytes: int,
    parameters: Sequence[torch.Tensor],
) -> BudgetError | None:
    """Return the error that one region needs more than the budget by itself; ``None`` if it fits.

    Optimizer state of parameters that only other regions read is left out: it may never exist.

    Args:
        loop: the training loop of the model.
        graph: the graph that is called.
        context: the context of its first call, without feedback of earlier steps.
        base_bytes: what is held when the call begins, with what is set aside.
        parameters: the parameters that the graph computes a gradient of.
    """
    budget = loop.budget
    if budget.nbytes is None or budget.grows:
        return None
    others_bytes = loop.other_state_bytes(parameters)
    held, budget_bytes = Correction(more_bytes=base_bytes), budget.nbytes + others_bytes
    nbytes = _least_bytes(loop, graph, context, held, budget_bytes) - others_bytes
    if nbytes <= budget.nbytes:
        return None
    error = BudgetError(
        f"budget {budget.written.written!r} is {budget.nbytes} bytes "
        f"({format_bytes(budget.nbytes)}), but a region of this model needs at least "
        f"{nbytes} bytes ({format_bytes(nbytes)}), including the model's tensors, "
        f"with any plan. Give budget='min', or at least {nbytes}; the model's other regions "
        "may need more, which is measured when they run",
        least_budget_bytes=nbytes,
        code="FXR002",
    )
    free = graph.unconstrained()
    if free is None:
        return error
    free_bytes = None
    if free.peers is None:
        with contextlib.suppress(CostError):  # something cannot be measured
            free_bytes = _least_bytes(loop, free, context, held, budget_bytes) - others_bytes
    return constrained(error, least_bytes=free_bytes)


def _least_bytes(
    loop: Loop,
    graph: Graph,
    context: StepContext,
    held: Correction,
    budget_bytes: int | None = None,
) -> int:
    """Return the bytes of the least budget that fits a call by itself.

    Args:
        loop: the training loop of the model.
        graph: the graph that is called.
        context: the context of the call.
        held: what else is held.
        budget_bytes: further forms are searched until one keeps to it; ``None``: none is searched.
    """
    given_bytes = graph.held(region_context(context, NO_CORRECTION)).given_bytes
    correction = Correction(
        more_bytes=max(0, held.more_bytes - given_bytes),
        left_bytes=graph.tangent_bytes(context.sizes) + held.left_bytes,
    )
    needed = must_fit(graph, loop.budget)
    return least_bytes(graph, region_context(context, correction), budget_bytes, needed=needed)
