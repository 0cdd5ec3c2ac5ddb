"""A plan as text: a summary, and a row for each stage or run of alike stages."""

from __future__ import annotations

from fxremat.console import SIMPLE_HEAD, Group, Table, Text, show
from fxremat.report.alike import Alike, alike
from fxremat.report.areas import named
from fxremat.report.facts import PlanFacts
from fxremat.report.stages import StageStory, tell_stages
from fxremat.report.summary import summarize
from fxremat.report.words import describe, explain
from fxremat.units import format_bytes, format_seconds

WIDTH = 100
"""Columns where the output is no terminal, which would have a width of its own."""

LEGEND = (
    "forward, boundary, saved: of each stage; boundary: what it hands to the next; saved: that and\n"
    "what its backward needs of it; checkpoint: its input is kept, to recompute from; frees: bytes\n"
    "not held meanwhile; frees and costs are of all stages of a row together"
)


def print_plan(plan: PlanFacts) -> str:
    """Print ``plan`` to the console, in ASCII where that is all it can show.

    A stage of which nothing runs has no row. Returns what was printed, without colours.

    Raises:
        ImportError: rich is not installed.
    """
    stories = tuple(story for story in tell_stages(plan) if story.executed)
    text = show(Group(_summary(plan, stories), Text(), _table(plan, stories)), width=WIDTH)
    return "\n".join(line.rstrip() for line in text.splitlines())


def _summary(plan: PlanFacts, stories: tuple[StageStory, ...]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    for name, text in summarize(plan, stories):
        grid.add_row(name, text)
    return grid


def _table(plan: PlanFacts, stories: tuple[StageStory, ...]) -> Table:
    table = Table(
        box=SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0), caption=LEGEND
    )
    table.caption_justify = "left"
    modules = plan.memory.modules
    table.add_column("stage", no_wrap=True)
    if any(modules):
        table.add_column("module")
    for name in ("forward", "boundary", "saved"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("what happens to it, and why")
    for group in alike(stories):
        first = group.stories[0]
        module = [_module(group, modules)] if any(modules) else []
        table.add_row(
            group.label,
            *module,
            format_seconds(sum(s.forward_s for s in group.stories) / len(group.stories)),
            format_bytes(first.boundary_bytes),
            format_bytes(first.saved_bytes),
            f"{describe(*group.stories)}: {explain(*group.stories)}",
        )
    return table


def _module(group: Alike, modules: tuple[str, ...]) -> str:
    """Where in the model the stages of a group are."""
    return named([modules[story.index] for story in group.stories])
