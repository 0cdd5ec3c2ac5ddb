"""The plan that a call follows: a cached one, or a new one."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence

from torch import Tensor

from fxremat import torch_compat
from fxremat.calls.context import ContextFields, context_fields, context_of, new_workspace_bytes
from fxremat.calls.learn import leave_room_in_flight, relaxed, without_scaling
from fxremat.errors import BudgetError, CostError
from fxremat.graph.compiled_plan import CompiledPlan
from fxremat.graph.further import refuse
from fxremat.graph.graph import Graph
from fxremat.graph.shortfall import Shortfall, excess_bytes, warn
from fxremat.loop.loop import Loop
from fxremat.passes.joint.sizes import Values
from fxremat.planner.context.step_context import StepContext
from fxremat.planning.choose import fits, resolve_again
from fxremat.planning.largest_size import advised
from fxremat.planning.planner import grow_budget, later_plan, shortfall_of
from fxremat.progress import LOG
from fxremat.regions.regions import Regions
from fxremat.report.plan import Plan
from fxremat.units import format_bytes, format_seconds, plural

RESOLVED = 3
"""Steps, from the second one on, at which a share or ``"min"`` is resolved again."""


class _LessHeldError(Exception):
    """Raised if less memory is held now than when the context of a call was measured."""


def plan_at(
    loop: Loop,
    regions: Regions,
    graph: Graph,
    args: Sequence[object],
    sizes: Values,
    ended_by: str,
) -> tuple[StepContext, CompiledPlan, list[Tensor | None]]:
    """Plan a call; return its context, its plan, and the leaf tensor of each primal, if it is one.

    Args:
        loop: the training loop of the model.
        regions: the regions of the model.
        graph: the graph that is called.
        args: its primals.
        sizes: numbers of its symbols.
        ended_by: the user's line after which the step leaves the graph, and why.

    Raises:
        BudgetError: no plan fits; nothing has run.
    """
    fields, leaves = context_fields(loop, graph, args, sizes, several=regions.several)
    if regions.several:
        return *_plan_of_region(loop, regions, graph, args, fields, ended_by), leaves
    calls = graph.calls
    if loop.budget.is_relative or loop.optimizers.has_news:
        _resolve_budget(loop, graph, fields)
    now = (fields, graph.feedback.changes, loop.budget.nbytes)
    if calls.latest is not None and calls.latest[0] == now:
        return *calls.latest[1:], leaves
    while True:
        changes = graph.feedback.changes
        with contextlib.suppress(_LessHeldError):  # less each time
            context = context_of(loop, graph, fields, several=False)
            context, compiled = _plan_for(loop, graph, context)
            break
        fields, leaves = context_fields(loop, graph, args, sizes, several=False)
    # Steps in flight may be of other kinds, or have shared the budget among them.
    is_only = not context.waiting and loop.caller.in_flight == 1
    is_stable = is_only and calls.plans.get(context) is compiled and compiled.shortfall is None
    compiled.followed = context
    now = (fields, changes, loop.budget.nbytes)
    calls.latest = (now, context, compiled) if is_stable else None
    return context, compiled, leaves


def record_of(loop: Loop, graph: Graph, compiled: CompiledPlan) -> Plan:
    """Return the record of a plan, with the figures of the latest call that followed it."""
    with loop.planning:
        followed = compiled.followed
        is_other = followed is not None and followed != compiled.context
        if is_other and graph.together is None and compiled.shortfall is None:
            assert followed is not None
            with contextlib.suppress(BudgetError, CostError):
                compiled.restate(later_plan(graph, followed, loop.budget))
            graph.measuring_bytes = 0  # no step was running
        return compiled.completed()


def refuse_changed_bits(loop: Loop, graph: Graph) -> None:
    """Drop all plans, and use no run of operations again that gave other bits in parts."""
    with loop.planning:
        while graph.calls.changed_bits:
            refuse(graph, graph.calls.changed_bits.pop())
        graph.calls.forget()
        graph.feedback.changes += 1


def _plan_for(loop: Loop, graph: Graph, context: StepContext) -> tuple[StepContext, CompiledPlan]:
    """Return a cached or new plan for a call, and ``context`` changed to what the plan assumes."""
    with loop.planning:
        compiled = _cached(loop, graph, context) or _equivalent(graph, context)
        if compiled is None:
            context, compiled, shortfall = _new_plan(loop, graph, context)
            _announce(loop, graph, compiled, several=False)
            compiled.shortfall = shortfall
            over = compiled.record.counted_bytes > (loop.budget.nbytes or 0)
            if shortfall is None and over:
                return context, compiled  # for this time only
        if compiled.shortfall is not None:
            compiled.shortfall.warn()
        if context.sizes not in graph.estimated:  # else it is planned again, to be measured
            graph.calls.keep(context, compiled)
        return context, compiled


def _cached(loop: Loop, graph: Graph, context: StepContext) -> CompiledPlan | None:
    """Return the plan cached for exactly this context; ``None``: none, or the budget has changed.

    It is removed from the cache, for the caller to add it again as the latest.
    """
    compiled = graph.calls.plans.pop(context, None)
    shortfall = None if compiled is None else compiled.shortfall
    if shortfall is not None and shortfall.budget_bytes != loop.budget.nbytes:
        return None
    return compiled


def _new_plan(
    loop: Loop, graph: Graph, context: StepContext
) -> tuple[StepContext, CompiledPlan, Shortfall | None]:
    """Return a context, the plan made for it, and why it exceeds the budget; ``None``: it does not.

    If nothing fits while gradients, or outputs of earlier steps, exist, but something would if they
    were freed before the backward, they are assumed to be, until a step does not. The context says
    so.

    Steps in flight were planned without this one. If nothing fits with what they hold, but
    something would with the least that they could hold, this step takes the least that it can, and
    later steps like those in flight leave room for it.
    """
    budget, feedback = loop.budget, graph.feedback
    for each in (context, *relaxed(loop, graph, context)):
        # Cached candidates are asked first: a search measures, and takes memory for that.
        if fits(graph, each, budget, search=False):
            if each is not context:
                feedback.assume(each)
            return each, later_plan(graph, each, budget), None
    try:
        return context, later_plan(graph, context, budget), None
    except CostError:  # as in a profiler
        if not context.scaled:
            raise
        return _new_plan(loop, graph, without_scaling(loop, graph, context))
    except BudgetError as error:
        failed = error.with_traceback(None)
    for each in relaxed(loop, graph, context):
        if fits(graph, each, budget):
            feedback.assume(each)
            return each, later_plan(graph, each, budget), None
    if context.waiting or context.kept_bytes:
        torch_compat.drop_failed_backward()
        gc.collect()  # steps and outputs that are only in reference cycles
        waiting = list(loop.in_flight)
        held_bytes = sum(step.held_bytes for step in waiting)
        held_bytes += loop.in_flight.kept_bytes(waiting)
        if held_bytes < context.waiting_bytes + context.kept_bytes:
            raise _LessHeldError
    if leave_room_in_flight(loop, context, graph):
        compiled = later_plan(graph, context, budget, least=True)
        _warn_of_waiting(loop, context, compiled.record)
        return context, compiled, None
    if grow_budget(budget, failed):
        return context, later_plan(graph, context, budget), None
    if budget.may_raise:
        raise advised(graph, failed, context, budget)
    shortfall = shortfall_of(graph, context, budget, failed)
    return context, later_plan(graph, context, budget, least=True), shortfall


def _warn_of_waiting(loop: Loop, context: StepContext, plan: Plan) -> None:
    """Warn that a step exceeds the budget because earlier steps wait for their backward."""
    budget_bytes = loop.budget.nbytes or 0
    over = excess_bytes(plan.counted_bytes, budget_bytes)
    if over:
        warn(
            f"this step takes {plan.counted_bytes} bytes, {over} ({format_bytes(over)}) more "
            f"than its budget of {budget_bytes}: {context.waiting_bytes} bytes are held for the "
            f"backward of {plural(context.waiting, 'earlier step')}, planned without this one. "
            "From now on plans leave room for it",
            code="FXR107",
        )


def _equivalent(graph: Graph, context: StepContext) -> CompiledPlan | None:
    """Return a cached plan of another context that is as fast as any plan of this one.

    ``None``: there is none. It is a plan for a context in which no less is held, or one that
    recomputes nothing and computes nothing in parts, if it fits. On a CUDA device, whose allocator
    is simulated, sums of bytes do not show whether it does.
    """
    if graph.calls.on_cuda:
        return None
    now = graph.held(context)
    for compiled in reversed(graph.calls.plans.values()):
        plan, made_for = compiled.record, compiled.context
        if made_for.sizes != context.sizes or made_for.added != context.added:
            continue
        if not made_for.taken <= context.taken:
            continue
        if compiled.shortfall is not None:
            continue
        if context.scaled > made_for.scaled and plan.form.early_gradients:
            continue
        then = graph.held(made_for)
        if now.tangents_stay > then.tangents_stay:
            continue
        differences = (
            now.given_bytes - then.given_bytes,
            now.loss_point_more_bytes - then.loss_point_more_bytes,
            now.backward_bytes - then.backward_bytes,
        )
        more_bytes = sum(max(0, n) for n in differences)
        kept = not (compiled.recomputes or compiled.arena or plan.form.has_parts)
        is_within = plan.counted_bytes + more_bytes <= plan.budget_bytes
        if is_within and (min(differences) >= 0 or kept):
            return compiled
    return None


def _resolve_budget(loop: Loop, graph: Graph, fields: ContextFields) -> None:
    """Resolve a budget that is a share or ``"min"`` again, if its meaning may have changed.

    It may in the first steps, and when optimizer state changes. Processes that must follow the same
    plans keep the bytes that they have agreed on.
    """
    optimizers, budget, calls = loop.optimizers, loop.budget, graph.calls
    has_news, optimizers.has_news = optimizers.has_news, False
    if not budget.is_relative or budget.nbytes is None or graph.together is not None:
        return
    if calls.on_cuda:
        budget.add_workspaces(new_workspace_bytes(graph))
    is_early = budget.usual and budget.trained and calls.resolutions < RESOLVED
    if not (has_news or is_early):
        return
    with loop.planning:
        context = context_of(loop, graph, fields, several=False)
        if context.waiting or loop.caller.in_flight > 1:
            return
        *_, context = (context, *relaxed(loop, graph, context))
        resolve_again(graph, context, budget)
    calls.resolutions += 1


# Regions


def _plan_of_region(
    loop: Loop,
    regions: Regions,
    graph: Graph,
    args: Sequence[object],
    fields: ContextFields,
    ended_by: str,
) -> tuple[StepContext, CompiledPlan]:
    """Return the context and the plan of a call in a step of several graphs."""
    own = _context_in_region(loop, graph, fields)
    if own.kept_bytes and regions.will_choose(loop, graph, own):
        gc.collect()  # outputs that are only in reference cycles
        fields, _ = context_fields(loop, graph, args, fields[0], several=True)
        own = _context_in_region(loop, graph, fields)
    calls, budget = graph.calls, loop.budget
    with loop.planning, _failing_together(loop, regions):
        context, is_planned = regions.enter(loop, graph, own, args, ended_by)
        for made_for, latest in calls.followed:
            if made_for is context and is_planned:
                return context, latest
        compiled = calls.plans.pop(context, None)
        if compiled is None and regions.keeps_all(loop) and regions.varies:
            compiled = next((own for own in calls.plans.values() if own.plain), None)
        if compiled is None:
            try:
                compiled = later_plan(graph, context, budget, least=not is_planned)
            except BudgetError as error:
                if regions.together:
                    raise
                if is_planned and regions.grow_budget(loop, error.least_budget_bytes):
                    compiled = later_plan(graph, context, budget)
                else:
                    # More is held than in the steps that were watched.
                    regions.give_up_plan()
                    context = regions.unplanned_context(loop, graph, own)
                    compiled = later_plan(graph, context, budget, least=True)
            _announce(loop, graph, compiled, several=True)
        calls.keep(context, compiled)
        calls.follow(context, compiled)
        return context, compiled


def _context_in_region(loop: Loop, graph: Graph, fields: ContextFields) -> StepContext:
    """Return the context of a call in a step of several graphs.

    It is the same object as at the call before, if it is equal.
    """
    calls = graph.calls
    if calls.region_context is None or calls.region_context[0] != fields:
        calls.region_context = fields, context_of(loop, graph, fields, several=True)
    return calls.region_context[1]


@contextlib.contextmanager
def _failing_together(loop: Loop, regions: Regions) -> Iterator[None]:
    """Make an exception in the block fail all processes that must follow the same plans."""
    if regions.together and loop.peers is not None:
        with loop.peers.reporting_failures():
            yield
    else:
        yield


# New plans


def _announce(loop: Loop, graph: Graph, compiled: CompiledPlan, *, several: bool) -> None:
    """Log a new plan and call ``loop.on_new``; free host memory of plans that it replaces."""
    plan = compiled.record
    held = ", ".join(f"{format_bytes(n)} for {what}" for what, n in plan.also_held)
    LOG.info(
        "new plan: peak %s of %s, %s per step%s",
        format_bytes(plan.counted_bytes),
        format_bytes(plan.budget_bytes),
        format_seconds(plan.predicted_s),
        f"; also held: {held}" if held else "",
    )
    # Calls of regions have a correction each: it supersedes nothing.
    if loop.host is not None and not several and _supersedes(graph, compiled.context):
        loop.host.drop_idle()
    if loop.on_new is not None:
        loop.on_new(compiled)


def _supersedes(graph: Graph, context: StepContext) -> bool:
    """Return whether a cached plan of the same sizes, but another correction, has host memory."""
    return any(
        made_for.sizes == context.sizes
        and made_for.correction != context.correction
        and own.arena is not None
        for made_for, own in graph.calls.plans.items()
    )
