"""A step of several graphs in a few lines, and a line for each graph or run of alike ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fxremat.report.modules import common_module, named, span
from fxremat.report.plan import Plan
from fxremat.report.stages import tell_stages
from fxremat.report.step_facts import RegionRow, StepFacts
from fxremat.report.summary import compared, exactly, figures, what_is_done
from fxremat.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class StepLine:
    """Regions that follow each other, are planned alike and ended by the same.

    Attributes:
        first, last: their numbers, counted from 1.
        covers: modules of the model that they are of; empty where nobody knows.
        forward_s: seconds of all their forwards, nothing recomputed.
        held_bytes: that all of them keep from forward to backward.
        peak_bytes: most that the step holds while one of them runs, forward or backward.
        what: their plans do.
        ended_by: see :class:`RegionRow`.
        after: seconds and bytes of what comes after each.
    """

    first: int
    last: int
    covers: str
    forward_s: float
    held_bytes: int
    peak_bytes: int
    what: str
    ended_by: str
    after: str

    @property
    def label(self) -> str:
        """``"3"`` or ``"3–14"``."""
        return span(self.first, self.last)


def summarize_step(step: StepFacts) -> Iterator[tuple[str, str]]:
    """What each line is about, and what it says."""
    written = f", written {step.budget!r}" if step.budget != step.budget_bytes else ""
    yield from figures(step, written=written)
    yield "predicted time", _time(step)
    if step.host_bytes:
        yield "host memory", exactly(step.host_bytes)
    count = len(step.regions)
    yield (
        "regions",
        f"{count}, each a graph's call, beside {exactly(step.there_bytes)} that is there",
    )


def _time(step: StepFacts) -> str:
    if step.between_s is None:
        return f"{compared(step)}; between graphs nothing was measured yet"
    return f"{compared(step)}; {format_seconds(step.between_s)} of it between graphs"


def lines_of(step: StepFacts) -> tuple[StepLine, ...]:
    """A line for each region, or run of alike ones, in the order of their forwards."""
    groups: list[list[int]] = []
    for place, row in enumerate(step.regions):
        if not groups or not _alike(step.regions[groups[-1][0]], row):
            groups.append([])
        groups[-1].append(place)
    return tuple(_line(step, places) for places in groups)


def _alike(one: RegionRow, other: RegionRow) -> bool:
    """Whether two regions are of graphs that are alike, planned and ended alike."""
    a, b = one.plan, other.plan
    return one.ended_by == other.ended_by and (
        a is b or (a.chain == b.chain and a.schedule == b.schedule and a.decision == b.decision)
    )


def _line(step: StepFacts, places: list[int]) -> StepLine:
    rows = [step.regions[place] for place in places]
    each = "each " if len(rows) > 1 else ""
    return StepLine(
        first=places[0] + 1,
        last=places[-1] + 1,
        covers=named([row.module or common_module(row.plan.memory.modules) for row in rows]),
        forward_s=sum(forward_s(row.plan) for row in rows),
        held_bytes=sum(row.held_bytes for row in rows),
        peak_bytes=max(max(row.forward_peak_bytes, row.backward_peak_bytes) for row in rows),
        what=each + what_is_done(rows[0].plan),
        ended_by=rows[0].ended_by,
        after=_after(rows),
    )


def forward_s(plan: Plan) -> float:
    """Seconds of a forward of which nothing is computed again."""
    return sum(story.forward_s for story in tell_stages(plan) if story.executed)


def _after(rows: list[RegionRow]) -> str:
    """Seconds and bytes of what comes after regions, in both directions."""
    times_s = [row.between_s for row in rows if row.between_s is not None]
    most = format_bytes(max(0, *(row.between_bytes for row in rows)))
    return f"{format_seconds(sum(times_s))}, {most}" if times_s else most
