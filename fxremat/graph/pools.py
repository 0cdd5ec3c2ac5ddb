"""The pools of a graph's variants in a context."""

from __future__ import annotations

import itertools
from dataclasses import replace

from fxremat.errors import CostError
from fxremat.graph.conditions import Conditions
from fxremat.graph.further import (
    conditions_of,
    ensure_searched,
    grow,
    may_follow,
    search_again,
    search_aimed,
    search_last,
    search_next,
    search_unshared,
    searched,
    variants_at,
)
from fxremat.graph.graph import Graph
from fxremat.graph.pool import Pool, least_of
from fxremat.passes.joint.sizes import Values
from fxremat.planner.context.step_context import StepContext
from fxremat.planner.search.resized import least_bytes_at


def pools(
    graph: Graph,
    context: StepContext,
    budget_bytes: int | None,
    *,
    run: bool = True,
    bits: bool = True,
    needed: bool = True,
) -> list[Pool]:
    """Return the pool of each variant in a context, the traced variant first.

    The candidates of the capture's sizes are evaluated again in the context. If none of them fits
    the budget, new ones and further variants are searched for.

    Args:
        graph: the captured graph.
        context: the context of a call.
        budget_bytes: the peak that a candidate must keep to; ``None``: nothing is searched for.
        run: whether to measure at the context's sizes what does not follow from the capture's;
            otherwise it is scaled, which may be a little off.
        bits: whether to compare at those sizes if parts keep their bits; otherwise they are assumed
            to.
        needed: whether to search however long it takes; otherwise only as far as the effort allows.

    Raises:
        CostError: an operation cannot be measured, and no plan was made before.
    """
    call = conditions_of(graph, context)
    are_new = ensure_searched(graph, call.held_at_capture) and run and call.is_at_capture
    evaluated = _evaluated(graph, call, budget_bytes, run=run, bits=bits)
    if not run or budget_bytes is None or least_of(evaluated).least_bytes <= budget_bytes:
        return evaluated
    count = len(graph.variants)
    try:
        if not are_new and (needed or graph.further.spending.allows_search(graph.joint, count)):
            again = search_again(graph, call, bits=bits)
            evaluated = [*_with_sent(graph, call.sizes, again), *evaluated]
        evaluated = _widened(graph, call, budget_bytes, evaluated, bits=bits, needed=needed)
    except CostError:  # as in a profiler: a running job goes on with what was measured before
        if not graph.started:
            raise
        evaluated = _evaluated(graph, call, budget_bytes, run=run, bits=bits)
    if context.scaled and least_of(evaluated).least_bytes > budget_bytes:
        return pools(graph, replace(context, scaled=False), budget_bytes, needed=needed)
    return evaluated


def _evaluated(
    graph: Graph, call: Conditions, budget_bytes: int | None, *, run: bool, bits: bool
) -> list[Pool]:
    """Return the candidates of the capture's sizes, evaluated for a call; see :func:`pools`."""
    resized = variants_at(graph, call.sizes, run=run, bits=bits)
    evaluated = [
        own.pool.at(variant.measured, call.held, budget_bytes=budget_bytes)
        for own, variant in zip(graph.variants, resized, strict=True)
        if own.pool is not None and may_follow(graph, call, own.form)
    ]
    return _with_sent(graph, call.sizes, evaluated) if run else evaluated


def _widened(
    graph: Graph,
    call: Conditions,
    budget_bytes: int,
    result: list[Pool],
    *,
    bits: bool,
    needed: bool,
) -> list[Pool]:
    """Search further variants until a candidate fits or none is left; return all pools.

    For the arguments see :func:`pools`.
    """
    while (least_bytes := least_of(result).least_bytes) > budget_bytes:
        is_new = search_unshared(graph, call, needed=needed) or search_aimed(
            graph, call, result, budget_bytes, needed=needed
        )
        is_new = is_new or search_next(graph, call, below_bytes=least_bytes, needed=needed)
        # Last, what a budget of any size would lead to: errors name the least of that.
        if not is_new and not search_aimed(graph, call, result, 0, needed=needed):
            break
        result = _evaluated(graph, call, budget_bytes, run=True, bits=bits)
        if not call.is_at_capture and least_of(result).least_bytes > budget_bytes:
            search_last(graph, call, bits=bits)
            result = _evaluated(graph, call, budget_bytes, run=True, bits=bits)
    return result


def least_bytes(
    graph: Graph,
    context: StepContext,
    budget_bytes: int | None,
    *,
    bits: bool = True,
    needed: bool = True,
) -> int:
    """Return the bytes of the least budget that fits a call; for arguments see :func:`pools`."""
    result = pools(graph, context, budget_bytes, bits=bits, needed=needed)
    return least_of(result).least_bytes


def room_bytes(graph: Graph, context: StepContext) -> int:
    """Return the least bytes that any plan allocates beyond what is held throughout the step."""
    return min(p.least_bytes - p.held.given_bytes for p in pools(graph, context, None))


def rough_least_bytes(graph: Graph, context: StepContext) -> int:
    """Return about the least budget that fits a call, from cached candidates; nothing is run."""
    call, each = conditions_of(graph, context), []
    ensure_searched(graph, call.held_at_capture)
    for own, variant in zip(graph.variants, graph.at(call.sizes, run=False), strict=True):
        if own.pool is None:
            continue
        if own.pool.transfers is None:
            each.append(least_bytes_at(own.pool.search, variant.measured, call.held))
        else:
            each.append(own.pool.at(variant.measured, call.held, budget_bytes=None).least_bytes)
    return min(each)


def least_bytes_from_scratch(
    graph: Graph,
    context: StepContext,
    budget_bytes: int,
    *,
    bits: bool = True,
    exact_parts: bool = True,
) -> int:
    """Return the least budget that would fit a call if the graph were first captured at its sizes.

    Cached candidates are not used. Variants are searched up to the first that fits.

    Args:
        graph: the captured graph.
        context: the context of the call.
        budget_bytes: what the peak may reach.
        bits: whether to compare if parts keep their bits, of variants that fit otherwise.
        exact_parts: whether to consider variants whose parts must keep their bits.
    """
    each, held = [], graph.held(context)
    traced, *others = graph.variants
    if not exact_parts:
        others = [own for own in others if not own.form.keeps_bits]
    for own in (traced, *reversed(others)):  # with most in parts first
        asks = own.form.keeps_bits
        for run in (False, True) if asks and bits else (not asks,):
            variant = graph.resized(own, context.sizes, run=run)
            nbytes = searched(graph, variant, None, held).least_bytes
            if nbytes > budget_bytes:
                break
        each.append(nbytes)
        if nbytes <= budget_bytes:
            break
    return min(each)


def _with_sent(graph: Graph, sizes: Values, result: list[Pool]) -> list[Pool]:
    """Return copies of the pools that also consider transfers of plans for other contexts."""
    if sizes not in graph.sent:
        return result
    each = itertools.zip_longest(result, graph.sent[sizes], fillvalue=())  # variants came later
    return [pool.with_sent(sent) for pool, sent in each if pool]


def all_pools(graph: Graph, context: StepContext) -> list[Pool]:
    """Search all variants of a graph; return their pools in ``context``, the traced one first."""
    while grow(graph, context):
        pass
    return pools(graph, context, None)
