"""What steps have shown becomes feedback for the plans of later steps.

Each function takes the training loop and the captured graph whose steps they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace

from fxremat.graph.feedback import CHECKED, GRADIENTS, MOST_MISSED, OUTPUTS
from fxremat.graph.graph import Graph
from fxremat.graph.pools import room_bytes
from fxremat.graph.shortfall import excess_bytes, warn
from fxremat.loop.loop import Loop
from fxremat.planner.context import NO_CORRECTION, Correction, StepContext
from fxremat.planner.context_bytes import SCALARS, ContextBytes
from fxremat.planning.choose import fits
from fxremat.progress import LOG
from fxremat.runtime.profile import MemoryProfile
from fxremat.runtime.steps import SCALAR_BYTES, Step
from fxremat.units import format_bytes

SLACK_BYTES = SCALARS * SCALAR_BYTES
"""Numbers of the loop that are given, and allocated again by a step."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What a plan says that a step takes.

    Attributes:
        peak_bytes: most that is held.
        allocated_bytes: of that, what the step itself allocates.
    """

    peak_bytes: int
    allocated_bytes: int


def load_feedback(graph: Graph) -> None:
    """Begin with what steps of the capture's sizes have taught another process."""
    if graph.together is not None:  # other processes may have another cache folder
        return
    cached = graph.store.get("correction", graph.correction_key, Correction) or NO_CORRECTION
    if cached != NO_CORRECTION:
        graph.feedback.seen[graph.sizes.hints] = cached


def corrected(loop: Loop, graph: Graph, context: StepContext) -> StepContext:
    """Return ``context`` with the feedback of contexts like it.

    Where as many steps wait as may, and one of them is like this one, another will come while this
    one waits: it leaves room for that at once.
    """
    if context.waiting >= graph.caller.in_flight:
        waiting = loop.in_flight.waiting()
        if any(step.context.kind == context.kind for step in waiting):
            _leave_room(loop, graph, context)
    seen = graph.feedback.at(context.sizes, graph.tangent_bytes)
    return graph.feedback.corrected(context, seen)


def relaxed(loop: Loop, graph: Graph, context: StepContext) -> Iterator[StepContext]:
    """Yield contexts in which less is held in the backward, unless a step has shown otherwise."""
    return graph.feedback.relaxed(context, accumulates=loop.caller.accumulate)


def leave_room_in_waiting(loop: Loop, context: StepContext, graph: Graph) -> bool:
    """Plan steps like those that wait with room for one more, if all of them can have it."""
    nbytes = room_bytes(graph, context)
    taught: list[tuple[Step, Graph, Correction]] = []
    for step in sorted(loop.in_flight, key=lambda step: step.number, reverse=True):
        own: Graph = step.graph
        correction = own.feedback.of_kind(step.context) | Correction(room_bytes=nbytes)
        if not fits(own, replace(step.context, correction=correction), loop.budget):
            return False
        taught.append((step, own, correction))
        nbytes += step.held_bytes
    for step, own, correction in taught:
        own.feedback.teach(step.context, correction)
    return bool(taught)


def _leave_room(loop: Loop, graph: Graph, context: StepContext) -> None:
    """Plan steps like one with room for another one, if one plan of them has it."""
    before = graph.feedback.of_kind(context)
    if before.room_bytes:
        return
    room = Correction(room_bytes=room_bytes(graph, context))
    if fits(graph, replace(context, correction=before | room), loop.budget):
        graph.feedback.teach(context, room)


def checks_tangents(graph: Graph, *, watched: bool) -> bool:
    """Return whether a backward that begins is to show if gradients of outputs are released.

    Processes that follow the same plans check the same steps.
    """
    if graph.feedback.tangents_stay or not graph.joint.released:
        return False
    return graph.feedback.checked < CHECKED or (watched and graph.together is None)


def saw_tangents(loop: Loop, graph: Graph, *, released: bool) -> None:
    """Note whether a backward has released the gradients of its outputs."""
    with loop.planning:
        graph.feedback.checked += 1
        if not released:
            graph.feedback.tangents_stay = True
            graph.feedback.changes += 1


def foresaw_loss(loop: Loop, graph: Graph, *, is_same: bool) -> None:
    """Note whether the gradient of a loss was the one that it had in the step before."""
    feedback = graph.feedback
    feedback.missed = 0 if is_same else feedback.missed + 1
    if feedback.missed == MOST_MISSED:
        LOG.info("a loss's gradient differs from step to step: none is computed with it any more")
        with loop.planning:
            feedback.scale(True)


def unscaled(loop: Loop, graph: Graph, context: StepContext) -> StepContext:
    """Return ``context`` as if gradients of losses were the same at each step.

    Nothing new could be measured for it; steps will show again that they are not.
    """
    with loop.planning:
        graph.feedback.missed = 0
        graph.feedback.scale(False)
    return replace(context, scaled=False)


def backward_began(
    loop: Loop, graph: Graph, context: StepContext, *, outputs: bool, gradients: bool
) -> None:
    """Learn what of that which a forward began with is still held at its backward.

    Args:
        loop: around the model.
        graph: of the step.
        context: in which the forward ran.
        outputs: whether outputs of earlier steps are.
        gradients: whether gradients are.
    """
    if context.kept_bytes:
        _learn_held(loop, graph, context, OUTPUTS, outputs, context.released)
    if context.existing and not loop.caller.accumulate:
        _learn_held(loop, graph, context, GRADIENTS, gradients, context.cleared)


def _learn_held(
    loop: Loop, graph: Graph, context: StepContext, what: str, held: bool, assumed_gone: bool
) -> None:
    feedback, kind = graph.feedback, context.kind
    gone, stayed = feedback.gone[what], feedback.stayed[what]
    if kind in stayed or (kind in gone and not held):
        return
    if not held and graph.together is not None:
        return  # processes that follow the same plans would have to see it at the same call
    with loop.planning:
        if held:
            stayed.add(kind)
            gone.discard(kind)
        else:
            gone.add(kind)
        feedback.changes += 1
    if held and assumed_gone:
        gradient_bytes = sum(context.gradient_bytes(graph.joint))
        nbytes = gradient_bytes if what == GRADIENTS else context.kept_bytes
        if not excess_bytes(nbytes, 0):
            return
        warn(
            f"this step may take {nbytes} bytes ({format_bytes(nbytes)}) more than its budget "
            f"of {loop.budget.nbytes}: {what} that exist during its forward are still "
            "held in its backward. From the next step on the plan leaves room for them"
        )


def gradients_came(
    loop: Loop, graph: Graph, context: StepContext, came: Sequence[Set[int]]
) -> None:
    """Learn that gradients which a forward did not find exist when its backward begins.

    Args:
        loop: around the model.
        graph: of the step.
        context: in which the forward ran.
        came: primals that have a gradient now, and primals of which autograd holds another.
    """
    feedback = graph.feedback
    if feedback.came == (context, came):  # what that teaches is taught
        return
    feedback.came = context, came
    each = [replace(context, existing=frozenset(primals)) for primals in came]
    nbytes = sum(sum(own.gradient_bytes(graph.joint)) for own in each)
    held = graph.held(replace(context, correction=NO_CORRECTION))
    with loop.planning:
        feedback.teach(context, Correction(left_bytes=held.tangent_bytes + nbytes))


def learn(
    loop: Loop,
    graph: Graph,
    context: StepContext,
    planned: Taken,
    profile: MemoryProfile,
    *,
    is_first: bool,
) -> int:
    """Learn from a step that was watched to its end; return its peak in bytes.

    What stayed within the budget teaches nothing that would forbid it.

    Args:
        loop: around the model.
        graph: of the step.
        context: of its call.
        planned: what its plan was to take.
        profile: what it took.
        is_first: no step ran before it. What later steps free may be a variable of the loop that
            was allocated before, such as the last loss: they show no less than was assumed.
    """
    feedback, budget_bytes = graph.feedback, loop.budget.nbytes
    held = graph.held(context)
    late_bytes = graph.late_bytes  # given, but not allocated by this process
    correction = _correction_of(
        profile, planned.allocated_bytes + late_bytes, held, is_first=is_first
    )
    if feedback.held(context) != context:
        correction = replace(correction, more_bytes=0)  # the next plan counts them as held
    peak_bytes = held.given_bytes - late_bytes + profile.peak_bytes
    over = peak_bytes - SLACK_BYTES - (budget_bytes or peak_bytes)
    with loop.planning:
        before = feedback.at(context.sizes, graph.tangent_bytes)
        if before | correction == before:
            return peak_bytes
        taught = replace(context, correction=context.correction | correction)
        if over <= 0 and not fits(graph, taught, loop.budget, search=False):
            return peak_bytes
        feedback.seen[context.sizes] = before | correction
        feedback.changes += graph.held(taught) != held
    if context.sizes == graph.sizes.hints:
        cached = replace(before | correction, observed=False)
        graph.store.put("correction", graph.correction_key, Correction, cached)
    what = _described(correction, held)
    LOG.info(
        "a step was watched: %s at its peak of %s planned; %s",
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
            "plan leaves room for that"
        )
    return peak_bytes


def _correction_of(
    profile: MemoryProfile, planned_bytes: int, held: ContextBytes, *, is_first: bool
) -> Correction:
    """What a step took at the loss point and held in its backward, and what else beyond its plan.

    Of what was gone by then the context says so by itself, so it is no part of either.
    """
    whole = profile.taken_bytes is not None
    left = 0 if profile.taken_bytes is None else profile.taken_bytes - profile.left_bytes
    left += profile.gone_bytes
    loss_point = profile.turn_bytes - profile.left_bytes + profile.released_bytes
    if not is_first:
        left, loss_point = max(left, held.tangent_bytes), max(loss_point, held.turn_bytes)
    taken = max(profile.forward_bytes, profile.backward_bytes)
    if left > held.tangent_bytes + SLACK_BYTES:
        taken -= left - held.tangent_bytes
    pairs = ((held.turn_bytes, loss_point), (held.tangent_bytes, left))
    observed = whole and any(abs(assumed - found) > SLACK_BYTES for assumed, found in pairs)
    # More than was assumed teaches, though the step was not seen to its end.
    sizes = []
    for assumed, found in pairs:
        differs = abs(assumed - found) > SLACK_BYTES and (observed or found > assumed)
        sizes.append(found if differs else assumed * observed)
    return Correction(
        turn_bytes=sizes[0],
        left_bytes=sizes[1],
        more_bytes=taken - planned_bytes if taken > planned_bytes + SLACK_BYTES else 0,
        observed=observed,
    )


def _described(correction: Correction, held: ContextBytes) -> str:
    loss_point, left = correction.turn_bytes, correction.left_bytes
    named = (
        (
            loss_point if loss_point > held.turn_bytes + SLACK_BYTES else 0,
            "were allocated between forward and backward",
        ),
        (
            left if left > held.tangent_bytes + SLACK_BYTES else 0,
            "of that were still held in the backward",
        ),
        (correction.more_bytes, "more than was planned were allocated in the graphs"),
    )
    return ", ".join(f"{format_bytes(nbytes)} {what}" for nbytes, what in named if nbytes)
