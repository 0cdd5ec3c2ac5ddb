"""A step of several graphs as a page and as a trace, as a plan of one graph has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fxremat.report.notebook import html_with
from fxremat.report.page import drawn, figures_of, page_with, stage_of
from fxremat.report.plan import Plan
from fxremat.report.stages import StageStory, tell_stages
from fxremat.report.step_facts import StepFacts
from fxremat.report.step_rows import lines_of, summarize_step
from fxremat.report.step_view import StepView, view_of
from fxremat.report.trace import PREDICTED, Told, named, packed

REGIONS = 5
"""Thread of a trace that has the regions."""


def page_of_step(step: StepFacts) -> str:
    """The whole file.

    Raises:
        PlanError: a plan does not say which tensors are held when.
    """
    view = view_of(step)
    stages = (
        stage_of(story, view.memory)
        for row, first in zip(step.regions, view.first_stages, strict=True)
        for story in _stories(row.plan, first)
    )
    told = {
        "summary": list(summarize_step(step)),
        "regions": list(_lines(step, view)),
        "kept": None,
        "peak_bytes": view.memory.peak_bytes,
        **figures_of(step, step.regions[0].plan),
        "stages": list(stages),
        "frontier": [],
        **drawn(view.memory, view.timeline, view.times_s),
    }
    return page_with(told)


def html_of_step(step: StepFacts) -> str:
    """The summary, and a picture of the step's memory, for a notebook."""
    view = view_of(step)
    end_s = view.timeline.makespan_s
    return html_with(summarize_step(step), view.memory, view.times_s, end_s, step.budget_bytes)


def _stories(plan: Plan, first: int) -> Iterator[StageStory]:
    """Of the stages that run, counted from ``first``."""
    for story in tell_stages(plan):
        if story.executed:
            runs = tuple(replace(run, start=run.start + first) for run in story.runs)
            yield replace(story, index=story.index + first, runs=runs)


def _lines(step: StepFacts, view: StepView) -> Iterator[dict[str, Any]]:
    """Rows of the page's table of regions."""
    ends = (*view.first_stages[1:], len(view.stages))
    for line in lines_of(step):
        forward_begin_s, *_ = view.spans_s[line.first - 1]
        _, forward_end_s, *_ = view.spans_s[line.last - 1]
        yield {
            "region": line.label,
            "covers": line.covers,
            "forward_s": line.forward_s,
            "held_bytes": line.held_bytes,
            "peak_bytes": line.peak_bytes,
            "what": line.what,
            "ended_by": line.ended_by,
            "after": line.after,
            "stages": [view.first_stages[line.first - 1], ends[line.last - 1]],
            "begin_s": forward_begin_s,
            "end_s": forward_end_s,
        }


def trace_of_step(step: StepFacts) -> str:
    """The trace as JSON, in the format of trace events, by ascending time.

    Raises:
        PlanError: a plan does not say which tensors are held when.
    """
    view = view_of(step)
    told = Told(view.memory, view.stages, view.times_s)
    events = list(told.process(view.timeline, pid=PREDICTED, name="predicted"))
    events.append(named("thread_name", "regions", PREDICTED, REGIONS))
    for number, (row, spans_s) in enumerate(zip(step.regions, view.spans_s, strict=True), 1):
        facts = {"module": row.module, "ended by": row.ended_by, "held_bytes": row.held_bytes}
        peaks = row.forward_peak_bytes, row.backward_peak_bytes
        directions = zip(("forward", "backward"), (spans_s[:2], spans_s[2:]), peaks, strict=True)
        for direction, (begin_s, end_s), peak_bytes in directions:
            events.append(
                {
                    "ph": "X",
                    "name": f"region {number} {direction}",
                    "cat": direction,
                    "ts": begin_s * 1e6,
                    "dur": (end_s - begin_s) * 1e6,
                    "pid": PREDICTED,
                    "tid": REGIONS,
                    "args": {**facts, "peak_bytes": peak_bytes},
                }
            )
    return packed(events)
