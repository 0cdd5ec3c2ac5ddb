"""A step of several graphs in a few lines, and a line for each graph or run of alike ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fxremat.ir import Copy, Lane
from fxremat.report.modules import common_module, named, span
from fxremat.report.plan import Plan
from fxremat.report.stages import tell_stages
from fxremat.report.step_facts import RegionRow, StepFacts
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
    yield "budget", _exact(step.budget_bytes) + written
    yield "least feasible", _exact(step.least_budget_bytes)
    used = f", {step.counted_bytes / step.budget_bytes:.1%} of the budget"
    on_reserved = step.budget_on == "reserved"
    yield "predicted peak", _exact(step.predicted_peak_bytes) + ("" if on_reserved else used)
    if on_reserved or step.predicted_reserved_bytes != step.predicted_peak_bytes:
        reserved = _exact(step.predicted_reserved_bytes)
        yield "predicted reserved", reserved + (used if on_reserved else "")
    seen_bytes = step.measured_peak_bytes
    yield "measured peak", "no such step was watched" if seen_bytes is None else _exact(seen_bytes)
    yield "with everything kept", _exact(step.baseline_peak_bytes)
    yield "predicted time", _time(step)
    if step.host_bytes:
        yield "host memory", _exact(step.host_bytes)
    count = len(step.regions)
    yield (
        "regions",
        f"{count}, each a graph's call, beside {_exact(step.there_bytes)} that is there",
    )


def _time(step: StepFacts) -> str:
    text = format_seconds(step.predicted_s)
    if step.baseline_s > 0:
        ratio = step.predicted_s / step.baseline_s
        text += f", {ratio:.3f} × the {format_seconds(step.baseline_s)} without recomputation"
    if step.between_s is None:
        return f"{text}; between graphs nothing was measured yet"
    return f"{text}; {format_seconds(step.between_s)} of it between graphs"


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


def what_is_done(plan: Plan) -> str:
    """What a plan does for memory, in short."""
    stories = [story for story in tell_stages(plan) if story.executed]
    again = sum(bool(story.again) or story.is_kept_in_part for story in stories)
    stages = "stage" if len(stories) == 1 else "stages"
    done = [f"recomputes {again} of {len(stories)} {stages}"] if again else []
    moved_bytes = sum(
        event.op.nbytes
        for event in plan.timeline.events
        if isinstance(event.op, Copy) and event.lane is Lane.D2H
    )
    done += [f"{format_bytes(moved_bytes)} travel to the host"] if moved_bytes else []
    return ", ".join(done) or "keeps everything"


def _after(rows: list[RegionRow]) -> str:
    """Seconds and bytes of what comes after regions, in both directions."""
    times_s = [row.between_s for row in rows if row.between_s is not None]
    most = format_bytes(max(0, *(row.between_bytes for row in rows)))
    return f"{format_seconds(sum(times_s))}, {most}" if times_s else most


def _exact(nbytes: int) -> str:
    return f"{format_bytes(nbytes)} ({nbytes} bytes)"
