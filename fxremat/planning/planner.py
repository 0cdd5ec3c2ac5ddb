"""Plans for calls: new ones, saved ones, and plans that several processes follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from fxremat.cache.origins import differences, key_of, origin_of_plan, version_of
from fxremat.errors import BudgetError, CostError, PlanError, message_of
from fxremat.graph.compiled_plan import CompiledPlan
from fxremat.graph.dimensions import arguments_of
from fxremat.graph.further import allocator_rules, ensure_searched, link_of, list_forms, variants_at
from fxremat.graph.graph import Graph
from fxremat.graph.pools import pools
from fxremat.graph.shortfall import Shortfall
from fxremat.graph.variant import Variant
from fxremat.ir import Origin
from fxremat.options.budget import TrainingBudget, constrained
from fxremat.passes.emit.rewrite import BlockModules
from fxremat.planner.context.step_context import StepContext
from fxremat.planning.choose import LEAST, budget_contexts, choose, needs_in, usual_context
from fxremat.planning.emission import carry_out, emit, follow
from fxremat.planning.largest_size import advised
from fxremat.progress import LOG, WRITE
from fxremat.ranks.combine import agreed_context, agreed_graphs, agreed_link
from fxremat.report.plan import Plan
from fxremat.units import format_bytes

MOST_BLOCKS = 4096
"""Distinct blocks whose code is kept."""


def first_plan(
    graph: Graph,
    context: StepContext,
    budget: TrainingBudget,
    *,
    kept: Plan | None = None,
    least: bool = False,
) -> CompiledPlan:
    """Return the plan for the call that was captured, and release the tensors of that call.

    Args:
        graph: the captured graph.
        context: the context of that call.
        budget: the budget of the model; it is resolved here.
        kept: a saved plan to follow.
        least: return the plan of the least peak, before the budget is resolved.

    Raises:
        BudgetError: no candidate fits the budget.
        PlanError: ``kept`` is of another graph.
        HostMemoryError: the host memory is not available.
        CostError: an operation cannot be measured.
    """
    compiled = _followed(graph, kept, context) if kept else None  # nothing is measured before
    if not least:
        resolved_for, *_ = budget_contexts(graph, context, budget)
        budget.counted = dict(graph.described(resolved_for))
    if compiled is None:
        if graph.peers is not None and graph.options.host is not None:
            link = link_of(graph)
            assert link is not None
            graph.link = agreed_link(graph.peers, link)
        compiled = _by_first_process(
            graph, lambda: _resolved_first(graph, context, budget, least=least)
        )
        if least and graph.peers is not None:
            # Later plans are each process's: all of them start from the same candidates.
            ensure_searched(graph, graph.held(context))
    compiled.context = context
    graph.started = True
    budget.accepted |= not least
    if not least:
        budget.set(compiled.record.budget_bytes)
    graph.release()
    return compiled


def later_plan(
    graph: Graph, context: StepContext, budget: TrainingBudget, *, least: bool = False
) -> CompiledPlan:
    """Return the plan for a call after the first one.

    Args:
        graph: the captured graph.
        context: the context of the call.
        budget: the budget of the model.
        least: return the plan of the least peak, even above the budget.

    Raises:
        BudgetError: no candidate fits the budget.
        HostMemoryError: the host memory is not available.
        RankError: processes that must follow the same plan are at different calls.
    """
    peers = graph.together
    if peers is None or not graph.started:
        compiled = _planned(graph, context, budget, least=least)
    else:
        agreed_context(peers, repr((context, least)))
        compiled = _by_first_process(graph, lambda: _planned(graph, context, budget, least=least))
    compiled.context = context
    return compiled


def grow_budget(budget: TrainingBudget, error: BudgetError) -> bool:
    """Raise ``"min"`` to the bytes that a call needs; return whether the budget is ``"min"``.

    Args:
        budget: the budget of the model.
        error: raised by planning the call; it states the bytes.
    """
    nbytes = error.least_budget_bytes
    if nbytes is None or not budget.grows:
        return False
    LOG.info(
        "the budget %r is %s from now on, the least that a call needs",
        budget.written.written,
        format_bytes(nbytes),
    )
    budget.set(nbytes)
    return True


def shortfall_of(
    graph: Graph, context: StepContext, budget: TrainingBudget, error: BudgetError
) -> Shortfall:
    """Return why a call does not fit the budget, for a warning."""
    is_new = not graph.started or context.sizes != graph.sizes.hints
    return Shortfall.of(budget, dict(graph.described(context)), error, is_new=is_new)


def _resolved_first(
    graph: Graph, context: StepContext, budget: TrainingBudget, *, least: bool
) -> CompiledPlan:
    """Return the plan for the captured call; if none fits, grow the budget, warn, or raise."""
    try:
        return later_plan(graph, context, budget, least=least)
    except BudgetError as error:
        if grow_budget(budget, error):
            return later_plan(graph, context, budget)
        if not budget.may_raise:
            shortfall_of(graph, context, budget, error).warn()
            return later_plan(graph, context, budget, least=True)
        has_constraints = graph.has_constraints
        least_bytes = _unconstrained_bytes(graph, context, budget, error)
        graph.release()
        refused = advised(
            graph, error, context, budget, at=lambda own: usual_context(graph, own, budget)
        )
        if has_constraints:
            refused = constrained(refused, least_bytes=least_bytes)
        raise refused from None


def _unconstrained_bytes(
    graph: Graph, context: StepContext, budget: TrainingBudget, error: BudgetError
) -> int | None:
    """Return the least budget of the captured call without the decisions of a policy or of tags.

    ``None``: they decide nothing, several processes would have to agree on its costs, or something
    cannot be measured.
    """
    free = graph.unconstrained() if graph.peers is None else None
    if free is None or error.least_budget_bytes is None:
        return None
    try:
        contexts = budget_contexts(free, context, budget)
        pools(free, contexts[0], budget.nbytes or error.least_budget_bytes - 1)
        return needs_in(free, contexts).most_bytes
    except CostError:  # ``error`` is what matters
        return None


def _planned(
    graph: Graph, context: StepContext, budget: TrainingBudget, *, least: bool
) -> CompiledPlan:
    """Return the plan for a call; that for the captured call may come from the cache folder."""
    origin = _origin(graph, variants_at(graph, context.sizes)[0], context)
    is_first = context.sizes == graph.sizes.hints and graph.costs is None
    if not is_first or any(own.pool is not None for own in graph.variants):
        compiled = _made(graph, context, budget, origin, least=least)
    else:
        limit, host = LEAST if least else budget.now, graph.options.host
        key = key_of(
            origin,
            budget=(limit.nbytes, limit.share, budget.usual),
            host_dir=host.folder if host else None,
            ortools=version_of("ortools"),
            ranks=graph.peers is not None,  # which look at other forms
        )
        cached = _cached(graph, key)
        compiled = cached or _made(graph, context, budget, origin, least=least)
        if cached is None:
            graph.store.put("plan", key, Plan, compiled.completed())
    arguments = arguments_of(graph.joint.primals, graph.sizes.named(context.sizes), graph.places)
    compiled.record = replace(compiled.record, model=graph.model, arguments=arguments)
    return compiled


def _made(
    graph: Graph, context: StepContext, budget: TrainingBudget, origin: Origin, *, least: bool
) -> CompiledPlan:
    """Choose a candidate for a call, and emit it; return it as a plan in use."""
    if len(graph.modules.modules) > MOST_BLOCKS:  # of plans that may be gone
        graph.modules = BlockModules()
        graph.forget_blocks()
    chosen = choose(graph, context, budget, least=least)
    graph.progress(WRITE)
    compiled = emit(graph, context, chosen, origin)
    if graph.device.type == "cuda" and graph.inputs:
        torch.cuda.empty_cache()  # blocks that measuring has left would be handed out whole
    return compiled


def _cached(graph: Graph, key: str) -> CompiledPlan | None:
    """Return the plan under ``key`` in the cache folder; ``None``: there is none that applies."""
    plan = graph.store.get("plan", key, Plan)
    if plan is None:
        return None
    try:
        return follow(plan, graph, graph.variant(plan.form).blocks)
    except PlanError as error:
        LOG.warning("a cached plan is ignored: %s", error)
        return None


def _followed(graph: Graph, kept: Plan, context: StepContext) -> CompiledPlan:
    """Return a saved plan as a plan in use, after checking that it is of this graph and call."""
    if kept.origin is None or kept.measured is None:
        raise PlanError("this plan was not made from a model: compile without plan=", code="FXR605")
    line = graph.line(kept.form)
    now = replace(graph.origin(), options=kept.origin.options, held=kept.origin.held)
    variant = None
    if now == kept.origin:
        try:
            variant = graph.take(line, kept.form, costs=kept.measured)
        except CostError as error:
            raise PlanError(
                f"the plan cannot be followed: {message_of(error)}", code="FXR603"
            ) from error
        now = _origin(graph, variant, context)
    differs = tuple(differences(kept.origin, now))
    if differs or variant is None:
        raise PlanError(
            f"the plan is for another step: {'; '.join(differs)}. Compile with the model and "
            "options of the plan, or omit plan= to plan again",
            differs=differs,
            code="FXR602",
        )
    kept = replace(kept, measured_peak_bytes=None)  # another process measured it
    return follow(kept, graph, variant.blocks)


def _origin(graph: Graph, variant: Variant, context: StepContext) -> Origin:
    """Return what a plan depends on: the graph, device, options, and the bytes held at a call."""
    options = graph.options
    return origin_of_plan(
        variant.origin,
        graph.caller,
        graph.held(context),
        host=options.host,
        exact=options.exact,
        split=options.split,
        effort=options.effort,
        allocator=allocator_rules(graph),
    )


# Processes that follow the same plan


def _by_first_process(graph: Graph, find: Callable[[], CompiledPlan]) -> CompiledPlan:
    """Return, in all processes, the plan that ``find`` makes in the first one."""
    if graph.peers is None:
        return find()
    list_forms(graph)  # all processes: they agree on the costs of each
    made: list[CompiledPlan] = []

    def make() -> Plan:
        made.append(find())
        return made[0].completed()  # others cannot complete it

    with graph.peers.reporting_failures():
        plan = graph.peers.follow("a plan", Plan, make)
        compiled = made[0] if plan is None else _as_first(graph, plan)
        agreed_graphs(graph.peers, compiled.structure_digest if compiled else "none")
    assert compiled is not None  # the others' differ from none
    return compiled


def _as_first(graph: Graph, plan: Plan) -> CompiledPlan | None:
    """Return the first process's ``plan``, emitted in this one; ``None``: it does not apply."""
    try:
        variant = graph.variant(plan.form)
        compiled = carry_out(plan, graph, variant.blocks)
    except PlanError:
        return None
    compiled.record = replace(
        plan,
        origin=plan.origin and replace(plan.origin, code=variant.origin.code),
        forward_code=compiled.forward_code,
        backward_code=compiled.backward_code,
    )
    return compiled
