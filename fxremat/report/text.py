"""A plan as text: a summary, what is held at the peak, and the stages or regions in groups."""

from __future__ import annotations

from collections import Counter

from fxremat.console import SIMPLE_HEAD, Group, RenderableType, Table, Text, show
from fxremat.report.facts import Fused
from fxremat.report.modules import BETWEEN
from fxremat.report.peak import PeakHolder, holders_of, shortened
from fxremat.report.plan import AnyPlan, Plan, StepPlan, plans_of
from fxremat.report.stages import deciders, describe, executed_stages, explain, group_alike
from fxremat.report.summary import RegionGroup, group_regions, summarize
from fxremat.units import format_bytes, format_seconds

WIDTH = 100
"""The width in columns if the output is not a terminal."""

MOST_HOLDERS = 12
"""The maximum number of rows of what is held at the peak; the others are one row."""

HOLDER_WIDTH, FREE_WIDTH = 55, 25
MODULE_WIDTH, UNIT_WIDTH, COVERS_WIDTH, PLAN_WIDTH, DECIDED_WIDTH = 30, 50, 18, 18, 26

PEAK_LEGEND = (
    "recompute: how much longer a step takes if these tensors are computed again in the backward. "
    "F and B: the forward and the backward of a stage."
)
STAGES_LEGEND = (
    "Figures are sums over the stages of a row. saved: outputs, and tensors that the backwards "
    "need; checkpoint: the input is kept, to recompute from; frees: bytes that are not held from "
    "forward to backward."
)
REGIONS_LEGEND = (
    "forward and held are sums over the regions of a row. held: bytes kept from forward to "
    "backward; peak: maximum that the whole step holds while one of them runs; then: code before "
    "the next region, which is not planned, with its seconds in both directions and its bytes."
)


def print_plan(plan: AnyPlan) -> str:
    """Print ``plan`` to the console, in ASCII if the console cannot show Unicode.

    Stages that run nothing have no row.

    Returns:
        The printed text, without colors.

    Raises:
        ImportError: rich is not installed.
    """
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    for name, text in summarize(plan):
        grid.add_row(name, Text(text))
    parts: list[RenderableType] = [grid, Text()]
    if all(own.memory.count for own in plans_of(plan)):
        parts += [_holders(holders_of(plan)), Text(PEAK_LEGEND), Text()]
    if isinstance(plan, StepPlan):
        parts += [_regions(plan), Text(REGIONS_LEGEND)]
    else:
        parts += [_stages(plan), Text(STAGES_LEGEND)]
        parts += [Text(), _units(plan.fused)] if plan.fused else []
    shown = Group(*parts)
    return "\n".join(line.rstrip() for line in show(shown, width=WIDTH).splitlines())


def _table() -> Table:
    return Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))


def _holders(holders: tuple[PeakHolder, ...]) -> Table:
    table = _table()
    table.add_column("at peak", justify="right", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    what = "what it is, and the line that makes it"
    table.add_column(what, max_width=HOLDER_WIDTH, overflow="fold")
    table.add_column("what would free it", max_width=FREE_WIDTH, overflow="fold")
    shown = holders if len(holders) <= MOST_HOLDERS else holders[: MOST_HOLDERS - 1]
    for holder in shown:
        lines = filter(None, (holder.text, shortened(holder.place, HOLDER_WIDTH)))
        table.add_row(
            format_bytes(holder.nbytes),
            f"{holder.share:.0%}",
            Text("\n".join(lines)),
            Text(holder.how_to_free),
        )
    rest = holders[len(shown) :]
    if rest:
        nbytes, share = sum(own.nbytes for own in rest), sum(own.share for own in rest)
        table.add_row(format_bytes(nbytes), f"{share:.0%}", f"{len(rest)} more, see at_peak()")
    return table


def _stages(plan: Plan) -> Table:
    table, modules = _table(), plan.memory.modules
    table.add_column("stage", no_wrap=True)
    if any(modules):
        table.add_column("module", max_width=MODULE_WIDTH, overflow="fold")
    for name in ("forward", "saved"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("what happens to it, and why")
    if plan.decided:
        table.add_column("decided by", max_width=DECIDED_WIDTH)
    for group in group_alike(executed_stages(plan), modules):
        table.add_row(
            group.label,
            *([Text(_broken(group.module))] if any(modules) else []),
            format_seconds(sum(stage.forward_s for stage in group.stages)),
            format_bytes(sum(stage.saved_bytes for stage in group.stages)),
            f"{describe(*group.stages)}: {explain(*group.stages)}",
            *([Text(deciders(*group.stages))] if plan.decided else []),
        )
    return table


def _regions(step: StepPlan) -> Table:
    table, groups = _table(), group_regions(step)
    covers = any(group.covers for group in groups)
    table.add_column("region", no_wrap=True)
    if covers:
        table.add_column("covers", max_width=COVERS_WIDTH, overflow="fold")
    for name in ("forward", "held", "peak"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("its plan", max_width=PLAN_WIDTH)
    table.add_column("ended by, and code that follows", overflow="fold")
    for group in groups:
        table.add_row(
            group.label,
            *([Text(group.covers)] if covers else []),
            format_seconds(group.forward_s),
            format_bytes(group.held_bytes),
            format_bytes(group.peak_bytes),
            group.what,
            Text(_ended(group)),
        )
    return table


def _units(fused: tuple[Fused, ...]) -> Table:
    table = _table()
    table.add_column("unit", no_wrap=True, max_width=UNIT_WIDTH)
    table.add_column("calls", justify="right", no_wrap=True)
    in_parts = any(unit.parts > 1 for unit in fused)
    if in_parts:
        table.add_column("parts", justify="right", no_wrap=True)
    table.add_column("what it computes")
    for unit in fused:
        count = Counter(unit.operations)
        names = (name if times == 1 else f"{times} {name}" for name, times in count.items())
        numbers = [unit.calls, unit.parts] if in_parts else [unit.calls]
        table.add_row(unit.name, *map(str, numbers), ", ".join(names))
    return table


def _broken(module: str) -> str:
    """Return a module's path, broken into two lines if it is longer than ``MODULE_WIDTH``."""
    if len(module) <= MODULE_WIDTH:
        return module
    mark = BETWEEN if BETWEEN in module else "."
    head, dot, tail = module.rpartition(mark)
    return f"{head}{dot.rstrip()}\n{tail}"


def _ended(group: RegionGroup) -> str:
    """Return the cell that says what ended the regions of a group, and what ran after them."""
    where, colon, why = group.ended_by.partition(": ")
    name = where.replace("\\", "/").rpartition("/")[2]
    return "\n".join(filter(None, (f"{name}{colon}{why}", f"then {group.after}")))
