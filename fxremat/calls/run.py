"""One call of a captured graph: its forward begins and ends, its backward runs."""

from __future__ import annotations

import functools
import traceback
import weakref
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from torch import Tensor

from fxremat import torch_compat
from fxremat.calls.find import context_of, find, shaping_sizes
from fxremat.calls.learn import (
    Taken,
    backward_began,
    checks_tangents,
    foresaw_loss,
    gradients_came,
    learn,
    load_feedback,
    saw_tangents,
)
from fxremat.calls.plans import plan_at, refuse_changed_bits
from fxremat.graph.compiled_plan import CompiledPlan
from fxremat.graph.graph import Graph
from fxremat.graph.shortfall import warn_counted
from fxremat.loop.comparison import runs_in
from fxremat.loop.loop import Loop
from fxremat.loop.outside import FIRST
from fxremat.passes.joint.sizes import Values
from fxremat.passes.split.beside import computed_anew
from fxremat.passes.split.parts import Parts
from fxremat.planner.context import StepContext
from fxremat.planning.planner import first_plan
from fxremat.ranks.combine import AGREED, agreed_corrections
from fxremat.regions.regions import Regions
from fxremat.report.plan import Plan
from fxremat.runtime import cuda_graph
from fxremat.runtime.counted import Count
from fxremat.runtime.gradients import Gradients, with_gradients
from fxremat.runtime.profile import WATCH_EVERY, MemoryProfile
from fxremat.runtime.steps import Step

_NONE: Mapping[int, object] = MappingProxyType({})

_NO_PRIMALS: frozenset[int] = frozenset()


def plan_first_call(
    loop: Loop,
    regions: Regions,
    graph: Graph,
    inputs: Mapping[int, Tensor],
    *,
    kept: Plan | None = None,
) -> CompiledPlan:
    """Return the plan of the call that a graph was captured from.

    Args:
        loop: around the model.
        regions: of the model.
        graph: that was captured.
        inputs: values of its primals, where they are real.
        kept: a saved plan to follow.

    Raises:
        BudgetError, PlanError, HostMemoryError, …: as planning raises them.
    """
    load_feedback(graph)
    values = [inputs.get(i) for i in range(graph.signature.primal_count)]
    found, _ = find(loop, graph, values, graph.sizes.hints)
    own = context_of(loop, graph, found, several=regions.several)
    context = regions.unplanned_context(loop, graph, own) if regions.several else own
    compiled = first_plan(graph, context, loop.budget, kept=kept, least=regions.several)
    if regions.several:
        made = [v for i in graph.signature.gradients if isinstance(v := values[i], Tensor)]
        regions.check_least(loop, graph, own, made)
    compiled.context = context
    graph.calls.plans[context] = compiled
    return compiled


def begin(
    loop: Loop, regions: Regions, graph: Graph, args: list[Any], *, ended_by: str = ""
) -> tuple[Step, torch_compat.BoxedCallable]:
    """Begin a call: return its step in flight, and what runs its forward.

    Args:
        loop: around the model.
        regions: of the model.
        graph: that is called.
        args: its primals.
        ended_by: the user's line after which the step leaves the graph, and why.

    Raises:
        BudgetError: no plan fits; nothing has run.
    """
    calls, several = graph.calls, regions.several
    loop.called()
    loop.optimizers.watcher.end()
    if not several:
        loop.watcher.end()
    number = next(calls.numbers)
    together = graph.together
    if together is not None and 1 < number <= AGREED:
        with loop.planning:
            graph.feedback.take(agreed_corrections(together, graph.feedback.seen))
    if calls.changed_bits:
        refuse_changed_bits(loop, graph)
    values = graph.sizes.values(args) if graph.sizes.hints else ()
    sizes = shaping_sizes(graph, values) if values else values
    context, compiled, leaves = plan_at(loop, regions, graph, args, sizes, ended_by)
    if graph.measuring_bytes:
        measuring_bytes, graph.measuring_bytes = graph.measuring_bytes, 0
        loop.check_measuring(measuring_bytes, args, graph.device)
    if compiled.arena is not None:
        cuda_graph.refuse_host_memory(compiled.arena.nbytes)
    count = None
    if several:
        regions.begin_forward()
    else:
        _watch(loop, graph, compiled, context, number, sizes)
        if calls.counts:
            count = _begin_count(graph, context)
    forward, backward = compiled.at(values)
    _compare(loop, graph, compiled, number, values)
    passed = graph.signature.passed
    step = Step(
        compiled,
        backward,
        owners=(loop, regions, graph),
        context=context,
        leaves=leaves,
        passed={i: args[own] for i, own in passed.items()} if passed else _NONE,
        count=count,
        missing=context.existing - with_gradients(leaves)
        if loop.caller.accumulate
        else _NO_PRIMALS,
        kept=loop.in_flight.kept(loop.in_flight.waiting()) if context.kept_bytes else (),
    )
    return step, forward


def end_forward(step: Step, results: list[Any]) -> list[Any]:
    """Return the outputs of a forward that has run, and the step's token.

    Args:
        step: that :func:`begin` returned.
        results: of the emitted forward.
    """
    loop, regions, graph = _owners(step)
    output_count = graph.signature.output_count
    saved = results[output_count:]
    del results[output_count:]
    # Autograd makes the results lead to the step: it must not lead to them.
    returned = set(map(id, results))
    saved = [t.detach() if id(t) in returned else t for t in saved]
    compiled: CompiledPlan = step.plan
    held_bytes = compiled.held_bytes(step.context, graph.turn_bytes)
    step.keep(saved, [results[i] for i in graph.made_outputs], held_bytes=held_bytes)
    loop.in_flight.add(step)
    if regions.several:
        regions.end_forward(loop, step)
    else:
        loop.watcher.left(step)
    results.append(step.token())
    return results


def run_backward(step: Step, args: list[Any]) -> Sequence[Any]:
    """Run the backward of a step, and return the gradients that its caller asks for.

    A gradient that is handed over to its parameter is ``None``. Of primals that are parts of a
    tensor without one, the first stands for all.

    Args:
        step: in flight.
        args: its token and the tangents; emptied.

    Raises:
        BackwardError: what the step needs is gone, or was written to.
    """
    loop, regions, graph = _owners(step)
    calls, in_flight, compiled = graph.calls, loop.in_flight, step.plan
    _note_begin(loop, regions, graph, step)
    gradients = Gradients(
        step.leaves,
        places=graph.signature.gradients,
        own=graph.own_gradients,
        contributors=calls.contributors,
        others=in_flight.has_others(step),
    )
    tangents = _tangents(loop, graph, step, args)
    values: list[Any] = step.take()
    values.extend(args[1:])
    args.clear()
    values.append(gradients)
    with_loss = not (compiled.plain or regions.several) and bool(compiled.form.beside)
    again = computed_anew() if with_loss else 0
    try:
        if calls.on_cuda:
            with torch_compat.without_autotuning():
                step.backward(values)
        else:  # nothing is tried out
            step.backward(values)
    except BaseException as error:
        abandon(values, error)
        raise
    if tangents is not None:
        _note_tangents(loop, regions, graph, tangents)
    if regions.several:
        regions.end_backward(loop, step)
        if not calls.trained:
            calls.trained = True
            made = (step.leaves[i] for i in graph.signature.gradients)
            leaves = (leaf for leaf in made if leaf is not None)
            regions.trained.update((id(leaf), weakref.ref(leaf)) for leaf in leaves)
    elif loop.watcher.is_on and any(in_flight):
        loop.watcher.after(step)  # what follows is another step's
    if with_loss:
        foresaw_loss(loop, graph, is_same=again == computed_anew())
    returned: list[Any] = gradients.finish()
    if step.count is not None:
        _check_count(loop, step, step.count.peak_bytes())
    loop.budget.trained = True
    if gradients.asked_for:
        in_flight.returned(returned)
    if step.passed:
        returned = [step.passed.get(place, own) for place, own in enumerate(returned)]
    if len(calls.returned) == len(returned):
        return returned
    return [returned[place] for place in calls.returned]


def abandon(values: list[Any], error: BaseException) -> None:
    """Free what an emitted function was computing when it raised, whoever keeps the exception.

    A notebook keeps the last one, and with its frames the activations and the host memory of a
    step that an interrupt, or a device short of memory, has ended.

    Args:
        values: that it was called with; emptied.
        error: that it has raised.
    """
    values.clear()
    traceback.clear_frames(error.__traceback__)


def _owners(step: Step) -> tuple[Loop, Regions, Graph]:
    owners: tuple[Loop, Regions, Graph] = step.owners
    return owners


# Watching


def _watch(
    loop: Loop,
    graph: Graph,
    compiled: CompiledPlan,
    context: StepContext,
    number: int,
    sizes: Values,
) -> None:
    """Watch a step whose plan is new, or whose turn has come."""
    teaches = graph.together is None or number < AGREED
    is_due = number % WATCH_EVERY == 0 or (loop.outside.nbytes and number <= FIRST)
    if is_due and not compiled.watches:
        compiled.watches = 1
    if compiled.watches and teaches and graph.feedback.are_watched(sizes):
        is_first = not loop.budget.trained
        report = functools.partial(_learn, loop, graph, context, compiled, is_first=is_first)
        compiled.watches -= loop.watcher.begin(graph.device, report)


def _learn(
    loop: Loop,
    graph: Graph,
    context: StepContext,
    compiled: CompiledPlan,
    profile: MemoryProfile,
    *,
    is_first: bool,
) -> None:
    """Learn from a step that was watched to its end."""
    if profile.taken_bytes is not None:
        compiled.watches = 0
    plan = compiled.record
    held_bytes = plan.predicted_held_bytes
    planned = Taken(held_bytes, held_bytes - graph.given_bytes(compiled.context))
    peak_bytes = learn(loop, graph, context, planned, profile, is_first=is_first)
    if profile.taken_bytes is None:  # another step began before its backward had ended
        loop.check_outside(max(peak_bytes, plan.counted_bytes), planned=True)
    else:
        loop.check_outside(peak_bytes)
    with loop.planning:
        if profile.taken_bytes is not None and peak_bytes != plan.measured_peak_bytes:
            compiled.record = replace(compiled.record, measured_peak_bytes=peak_bytes)


def _begin_count(graph: Graph, context: StepContext) -> Count | None:
    """Begin to count what a call takes."""

    def held_bytes() -> int:
        """Return what is given without what is allocated later, as a correction has shown."""
        return graph.given_bytes(context) - graph.late_bytes - context.correction.more_bytes

    return Count.begin(graph.device, held_bytes)


def _check_count(loop: Loop, step: Step, peak_bytes: int | None) -> None:
    """Warn of a step that took more than its budget as the allocator has counted; watch the next.

    Of several steps at once the allocator says nothing.
    """
    compiled: CompiledPlan = step.plan
    budget_bytes = loop.budget.nbytes or 0
    most_bytes = max(budget_bytes, compiled.record.counted_bytes)
    if peak_bytes is None or peak_bytes <= most_bytes or loop.watcher.is_watching(step):
        return
    if step.context.waiting or step.number != loop.in_flight.latest:
        return
    compiled.watches += 1
    warn_counted(peak_bytes, budget_bytes)


def _note_begin(loop: Loop, regions: Regions, graph: Graph, step: Step) -> None:
    """Note what exists when a backward begins that did not when its forward ran."""
    if regions.several:
        regions.begin_backward(loop, step)
    context: StepContext = step.context
    watched = loop.watcher.is_watching(step)
    if regions.several and not watched:
        return
    now = with_gradients(step.leaves)
    if watched:
        gone = context.existing - now
        nbytes = [
            replace(context, existing=those).gradient_bytes(graph.joint)
            for those in (gone, gone & step.missing)
        ]
        outputs = [alive.nbytes for alive in step.kept if not alive]
        loop.watcher.back(step, gone=nbytes[0], never=nbytes[1], released=outputs)
    sums = graph.calls.contributors.summing == torch_compat.current_backward()
    nothing = not (now or sums or context.existing or context.kept_bytes)
    if nothing or regions.several:
        return
    are_held = bool(now & context.existing)
    backward_began(loop, graph, context, outputs=any(step.kept), gradients=are_held)
    came: list[Set[int]] = [now - context.existing]
    if sums:
        # Autograd holds those of other steps, which may be all that was planned for.
        came.append(graph.signature.gradients.keys() - (context.existing - now))
    if any(came):
        gradients_came(loop, graph, context, came)


def _tangents(
    loop: Loop, graph: Graph, step: Step, args: Sequence[Any]
) -> list[torch_compat.StorageAlive] | None:
    """Return gradients of outputs that a backward is to release; ``None``: nobody checks.

    That of a loss, one number, is held by who calls ``backward()``: plans have room for it.
    """
    if not checks_tangents(graph, watched=loop.watcher.is_watching(step)):
        return None
    joint = graph.joint
    return [
        torch_compat.StorageAlive(tangent)
        for node, tangent in zip(joint.tangents, args[1:], strict=True)
        if isinstance(tangent, Tensor)
        and joint.released.issuperset(joint.storages.of_node[node])
        and tangent.numel() > 1
    ]


def _note_tangents(
    loop: Loop, regions: Regions, graph: Graph, tangents: Sequence[torch_compat.StorageAlive]
) -> None:
    """Note whether a backward has released the gradients of its outputs."""
    is_each_its_own = len({tangent.key for tangent in tangents}) == len(tangents)
    released = is_each_its_own and not any(tangents)
    saw_tangents(loop, graph, released=released)
    if not released and regions.several:
        regions.choose_again()


def _compare(loop: Loop, graph: Graph, compiled: CompiledPlan, number: int, values: Values) -> None:
    """Compare a run in parts of a plan with its operations at once, where that is asked for."""
    comparison, plan = loop.comparison, compiled.record
    if not comparison.every:
        return
    if not any(loop.in_flight):
        comparison.cancel()
    if not plan.form.has_parts or not comparison.is_due(number, measured=loop.watcher.is_on):
        return
    sizes = graph.sizes.named(values)
    runs = runs_in(plan.form, [node.target for node in graph.variant(plan.form).line.nodes])
    traced = graph.traced(values).measured

    def takes_bytes(run: Parts) -> int:
        workspace_bytes = traced.most_workspace_bytes(run.whole)
        return run.compared_bytes(sizes, workspace_bytes=workspace_bytes)

    room_bytes, refuse = plan.budget_bytes - plan.counted_bytes, graph.calls.changed_bits.append
    comparison.begin(runs, number, room_bytes, takes_bytes=takes_bytes, refuse=refuse)
