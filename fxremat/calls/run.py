"""One call of a captured graph: its forward begins and ends, its backward runs."""

from __future__ import annotations

import functools
import traceback
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor

from fxremat import torch_compat
from fxremat.calls.context import context_fields, context_of, shaping_sizes
from fxremat.calls.learn import learn_untaken, load_feedback, note_loss_gradient
from fxremat.calls.place import choose_placement
from fxremat.calls.plans import plan_at, refuse_changed_bits
from fxremat.calls.watch import (
    begin_count,
    check_bundles,
    check_count,
    check_tangents,
    compare_parts,
    released_tangents,
    watch_backward,
    watch_step,
)
from fxremat.graph.compiled_plan import CompiledPlan
from fxremat.graph.further import link_of
from fxremat.graph.graph import Graph
from fxremat.ir import TrainingState
from fxremat.loop.hosting import NOTHING
from fxremat.loop.loop import Loop
from fxremat.loop.placement import Placement
from fxremat.passes.parts.early_gradients import computed_again
from fxremat.planner.context.step_context import StepContext
from fxremat.planning.planner import first_plan
from fxremat.ranks.combine import AGREED, agreed_corrections
from fxremat.regions.regions import Regions
from fxremat.report.plan import Plan
from fxremat.runtime import cuda_graph
from fxremat.runtime.composite import BUNDLED
from fxremat.runtime.gradients import Gradients, with_gradients
from fxremat.runtime.steps import Step

_NOTHING_PASSED: Mapping[int, object] = MappingProxyType({})

_NO_PRIMALS: frozenset[int] = frozenset()


def plan_first_call(
    loop: Loop,
    regions: Regions,
    graph: Graph,
    inputs: Mapping[int, Tensor],
    *,
    kept: Plan | None = None,
) -> CompiledPlan:
    """Return the plan of the call that a graph was captured from, and cache it.

    Args:
        loop: the training loop of the model.
        regions: the regions of the model.
        graph: the graph that was captured.
        inputs: values of its primals, as far as they are real.
        kept: a saved plan to follow.

    Raises:
        BudgetError, PlanError, HostMemoryError, CostError: see :func:`first_plan`.
    """
    load_feedback(graph)
    values = [inputs.get(i) for i in range(graph.signature.primal_count)]
    if loop.hosting is not None and not loop.hosting.is_chosen:
        _place(loop, graph, values, kept=kept, several=regions.several)
        try:
            return plan_first_call(loop, regions, graph, inputs, kept=kept)
        except BaseException:
            loop.hosting.release()
            raise
    fields, _ = context_fields(loop, graph, values, graph.sizes.hints, several=regions.several)
    own = context_of(loop, graph, fields, several=regions.several)
    context = regions.unplanned_context(loop, graph, own) if regions.several else own
    compiled = first_plan(graph, context, loop.budget, kept=kept, least=regions.several)
    if regions.several:
        made = [v for i in graph.signature.gradients if isinstance(v := values[i], Tensor)]
        regions.check_least(loop, graph, own, made)
    graph.calls.plans[context] = compiled
    return compiled


def _place(
    loop: Loop, graph: Graph, values: Sequence[Any], *, kept: Plan | None, several: bool
) -> None:
    """Choose what optimizer state and gradients live in host memory, and move them there.

    All of them do if the step has several graphs, or if several processes must choose alike.

    Args:
        loop: the training loop of the model.
        graph: the first graph that was captured.
        values: the values of its primals.
        kept: a saved plan to follow, with what was in host memory when it was made.
        several: whether the step has several graphs.

    Raises:
        BudgetError, CostError, HostMemoryError: see :func:`fxremat.compile`.
    """
    hosting, link = loop.hosting, link_of(graph)
    assert hosting is not None and link is not None
    choices = hosting.choices(link)

    def context_with(placement: Placement) -> StepContext:
        hosting.placement = placement
        fields, _ = context_fields(loop, graph, values, graph.sizes.hints, several=False)
        return context_of(loop, graph, fields, several=False)

    try:
        chosen = choices[-1]
        host = graph.options.host
        if kept is not None:
            alike = (
                own for own in choices if _amounts(own.summary) == _amounts(kept.training_state)
            )
            chosen = next(alike, chosen)
        elif not (several or loop.peers is not None or (host is not None and host.all_state)):
            chosen = choose_placement(graph, loop.budget, choices, context_with)
    finally:
        hosting.placement = NOTHING
    with torch_compat.real_execution():  # this is inside of a capture
        hosting.use(chosen)
    graph.training_state = chosen.summary


def _amounts(placed: TrainingState | None) -> tuple[int, int]:
    """Return the bytes of state and of gradients in host memory."""
    return (placed.state_bytes, placed.gradient_bytes) if placed is not None else (0, 0)


def begin(
    loop: Loop, regions: Regions, graph: Graph, args: list[Any], *, ended_by: str = ""
) -> tuple[Step, torch_compat.BoxedCallable]:
    """Begin a call: plan it, and return its step and the function that runs its forward.

    Args:
        loop: the training loop of the model.
        regions: the regions of the model.
        graph: the graph that is called.
        args: its primals.
        ended_by: the user's line after which the step leaves the graph, and why.

    Raises:
        BudgetError: no plan fits; nothing has run.
    """
    calls, several = graph.calls, regions.several
    loop.note_call()
    loop.optimizers.end_steps()
    if not several:
        loop.watcher.end()
    number = next(calls.numbers)
    together = graph.together
    if together is not None and 1 < number <= AGREED:
        with loop.planning:
            graph.feedback.take(agreed_corrections(together, graph.feedback.corrections))
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
    BUNDLED.begin()
    if several:
        regions.begin_forward()
    else:
        watch_step(loop, graph, compiled, context, number, sizes)
        if calls.counts:
            count = begin_count(loop, graph, context)
    forward, backward = compiled.at(values)
    compare_parts(loop, graph, compiled, number, values)
    passed = graph.signature.passed
    step = Step(
        compiled,
        backward,
        owners=(loop, regions, graph),
        context=context,
        leaves=leaves,
        passed={i: args[own] for i, own in passed.items()} if passed else _NOTHING_PASSED,
        count=count,
        missing=context.existing - with_gradients(leaves)
        if loop.caller.accumulate
        else _NO_PRIMALS,
        kept=loop.in_flight.kept(loop.in_flight.waiting()) if context.kept_bytes else (),
    )
    return step, forward


def end_forward(step: Step, results: list[Any]) -> list[Any]:
    """Keep what a forward has saved in its step; return its outputs, followed by the step's token.

    The token is a tensor for autograd to save that refers to the step.

    Args:
        step: returned by :func:`begin`.
        results: the results of the emitted forward.
    """
    loop, regions, graph = _owners(step)
    output_count = graph.signature.output_count
    step.bundled_bytes = BUNDLED.total_bytes, BUNDLED.largest_bytes
    saved = results[output_count:]
    del results[output_count:]
    # Autograd makes the results refer to the step: it must not refer to them.
    returned = set(map(id, results))
    saved = [t.detach() if id(t) in returned else t for t in saved]
    compiled: CompiledPlan = step.plan
    held_bytes = compiled.held_bytes(step.context, graph.loss_point_bytes)
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

    A gradient that was already added to ``.grad`` is ``None``. Primals that are parts of one tensor
    have one gradient, at the first of them.

    Args:
        step: a step in flight.
        args: its token and the gradients of its outputs; emptied.

    Raises:
        BackwardError: what the step saved is gone, or was written to.
    """
    loop, regions, graph = _owners(step)
    calls, in_flight, compiled = graph.calls, loop.in_flight, step.plan
    watch_backward(loop, regions, graph, step)
    gradients = Gradients(
        step.leaves,
        places=graph.signature.gradients,
        own=graph.own_gradients,
        contributors=calls.contributors,
        others=in_flight.has_others(step),
        hosting=loop.hosting if loop.moves_gradients else None,
        assumed=step.context.taken,
        note_held=functools.partial(learn_untaken, loop, graph, step),
    )
    tangents = released_tangents(loop, graph, step, args)
    values: list[Any] = step.take()
    values.extend(args[1:])
    args.clear()
    values.append(gradients)
    with_loss = not (compiled.plain or regions.several) and bool(compiled.form.early_gradients)
    again = computed_again() if with_loss else 0
    BUNDLED.begin()
    try:
        if calls.on_cuda:
            with torch_compat.without_autotuning():
                step.backward(values)
        else:  # nothing is autotuned
            step.backward(values)
    except BaseException as error:
        abandon(values, error)
        raise
    if tangents is not None:
        check_tangents(loop, regions, graph, tangents)
    if regions.several:
        regions.end_backward(loop, step)
        if not calls.trained:
            calls.trained = True
            each = (step.leaves[i] for i in graph.signature.gradients)
            leaves = (leaf for leaf in each if leaf is not None)
            regions.trained.update((id(leaf), weakref.ref(leaf)) for leaf in leaves)
    elif loop.watcher.is_on and any(in_flight):
        loop.watcher.after(step)  # what follows is another step's
    if with_loss:
        note_loss_gradient(loop, graph, is_same=again == computed_again())
    made: list[Any] = gradients.finish()
    if step.count is not None:
        check_count(loop, step, step.count.peak_bytes())
    if step.bundled_bytes[0] or BUNDLED.total_bytes:
        check_bundles(loop, regions, graph, step)
    loop.budget.trained = True
    if gradients.asked_for:
        in_flight.returned(made)
    return _results(step, graph, made)


def _results(step: Step, graph: Graph, gradients: list[Any]) -> list[Any]:
    """Return what the caller of a backward asks for: gradients, and inputs passed through."""
    if step.passed:
        gradients = [step.passed.get(i, own) for i, own in enumerate(gradients)]
    asked_for = graph.calls.returned
    if not asked_for:
        return gradients
    return [None if i is None else gradients[i] for i in asked_for]


def abandon(values: list[Any], error: BaseException) -> None:
    """Free the tensors of an emitted function that has raised, even if the exception is kept.

    A notebook keeps the last exception. Its frames would keep the activations and the host memory
    of a step that an interrupt, or a device out of memory, has ended.

    Args:
        values: the arguments of the function; emptied.
        error: raised by the function; local variables of its frames are cleared.
    """
    values.clear()
    traceback.clear_frames(error.__traceback__)


def _owners(step: Step) -> tuple[Loop, Regions, Graph]:
    owners: tuple[Loop, Regions, Graph] = step.owners
    return owners
