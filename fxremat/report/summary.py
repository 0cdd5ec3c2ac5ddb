"""A plan in a few lines: budget, peak, time, and what was done for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fxremat.ir import Copy, Free, Lane, Offload, Prefetch, Wait
from fxremat.report.facts import CrossCheck, Figures, PlanFacts
from fxremat.report.stages import StageStory, tell_stages
from fxremat.units import format_bytes, format_seconds


def shortly(plan: Figures, what: str, done: str) -> str:
    """What a person wants to see of a plan first, in five lines.

    Args:
        plan: of one graph or of several.
        what: it is, as ``"Plan"``.
        done: see :func:`what_is_done`.
    """
    budget, least, predicted, kept = map(
        format_bytes,
        (
            plan.budget_bytes,
            plan.least_budget_bytes,
            plan.predicted_peak_bytes,
            plan.baseline_peak_bytes,
        ),
    )
    seen_bytes = plan.measured_peak_bytes
    measured = "" if seen_bytes is None else f", measured {format_bytes(seen_bytes)}"
    return (
        f"{what} within {budget} (the least feasible budget is {least})\n"
        f"  peak: predicted {predicted}{measured}; {kept} with everything kept\n"
        f"  time: predicted {compared(plan)}\n"
        f"  how:  {done}\n"
        "  more: explain(), save_html(path), forward_code, backward_code"
    )


def what_is_done(*plans: PlanFacts) -> str:
    """What one plan, or the plans of a step's graphs together, do for memory, in short."""
    stories = [story for plan in plans for story in tell_stages(plan) if story.executed]
    again = sum(bool(story.again) or story.is_kept_in_part for story in stories)
    done = [f"recomputes {again} of {_count(len(stories), 'stage')}"] if again else []
    moved_bytes = sum(story.moved_bytes for story in stories)
    done += [f"{format_bytes(moved_bytes)} travel to the host"] if moved_bytes else []
    return ", ".join(done) or "keeps everything"


def figures(plan: Figures, *, where: str = "", written: str = "") -> Iterator[tuple[str, str]]:
    """Lines on memory: what each is about, and what it says.

    Args:
        plan: of one graph or of several.
        where: the predicted peak is, after a comma.
        written: how the budget was, after a comma.
    """
    yield "budget", exactly(plan.budget_bytes) + written
    yield "least feasible", exactly(plan.least_budget_bytes)
    used = f", {plan.counted_bytes / plan.budget_bytes:.1%} of the budget"
    reserved_bytes = plan.predicted_reserved_bytes
    on_reserved = plan.budget_on == "reserved"
    peak = exactly(plan.predicted_peak_bytes) + ("" if on_reserved else used)
    yield "predicted peak", peak + where
    if on_reserved or reserved_bytes != plan.predicted_peak_bytes:
        yield "predicted reserved", exactly(reserved_bytes) + (used if on_reserved else "")
    if plan.measured_peak_bytes is not None:
        yield "measured peak", exactly(plan.measured_peak_bytes)
    yield "with everything kept", exactly(plan.baseline_peak_bytes)


def summarize(plan: PlanFacts, stories: Sequence[StageStory]) -> Iterator[tuple[str, str]]:
    """What each line is about, and what it says.

    Args:
        plan: the plan.
        stories: of its stages, those of which nothing runs left out.
    """
    yield from figures(plan, where=f", {_where(plan)}")
    for what, nbytes in plan.beside:
        yield "of that beside", f"{exactly(nbytes)} for {what}"
    yield "predicted time", compared(plan)
    yield "lower bound", _bound(plan)
    if plan.cross_check is not None:
        yield "cross-check", _checked(plan.cross_check)
    if plan.arguments:
        yield "batch", batch_of(plan)
    if plan.host_bytes:
        yield "host memory", _host(plan)
    if not plan.exact:
        yield "gradients", "up to rounding: inputs of norms are rebuilt from outputs"
    if plan.fused:
        calls = _count(sum(unit.calls for unit in plan.fused), "call")
        yield "kernels", f"Inductor's: {calls} of {_count(len(plan.fused), 'unit')}"
    kinds = len({plan.chain.stages[story.index].kind for story in stories})
    again = sum(len(story.again) + story.is_kept_in_part for story in stories)
    runs = [event for event in plan.timeline.events if not isinstance(event.op, Copy)]
    yield (
        "stages",
        f"{_count(len(stories), 'stage')} of {_count(kinds, 'kind')}, "
        f"{_count(len(runs), 'operation')}, {_count(again, 'recomputation')}",
    )


def batch_of(plan: PlanFacts) -> str:
    """Tensors of the call that a plan was made for."""
    return ", ".join(f"{place}: {tensor}" for place, tensor in plan.arguments)


def _where(plan: PlanFacts) -> str:
    """The moment of the peak."""
    for event in plan.timeline.events:
        if event.peak_bytes == plan.predicted_held_bytes:
            stage = -1 if isinstance(event.op, Offload | Free | Prefetch | Wait) else event.op.stage
            module = dict(enumerate(plan.memory.modules)).get(stage)
            return f"during {event.op}" + f", in module {module}" * bool(module)
    return "outside the stages: at the turn, or when all gradients are there"


def compared(plan: Figures) -> str:
    """Seconds beside those of a step that recomputes nothing."""
    taken, least = format_seconds(plan.predicted_s), format_seconds(plan.baseline_s)
    if plan.baseline_s == 0:
        return f"{taken}, {least} without recomputation"
    ratio = plan.predicted_s / plan.baseline_s
    return f"{taken}, {ratio:.3f} × the {least} without recomputation ({ratio - 1:+.1%})"


def _bound(plan: PlanFacts) -> str:
    """How much better any plan could be, and what local search did."""
    if plan.predicted_s == 0:
        return format_seconds(0.0)
    above = plan.predicted_s / plan.lower_bound_s - 1
    text = f"{format_seconds(plan.lower_bound_s)}: this plan is at most {above:.1%} above any other"
    if plan.lower_bound_s == plan.baseline_s < plan.predicted_s:
        text += "; no better bound is known than nothing recomputed"
    gained = plan.local_search_s / plan.predicted_s
    if gained >= 0.0005:  # else it would say 0.0%
        text += f"; local search gained {gained:.1%}"
    return text


def _checked(check: CrossCheck) -> str:
    """What CP-SAT found, and how far the plan is from it."""
    if check.seconds is None:
        return f"none by CP-SAT: {check.why_not}"
    known = "proven optimal by the stages' costs" if check.proven else "not proven optimal"
    gap = check.gap or 0.0
    far = "as fast" if abs(gap) < 0.0005 else f"{abs(gap):.1%} {'slower' if gap > 0 else 'faster'}"
    return f"{format_seconds(check.seconds)} by CP-SAT, {known}: this plan is {far}"


def _host(plan: PlanFacts) -> str:
    """What travels, and how long the computations wait for it."""
    copies = [event for event in plan.timeline.events if isinstance(event.op, Copy)]
    away = [event for event in copies if event.lane is Lane.D2H]
    return (
        f"{exactly(plan.host_bytes)}: {_count(len(away), 'tensor')} there and back in "
        f"{format_seconds(sum(event.end_s - event.start_s for event in copies))}, of which the "
        f"step waits for {format_seconds(plan.timeline.idle.total_s)}"
    )


def exactly(nbytes: int) -> str:
    """Bytes for people, and their number."""
    return f"{format_bytes(nbytes)} ({nbytes} bytes)"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
