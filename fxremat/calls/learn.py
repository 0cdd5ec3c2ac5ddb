"""Feedback from steps for the plans of later steps.

Each function takes the training loop and the captured graph of the steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace

from fxremat.graph.compiled_plan import CompiledPlan
from fxremat.graph.feedback import CHECKED, GRADIENTS, MOST_MISSED, OUTPUTS
from fxremat.graph.graph import Graph
from fxremat.graph.pools import room_bytes
from fxremat.graph.shortfall import excess_bytes, warn
from fxremat.loop.loop import Loop
from fxremat.planner.context.context_bytes import SCALARS, ContextBytes
from fxremat.planner.context.step_context import NO_CORRECTION, Correction, StepContext
from fxremat.planning.choose import fits
from fxremat.progress import LOG
from fxremat.report.plan import Plan
from fxremat.runtime.profile import MemoryProfile
from fxremat.runtime.steps import SCALAR_BYTES, Step
from fxremat.units import format_bytes, plural

SLACK_BYTES = SCALARS * SCALAR_BYTES
"""Scalars of the loop that are held before a step, and allocated again by it."""


@dataclass(frozen=True, slots=True)
class PlannedBytes:
    """The bytes that a step takes by its plan.

    Attributes:
        peak_bytes: the peak.
        allocated_bytes: the part of it that the step itself allocates.
    """

    peak_bytes: int
    allocated_bytes: int


def load_feedback(graph: Graph) -> None:
    """Load what a former process learned of the step from the cache folder, as feedback."""
    if graph.together is not None:  # other processes may have another cache folder
        return
    cached = graph.store.get("correction", graph.correction_key, Correction) or NO_CORRECTION
    if cached != NO_CORRECTION:
        graph.feedback.corrections[graph.sizes.hints] = cached


def corrected(loop: Loop, graph: Graph, context: StepContext) -> StepContext:
    """Return ``context`` with what earlier steps in contexts of its kind have shown.

    If as many steps are in flight as may be, and one of them is of the kind of this one, another
    such step will begin while this one is in flight. This one then leaves room for it.
    """
    if context.waiting >= graph.caller.in_flight:
        waiting = loop.in_flight.waiting()
        if any(step.context.kind == context.kind for step in waiting):
            _leave_room(loop, graph, context)
    correction = graph.feedback.at(context.sizes, graph.tangent_bytes)
    return graph.feedback.corrected(context, correction)


def relaxed(loop: Loop, graph: Graph, context: StepContext) -> Iterator[StepContext]:
    """Yield copies of ``context`` that assume less memory to be held in the backward.

    They assume nothing that a step has shown to be otherwise; see :meth:`Feedback.relaxed`.
    """
    return graph.feedback.relaxed(context, accumulates=loop.caller.accumulate)


def leave_room_in_flight(loop: Loop, context: StepContext, graph: Graph) -> bool:
    """Have later plans like those of the steps in flight leave room for one more step.

    Args:
        loop: the training loop of the model.
        context: the context of the step that needs room.
        graph: its graph.

    Returns whether they can: a plan with that room fits the budget for each of them.
    """
    nbytes = room_bytes(graph, context)
    corrections: list[tuple[Step, Graph, Correction]] = []
    for step in sorted(loop.in_flight, key=lambda step: step.number, reverse=True):
        own: Graph = step.graph
        correction = own.feedback.of_kind(step.context) | Correction(room_bytes=nbytes)
        if not fits(own, replace(step.context, correction=correction), loop.budget):
            return False
        corrections.append((step, own, correction))
        nbytes += step.held_bytes
    for step, own, correction in corrections:
        own.feedback.teach(step.context, correction)
    return bool(corrections)


def _leave_room(loop: Loop, graph: Graph, context: StepContext) -> None:
    """Have later plans in contexts of this kind leave room for one more step, if one can."""
    before = graph.feedback.of_kind(context)
    if before.room_bytes:
        return
    room = Correction(room_bytes=room_bytes(graph, context))
    if fits(graph, replace(context, correction=before | room), loop.budget):
        graph.feedback.teach(context, room)


def checks_tangents(graph: Graph, *, watched: bool) -> bool:
    """Return whether a backward checks that its caller has released the gradients of the outputs.

    Args:
        graph: the graph of the step.
        watched: whether the memory of the step is measured. It does not matter where several
            processes must check the same steps.
    """
    if graph.feedback.tangents_stay or not graph.joint.released:
        return False
    return graph.feedback.checked < CHECKED or (watched and graph.together is None)


def note_tangents(loop: Loop, graph: Graph, *, released: bool) -> None:
    """Record in the feedback whether the gradients of the outputs were released in a backward."""
    with loop.planning:
        graph.feedback.checked += 1
        if not released:
            graph.feedback.tangents_stay = True
            graph.feedback.changes += 1


def note_loss_gradient(loop: Loop, graph: Graph, *, is_same: bool) -> None:
    """Record in the feedback whether the gradient of the loss is that of the step before.

    After several steps in a row in which it is not, plans no longer compute it with the loss.
    """
    feedback = graph.feedback
    feedback.missed = 0 if is_same else feedback.missed + 1
    if feedback.missed == MOST_MISSED:
        LOG.info(
            "a loss's gradient differs from step to step: it is no longer computed with the loss"
        )
        with loop.planning:
            feedback.scale(True)


def without_scaling(loop: Loop, graph: Graph, context: StepContext) -> StepContext:
    """Return ``context`` as if the gradient of the loss were the same at each step.

    It is for a call at which nothing new can be measured; later steps correct it again.
    """
    with loop.planning:
        graph.feedback.missed = 0
        graph.feedback.scale(False)
    return replace(context, scaled=False)


def learn_what_is_held(
    loop: Loop, graph: Graph, context: StepContext, *, outputs: bool, gradients: bool
) -> None:
    """Record whether outputs and gradients that existed at a forward are held at its backward.

    Later plans count them accordingly. If a plan has assumed less, a warning is given.

    Args:
        loop: the training loop of the model.
        graph: the graph of the step.
        context: the context of the forward.
        outputs: whether outputs of earlier steps are held.
        gradients: whether gradients are held.
    """
    if context.kept_bytes:
        _learn_held(loop, graph, context, OUTPUTS, outputs, context.released)
    if context.existing and not loop.caller.accumulate:
        _learn_held(loop, graph, context, GRADIENTS, gradients, context.cleared)


def _learn_held(
    loop: Loop, graph: Graph, context: StepContext, what: str, is_held: bool, assumed_freed: bool
) -> None:
    """Record whether outputs or gradients that a forward began with are held at its backward.

    Args:
        loop: the training loop of the model.
        graph: the graph of the step.
        context: the context of the forward.
        what: ``OUTPUTS`` or ``GRADIENTS``.
        is_held: whether they are held.
        assumed_freed: whether the plan has assumed that they are not: then a warning is given.
    """
    feedback, kind = graph.feedback, context.kind
    freed, held = feedback.freed[what], feedback.held_on[what]
    if kind in held or (kind in freed and not is_held):
        return
    if not is_held and graph.together is not None:
        return  # processes that follow the same plans would have to learn it at the same call
    with loop.planning:
        if is_held:
            held.add(kind)
            freed.discard(kind)
        else:
            freed.add(kind)
        feedback.changes += 1
    if is_held and assumed_freed:
        gradient_bytes = sum(graph.gradient_bytes(context.sizes, context.existing))
        nbytes = gradient_bytes if what == GRADIENTS else context.kept_bytes
        if not excess_bytes(nbytes, 0):
            return
        warn(
            f"this step may take {nbytes} bytes ({format_bytes(nbytes)}) more than its budget "
            f"of {loop.budget.nbytes}: {what} that exist during its forward are still "
            "held in its backward. From the next step on the plan leaves room for them",
            code="FXR106",
        )


def learn_untaken(loop: Loop, graph: Graph, step: Step, primals: Set[int]) -> None:
    """Warn that hooks did not take gradients as they were computed, though a plan had assumed it.

    A step that is measured is left out: :func:`learn` warns if it took too much.

    Args:
        loop: the training loop of the model.
        graph: the graph of the step.
        step: the step, at the end of its backward.
        primals: the primals of these gradients.
    """
    compiled: CompiledPlan = step.plan
    nbytes = sum(graph.gradient_bytes(step.context.sizes, primals))
    peak_bytes, budget_bytes = compiled.record.counted_bytes + nbytes, loop.budget.nbytes or 0
    if not excess_bytes(peak_bytes, budget_bytes) or loop.watcher.is_watching(step):
        return
    warn(
        f"this step may have taken up to {peak_bytes} bytes ({format_bytes(peak_bytes)}), "
        f"{peak_bytes - budget_bytes} more than its budget of {budget_bytes}: "
        f"{plural(len(primals), 'gradient')} of {nbytes} bytes in all, which post-accumulate hooks "
        "take away according to their source, stayed allocated in the backward. From the next step "
        "on the plan leaves room for them",
        code="FXR106",
    )


def learn_new_gradients(
    loop: Loop, graph: Graph, context: StepContext, new: Sequence[Set[int]]
) -> None:
    """Have later plans leave room for gradients that come to exist between forward and backward.

    Args:
        loop: the training loop of the model.
        graph: the graph of the step.
        context: the context of the forward.
        new: primals that have such a gradient, and primals of which autograd holds one.
    """
    feedback = graph.feedback
    if feedback.new_gradients == (context, new):  # learned already
        return
    feedback.new_gradients = context, new
    nbytes = sum(sum(graph.gradient_bytes(context.sizes, primals)) for primals in new)
    held = graph.held(replace(context, correction=NO_CORRECTION))
    with loop.planning:
        feedback.teach(context, Correction(left_bytes=held.tangent_bytes + nbytes))


def learn_bundles(
    loop: Loop, graph: Graph, context: StepContext, plan: Plan, more_bytes: int
) -> None:
    """Have later plans leave room for values whose sizes depend on data; warn if one had not.

    Args:
        loop: the training loop of the model.
        graph: the graph of the step.
        context: the context of its call.
        plan: the plan that it followed.
        more_bytes: bytes of such values beyond those of all steps before.
    """
    budget_bytes = loop.budget.nbytes
    if budget_bytes is None or plan.counted_bytes + more_bytes <= budget_bytes:
        return
    more = Correction(more_bytes=context.correction.more_bytes + more_bytes)
    with loop.planning:
        before = graph.feedback.at(context.sizes, graph.tangent_bytes)
        graph.feedback.corrections[context.sizes] = before | more
        graph.feedback.changes += 1
    over = excess_bytes(plan.counted_bytes + more_bytes, budget_bytes)
    if over:
        warn(
            f"values whose sizes depend on data took {more_bytes} bytes "
            f"({format_bytes(more_bytes)}) more than in all steps before, so this step may have "
            f"taken {over} ({format_bytes(over)}) more than its budget of {budget_bytes}. The next "
            "step's plan leaves room for that",
            code="FXR101",
        )


def learn(
    loop: Loop,
    graph: Graph,
    context: StepContext,
    planned: PlannedBytes,
    profile: MemoryProfile,
    *,
    is_first: bool,
) -> int:
    """Correct later plans by the measured memory of a step; return its peak in bytes.

    A step within the budget is never corrected so that no plan would fit.

    Args:
        loop: the training loop of the model.
        graph: the graph of the step.
        context: the context of its call.
        planned: what it takes by its plan.
        profile: what it took.
        is_first: whether no step ran before it. Later steps may free a variable of the loop that
            was allocated before, such as the last loss, so they never lower what is assumed.
    """
    feedback, budget_bytes = graph.feedback, loop.budget.nbytes
    held = graph.held(context)
    late_bytes = graph.late_bytes + context.hook_bytes  # counted as held, but not before the step
    correction = _correction_of(
        profile, planned.allocated_bytes + late_bytes, held, is_first=is_first
    )
    are_untaken = not context.taken.isdisjoint(graph.calls.contributors.held)
    if feedback.held(context) != context or are_untaken:
        correction = replace(correction, more_bytes=0)  # the next plan counts them as held
    peak_bytes = held.given_bytes - late_bytes + profile.peak_bytes
    over = peak_bytes - SLACK_BYTES - (budget_bytes or peak_bytes)
    with loop.planning:
        before = feedback.at(context.sizes, graph.tangent_bytes)
        if before | correction == before:
            return peak_bytes
        corrected = replace(context, correction=context.correction | correction)
        if over <= 0 and not fits(graph, corrected, loop.budget, search=False):
            return peak_bytes
        feedback.corrections[context.sizes] = before | correction
        feedback.changes += graph.held(corrected) != held
    if context.sizes == graph.sizes.hints:
        cached = replace(before | correction, observed=False)
        graph.store.put("correction", graph.correction_key, Correction, cached)
    what = _described(correction, held)
    LOG.info(
        "observed a step: %s at its peak, %s planned; %s",
        format_bytes(peak_bytes),
        format_bytes(planned.peak_bytes),
        what,
    )
    over = excess_bytes(peak_bytes - SLACK_BYTES, budget_bytes or peak_bytes)
    if over and peak_bytes > planned.peak_bytes:
        warn(
            f"this step took {peak_bytes} bytes, {over} ({format_bytes(over)}) more than its "
            f"budget of {budget_bytes}: "
            f"{what or 'an operation took more than when it was measured'}. The next step's "
            "plan leaves room for that",
            code="FXR101",
        )
    return peak_bytes


def _correction_of(
    profile: MemoryProfile, planned_bytes: int, held: ContextBytes, *, is_first: bool
) -> Correction:
    """Return what a step needed for its loss, held in its backward, and took beyond its plan.

    What was freed by then is not included: the context has it.
    """
    whole = profile.taken_bytes is not None
    left = 0 if profile.taken_bytes is None else profile.taken_bytes - profile.left_bytes
    left += profile.gone_bytes
    loss_point = profile.loss_point_bytes - profile.left_bytes + profile.released_bytes
    if not is_first:
        left, loss_point = max(left, held.tangent_bytes), max(loss_point, held.loss_point_bytes)
    taken = max(profile.forward_bytes, profile.backward_bytes)
    if left > held.tangent_bytes + SLACK_BYTES:
        taken -= left - held.tangent_bytes
    pairs = ((held.loss_point_bytes, loss_point), (held.tangent_bytes, left))
    observed = whole and any(abs(assumed - measured) > SLACK_BYTES for assumed, measured in pairs)
    # More than was assumed is learned even if the step was not observed to its end.
    sizes = []
    for assumed, measured in pairs:
        differs = abs(assumed - measured) > SLACK_BYTES and (observed or measured > assumed)
        sizes.append(measured if differs else assumed * observed)
    return Correction(
        loss_point_bytes=sizes[0],
        left_bytes=sizes[1],
        more_bytes=taken - planned_bytes if taken > planned_bytes + SLACK_BYTES else 0,
        observed=observed,
    )


def _described(correction: Correction, held: ContextBytes) -> str:
    """Return in words what a correction adds to what was held by the plan."""
    loss_point, left = correction.loss_point_bytes, correction.left_bytes
    named = (
        (
            loss_point if loss_point > held.loss_point_bytes + SLACK_BYTES else 0,
            "were allocated between forward and backward",
        ),
        (
            left if left > held.tangent_bytes + SLACK_BYTES else 0,
            "of that were still held in the backward",
        ),
        (correction.more_bytes, "more than was planned were allocated in the graphs"),
    )
    return ", ".join(f"{format_bytes(nbytes)} {what}" for nbytes, what in named if nbytes)
