"""What is measured and checked while a step of one graph runs."""

from __future__ import annotations

import functools
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Any

from torch import Tensor

from fxremat import torch_compat
from fxremat.calls.learn import (
    PlannedBytes,
    checks_tangents,
    learn,
    learn_bundles,
    learn_new_gradients,
    learn_what_is_held,
    note_tangents,
)
from fxremat.graph.compiled_plan import CompiledPlan
from fxremat.graph.graph import Graph
from fxremat.graph.shortfall import warn_counted
from fxremat.loop.comparison import runs_in
from fxremat.loop.loop import Loop
from fxremat.loop.outside import FIRST
from fxremat.passes.joint.sizes import Values
from fxremat.passes.parts.parts import Parts
from fxremat.planner.context.step_context import StepContext
from fxremat.ranks.combine import AGREED
from fxremat.regions.regions import Regions
from fxremat.runtime.composite import BUNDLED
from fxremat.runtime.counted import Count
from fxremat.runtime.gradients import with_gradients
from fxremat.runtime.profile import WATCH_EVERY, MemoryProfile
from fxremat.runtime.steps import Step


def watch_step(
    loop: Loop,
    graph: Graph,
    compiled: CompiledPlan,
    context: StepContext,
    number: int,
    sizes: Values,
) -> None:
    """Begin to measure the memory of a step, if it is one of the first of its plan or due later.

    Args:
        loop: the training loop of the model.
        graph: the graph that is called.
        compiled: the plan of the call.
        context: the context of the call.
        number: the number of the call: every so many calls are due.
        sizes: numbers of the graph's symbols.
    """
    may_learn = graph.together is None or number < AGREED
    is_due = number % WATCH_EVERY == 0 or (loop.outside.nbytes and number <= FIRST)
    if is_due and not compiled.watches_left:
        compiled.watches_left = 1
    if compiled.watches_left and may_learn and graph.feedback.are_watched(sizes):
        is_first = not loop.budget.trained
        state_bytes = loop.optimizers.state_bytes
        own = functools.partial(_learn, loop, graph, context, compiled, is_first=is_first)
        report = functools.partial(own, state_bytes=state_bytes)
        compiled.watches_left -= loop.watcher.begin(graph.device, report)


def _learn(
    loop: Loop,
    graph: Graph,
    context: StepContext,
    compiled: CompiledPlan,
    profile: MemoryProfile,
    *,
    is_first: bool,
    state_bytes: int,
) -> None:
    """Correct later plans by the measured memory of a step, and record its peak in its plan.

    Optimizers that step in the backward make their state in the first step. It is not the step's:
    plans that count it have done so before, and others will.

    Args:
        loop: the training loop of the model.
        graph: the graph of the step.
        context: the context of its call.
        compiled: the plan that it followed.
        profile: what it took.
        is_first: whether no step ran before it.
        state_bytes: bytes of optimizer state when it began.
    """
    grown_bytes = max(0, loop.optimizers.state_bytes - state_bytes)
    later_bytes = loop.optimizers.beyond(graph.optimizer_bytes) - context.state_bytes
    later_bytes = min(grown_bytes, max(0, later_bytes))
    counted_bytes = grown_bytes - later_bytes
    if counted_bytes:
        profile = replace(profile, backward_bytes=profile.backward_bytes - counted_bytes)
    if profile.taken_bytes is not None:
        compiled.watches_left = int(counted_bytes > 0)
    plan = compiled.record
    held_bytes = plan.predicted_held_bytes
    own_bytes = held_bytes - graph.held(compiled.context).given_bytes
    planned = PlannedBytes(held_bytes, own_bytes + later_bytes)
    peak_bytes = learn(loop, graph, context, planned, profile, is_first=is_first)
    if profile.taken_bytes is None:  # another step began before its backward had ended
        loop.check_outside(max(peak_bytes, plan.counted_bytes), planned=True)
    else:
        loop.check_outside(peak_bytes)
    with loop.planning:
        if profile.taken_bytes is not None and peak_bytes != plan.measured_peak_bytes:
            compiled.record = replace(compiled.record, measured_peak_bytes=peak_bytes)


def begin_count(loop: Loop, graph: Graph, context: StepContext) -> Count | None:
    """Begin to count the peak of a call by the allocator's counters; ``None``: it has none."""

    def held_bytes() -> int:
        """Return the bytes held when the call begins, by its context."""
        late_bytes = graph.late_bytes + context.hook_bytes
        return graph.held(context).given_bytes - late_bytes - context.correction.more_bytes

    def counted_state_bytes() -> int:
        """Return the bytes of existing optimizer state that plans count before it exists."""
        optimizers = loop.optimizers
        return optimizers.state_bytes - optimizers.beyond(graph.optimizer_bytes)

    return Count.begin(graph.device, held_bytes, counted_state_bytes)


def check_count(loop: Loop, step: Step, peak_bytes: int | None) -> None:
    """Warn if a step took more than its budget by the allocator's count, and measure the next one.

    If several steps are in flight, the allocator has no separate counts, and nothing is checked.

    Args:
        loop: the training loop of the model.
        step: the step, after its backward.
        peak_bytes: its counted peak; ``None``: it is not known.
    """
    compiled: CompiledPlan = step.plan
    budget_bytes = loop.budget.nbytes or 0
    most_bytes = max(budget_bytes, compiled.record.counted_bytes)
    if peak_bytes is None or peak_bytes <= most_bytes or loop.watcher.is_watching(step):
        return
    if step.context.waiting or step.number != loop.in_flight.latest:
        return
    compiled.watches_left += 1
    warn_counted(peak_bytes, budget_bytes)


def check_bundles(loop: Loop, regions: Regions, graph: Graph, step: Step) -> None:
    """Check what a step took for values whose sizes depend on data against earlier steps.

    If it took more, and its memory was not measured, later plans leave room for that, and the next
    step is measured. If it may have exceeded the budget, a warning is given.

    Args:
        loop: the training loop of the model.
        regions: the regions of the model.
        graph: the graph of the step.
        step: the step, after its backward.
    """
    total_bytes, largest_bytes = step.bundled_bytes
    taken = total_bytes + BUNDLED.total_bytes, max(largest_bytes, BUNDLED.largest_bytes)
    compiled = step.plan
    if not taken[0] or step.context.waiting or step.number != loop.in_flight.latest:
        return
    most = compiled.bundled_bytes.get(step.context.sizes, taken)
    compiled.bundled_bytes[step.context.sizes] = (max(most[0], taken[0]), max(most[1], taken[1]))
    more_bytes = max(taken[0] - most[0], taken[1] - most[1])
    if more_bytes <= 0 or loop.watcher.is_watching(step):
        return
    if regions.several:
        regions.watch_next()
    else:
        compiled.watches_left = max(compiled.watches_left, 1)
        learn_bundles(loop, graph, step.context, compiled.record, more_bytes)


def watch_backward(loop: Loop, regions: Regions, graph: Graph, step: Step) -> None:
    """Learn which gradients and outputs were made or freed between a forward and its backward."""
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
            graph.gradient_bytes(context.sizes, those) for those in (gone, gone & step.missing)
        ]
        outputs = [alive.nbytes for alive in step.kept if not alive]
        loop.watcher.back(step, gone=nbytes[0], never=nbytes[1], released=outputs)
    sums = graph.calls.contributors.summing == torch_compat.current_backward()
    is_unchanged = not (now or sums or context.existing or context.kept_bytes)
    if is_unchanged or regions.several:
        return
    are_held = bool(now & context.existing)
    learn_what_is_held(loop, graph, context, outputs=any(step.kept), gradients=are_held)
    new: list[Set[int]] = [now - context.existing]
    if sums:
        # Autograd holds gradients of other steps, which may be all that the plan has room for.
        new.append(graph.signature.gradients.keys() - (context.existing - now))
    if any(new):
        learn_new_gradients(loop, graph, context, new)


def released_tangents(
    loop: Loop, graph: Graph, step: Step, args: Sequence[Any]
) -> list[torch_compat.StorageAlive] | None:
    """Return the gradients of outputs that a backward must release, without keeping them alive.

    ``None``: this backward is not checked. The gradient of a scalar loss is left out: the caller of
    ``backward()`` holds it, and plans have room for it.

    Args:
        loop: the training loop of the model.
        graph: the graph of the step.
        step: the step whose backward begins.
        args: its token and the gradients of its outputs.
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


def check_tangents(
    loop: Loop, regions: Regions, graph: Graph, tangents: Sequence[torch_compat.StorageAlive]
) -> None:
    """Record whether ``tangents``, gradients of outputs, were released by the end of a backward."""
    are_separate = len({tangent.key for tangent in tangents}) == len(tangents)
    released = are_separate and not any(tangents)
    note_tangents(loop, graph, released=released)
    if not released and regions.several:
        regions.choose_again()


def compare_parts(
    loop: Loop, graph: Graph, compiled: CompiledPlan, number: int, values: Values
) -> None:
    """Compare a run in parts with its operations as a whole, if ``verify_bits=`` is due.

    Args:
        loop: the training loop of the model.
        graph: the graph that is called.
        compiled: the plan of the call.
        number: the number of the call.
        values: numbers of the graph's symbols.
    """
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
