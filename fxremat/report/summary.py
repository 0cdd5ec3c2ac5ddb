"""A plan in a few lines: budget, peak, time, and what was done for them."""

from __future__ import annotations

from collections.abc import Iterator

from fxremat.ir import Copy, Lane
from fxremat.report.facts import PlanFacts
from fxremat.report.stages import StageStory
from fxremat.units import format_bytes, format_seconds


def summarize(plan: PlanFacts, stories: tuple[StageStory, ...]) -> Iterator[tuple[str, str]]:
    """What each line is about, and what it says.

    Args:
        plan: the plan.
        stories: of its stages, those of which nothing runs left out.
    """
    yield "budget", _exact(plan.budget_bytes)
    yield "least feasible", _exact(plan.least_budget_bytes)
    used = f"{plan.counted_bytes / plan.budget_bytes:.1%} of the budget"
    on_reserved = plan.budget_on == "reserved"
    peak = _exact(plan.predicted_peak_bytes) + ("" if on_reserved else f", {used}")
    yield "predicted peak", f"{peak}, {_where(plan)}"
    if on_reserved or plan.predicted_reserved_bytes != plan.predicted_peak_bytes:
        reserved = _exact(plan.predicted_reserved_bytes) + (f", {used}" if on_reserved else "")
        yield "predicted reserved", reserved
    if plan.sizes:
        yield "made for sizes", ", ".join(f"{name} = {n}" for name, n in plan.sizes)
    for what, nbytes in plan.beside:
        yield "of that beside", f"{_exact(nbytes)} for {what}"
    yield "with everything kept", _exact(plan.baseline_peak_bytes)
    yield "predicted time", _time(plan)
    yield "lower bound", _bound(plan)
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


def _where(plan: PlanFacts) -> str:
    """The moment of the peak."""
    for event in plan.timeline.events:
        if event.peak_bytes == plan.predicted_held_bytes:
            return f"during {event.op}"
    return "outside the stages: at the turn, or when all gradients are there"


def _time(plan: PlanFacts) -> str:
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
    if plan.local_search_s > 0:
        text += f"; local search gained {plan.local_search_s / plan.predicted_s:.1%}"
    return text


def _host(plan: PlanFacts) -> str:
    """What travels, and how long the computations wait for it."""
    copies = [event for event in plan.timeline.events if isinstance(event.op, Copy)]
    away = [event for event in copies if event.lane is Lane.D2H]
    return (
        f"{_exact(plan.host_bytes)}: {_count(len(away), 'tensor')} there and back in "
        f"{format_seconds(sum(event.end_s - event.start_s for event in copies))}, of which the "
        f"step waits for {format_seconds(plan.timeline.idle.total_s)}"
    )


def _exact(nbytes: int) -> str:
    return f"{format_bytes(nbytes)} ({nbytes} bytes)"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
