"""A plan as text: a summary, and a row for each stage or run of alike stages."""

from __future__ import annotations

from collections import Counter

from fxremat.console import SIMPLE_HEAD, Group, Table, Text, show
from fxremat.report.alike import alike
from fxremat.report.facts import PlanFacts
from fxremat.report.modules import BETWEEN
from fxremat.report.stages import StageStory, tell_stages
from fxremat.report.summary import summarize
from fxremat.report.words import describe, explain
from fxremat.units import format_bytes, format_seconds

WIDTH = 100
"""Columns where the output is no terminal, which would have a width of its own."""

MODULE_WIDTH = 30
"""Columns of a module's name."""

LEGEND = (
    "forward, saved, frees and costs are of all stages of a row; saved: what they hand on and "
    "what their backwards need; checkpoint: the input is kept, to recompute from; frees: bytes "
    "not held from forward to backward"
)


def print_plan(plan: PlanFacts) -> str:
    """Print ``plan`` to the console, in ASCII where that is all it can show.

    A stage of which nothing runs has no row. Returns what was printed, without colours.

    Raises:
        ImportError: rich is not installed.
    """
    stories = tuple(story for story in tell_stages(plan) if story.executed)
    units = (Text(), _units(plan)) if plan.fused else ()
    parts = Group(_summary(plan, stories), Text(), _table(plan, stories), Text(LEGEND), *units)
    text = show(parts, width=WIDTH)
    return "\n".join(line.rstrip() for line in text.splitlines())


def _summary(plan: PlanFacts, stories: tuple[StageStory, ...]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    for name, text in summarize(plan, stories):
        grid.add_row(name, text)
    return grid


def _table(plan: PlanFacts, stories: tuple[StageStory, ...]) -> Table:
    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    modules = plan.memory.modules
    table.add_column("stage", no_wrap=True)
    if any(modules):
        table.add_column("module", max_width=MODULE_WIDTH, overflow="fold")
    for name in ("forward", "saved"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("what happens to it, and why")
    for row in alike(stories, modules):
        table.add_row(
            row.label,
            *([_broken(row.module)] if any(modules) else []),
            format_seconds(sum(story.forward_s for story in row.stories)),
            format_bytes(sum(story.saved_bytes for story in row.stories)),
            f"{describe(*row.stories)}: {explain(*row.stories)}",
        )
    return table


def _units(plan: PlanFacts) -> Table:
    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("unit", no_wrap=True, max_width=MODULE_WIDTH + 20)
    table.add_column("calls", justify="right", no_wrap=True)
    table.add_column("what it computes")
    for unit in plan.fused:
        count = Counter(unit.operations)
        told = (name if times == 1 else f"{times} {name}" for name, times in count.items())
        table.add_row(unit.name, str(unit.calls), ", ".join(told))
    return table


def _broken(module: str) -> str:
    """A module's name, in two lines where it is too long for one."""
    if len(module) <= MODULE_WIDTH:
        return module
    mark = BETWEEN if BETWEEN in module else "."
    head, dot, tail = module.rpartition(mark)
    return f"{head}{dot.rstrip()}\n{tail}"
