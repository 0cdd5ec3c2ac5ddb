"""A plan as text: a summary, and one row a stage."""

from __future__ import annotations

from fxremat.console import SIMPLE_HEAD, Group, Table, Text, show
from fxremat.ir import Copy, Keep, Lane
from fxremat.report.facts import PlanFacts
from fxremat.report.stages import StageStory, tell_stages
from fxremat.units import format_bytes, format_seconds

WIDTH = 132
"""Columns where the output is no terminal, which would have a width of its own."""

LEGEND = (
    "boundary: what the stage hands to the next; saved: that and what its backward needs of it;\n"
    "checkpoint: its input is kept, to recompute from; frees: bytes not held meanwhile"
)


def print_plan(plan: PlanFacts) -> str:
    """Print ``plan`` to the console, in ASCII where that is all it can show.

    A stage of which nothing runs has no row. Returns what was printed, without colours.

    Raises:
        ImportError: rich is not installed.
    """
    stories = tuple(story for story in tell_stages(plan) if story.executed)
    text = show(Group(_summary(plan, stories), Text(), _table(stories)), width=WIDTH)
    return "\n".join(line.rstrip() for line in text.splitlines())


def _summary(plan: PlanFacts, stories: tuple[StageStory, ...]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    grid.add_row("budget", _exact(plan.budget_bytes))
    grid.add_row("least feasible", _exact(plan.least_budget_bytes))
    used = f"{plan.counted_bytes / plan.budget_bytes:.1%} of the budget"
    on_reserved = plan.budget_on == "reserved"
    peak = _exact(plan.predicted_peak_bytes) + ("" if on_reserved else f", {used}")
    grid.add_row("predicted peak", f"{peak}, {_where(plan)}")
    if on_reserved or plan.predicted_reserved_bytes != plan.predicted_peak_bytes:
        reserved = _exact(plan.predicted_reserved_bytes) + (f", {used}" if on_reserved else "")
        grid.add_row("predicted reserved", reserved)
    if plan.sizes:
        grid.add_row("made for sizes", ", ".join(f"{name} = {n}" for name, n in plan.sizes))
    for what, nbytes in plan.beside:
        grid.add_row("of that beside", f"{_exact(nbytes)} for {what}")
    grid.add_row("with everything kept", _exact(plan.baseline_peak_bytes))
    grid.add_row("predicted time", _time(plan))
    grid.add_row("lower bound", _bound(plan))
    kinds = len({plan.chain.stages[story.index].kind for story in stories})
    again = sum(len(story.again) + story.is_kept_in_part for story in stories)
    if plan.host_bytes:
        grid.add_row("host memory", _host(plan))
    if not plan.exact:
        grid.add_row("gradients", "up to rounding: inputs of norms are rebuilt from outputs")
    runs = [event for event in plan.timeline.events if not isinstance(event.op, Copy)]
    grid.add_row(
        "stages",
        f"{_count(len(stories), 'stage')} of {_count(kinds, 'kind')}, "
        f"{_count(len(runs), 'operation')}, {_count(again, 'recomputation')}",
    )
    return grid


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


def _table(stories: tuple[StageStory, ...]) -> Table:
    table = Table(
        box=SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0), caption=LEGEND
    )
    table.caption_justify = "left"
    table.add_column("stage", no_wrap=True)
    table.add_column("forward", justify="right", no_wrap=True)
    table.add_column("boundary", justify="right", no_wrap=True)
    table.add_column("saved", justify="right", no_wrap=True)
    table.add_column("what happens to it")
    table.add_column("why")
    for story in stories:
        table.add_row(
            story.name,
            format_seconds(story.forward_s),
            format_bytes(story.boundary_bytes),
            format_bytes(story.saved_bytes),
            describe(story),
            explain(story),
        )
    return table


def describe(story: StageStory) -> str:
    """What happens to a stage, in words."""
    words = _describe_computations(story)
    if story.moved_bytes:
        words += f", {format_bytes(story.moved_bytes)} on the host meanwhile"
    return words


def _describe_computations(story: StageStory) -> str:
    if not story.runs[0].executed:
        return "nothing"
    if story.is_kept:
        return "kept"
    if story.is_kept_in_part:
        part = f"{format_bytes(story.held_bytes)} of {format_bytes(story.saved_bytes)}"
        return f"{part} kept, rest rebuilt"
    keeps_input = story.runs[0].keep is Keep.INPUT
    if not story.again:
        return "checkpoint" if keeps_input else "nothing kept"
    last = story.again[-1]
    if len(story.again) == 1:
        words = "rebuilt right before its backward" if last.rebuilds else "recomputed once"
    else:
        words = f"recomputed {len(story.again)} times"
    words += _sources(story)
    if story.single_bytes:
        words += f", {format_bytes(story.single_bytes)} of it kept"
    return f"checkpoint, {words}" if keeps_input else words


def _sources(story: StageStory) -> str:
    """Whose inputs its recomputations set out from, where not its own."""
    starts = sorted({run.start for run in story.again})
    if starts == [story.index]:
        return ""
    if len(starts) == 1:
        return f" from stage {starts[0]}'s checkpoint"
    listed = f"{', '.join(map(str, starts[:-1]))} and {starts[-1]}"
    return f" from the checkpoints of stages {listed}"


def explain(story: StageStory) -> str:
    """Why, in words."""
    if not story.runs[0].executed:
        return "its forward computes nothing"
    if story.is_kept:
        if story.saved_bytes == 0:
            return "keeping it takes no memory"
        return (
            f"room for {format_bytes(story.saved_bytes)}, "
            f"{format_seconds(story.rebuild_s)} to recompute"
        )
    if not story.again and not story.is_kept_in_part:
        return "its backward needs nothing that it computes"
    cost = f"costs {format_seconds(story.extra_s)}"
    if story.freed_bytes == 0:
        return f"on the way to later stages, {cost}"
    return f"frees {format_bytes(story.freed_bytes)}, {cost}"


def _exact(nbytes: int) -> str:
    return f"{format_bytes(nbytes)} ({nbytes} bytes)"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
