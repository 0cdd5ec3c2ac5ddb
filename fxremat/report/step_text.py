"""A step of several graphs as text: a summary, and a row for each graph or run of alike ones."""

from __future__ import annotations

from fxremat.console import SIMPLE_HEAD, Group, Table, Text, show
from fxremat.report.step_facts import StepFacts
from fxremat.report.step_rows import StepLine, lines_of, summarize_step
from fxremat.units import format_bytes, format_seconds

WIDTH = 100
"""Columns where the output is no terminal, which would have a width of its own."""

COVERS_WIDTH, PLAN_WIDTH = 18, 18

LEGEND = (
    "forward and held are of all regions of a row; held: what they keep from forward to backward; "
    "peak: most that the whole step holds while one of them runs; then: what comes until the next "
    "one and is not planned, its seconds in both directions and its bytes"
)


def print_step(step: StepFacts) -> str:
    """Print ``step`` to the console, in ASCII where that is all it can show.

    Returns what was printed, without colours.

    Raises:
        ImportError: rich is not installed.
    """
    text = show(Group(_summary(step), Text(), _table(step), Text(LEGEND)), width=WIDTH)
    return "\n".join(line.rstrip() for line in text.splitlines())


def _summary(step: StepFacts) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    for name, text in summarize_step(step):
        grid.add_row(name, Text(text))
    return grid


def _table(step: StepFacts) -> Table:
    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    lines = lines_of(step)
    covers = any(line.covers for line in lines)
    table.add_column("region", no_wrap=True)
    if covers:
        table.add_column("covers", max_width=COVERS_WIDTH, overflow="fold")
    for name in ("forward", "held", "peak"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("its plan", max_width=PLAN_WIDTH)
    table.add_column("ended by, and what comes then", overflow="fold")
    for line in lines:
        table.add_row(
            line.label,
            *([Text(line.covers)] if covers else []),
            format_seconds(line.forward_s),
            format_bytes(line.held_bytes),
            format_bytes(line.peak_bytes),
            line.what,
            Text(_ended(line)),
        )
    return table


def _ended(line: StepLine) -> str:
    """What ended regions, its file without the folders that it is in, and what came then."""
    where, colon, why = line.ended_by.partition(": ")
    name = where.replace("\\", "/").rpartition("/")[2]
    return "\n".join(filter(None, (f"{name}{colon}{why}", f"then {line.after}")))
