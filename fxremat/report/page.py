"""A plan as one HTML file that needs no network: its data, and a script that draws it."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.resources import files
from typing import Any

from fxremat.ir import Copy, Timeline
from fxremat.report.areas import areas_of, memory_of
from fxremat.report.facts import Figures, PlanFacts
from fxremat.report.memory import StepMemory
from fxremat.report.stages import StageStory, tell_stages
from fxremat.report.summary import batch_of, summarize
from fxremat.report.words import describe, explain

FOLDER = "html"
"""Where the parts of the page are."""


def page_of(plan: PlanFacts) -> str:
    """The whole file.

    Raises:
        PlanError: the plan does not say which tensors are held when.
    """
    return page_with(data_of(plan))


def page_with(told: dict[str, Any]) -> str:
    """A page that shows what its script reads."""
    data = json.dumps(told, allow_nan=False, separators=(",", ":"))
    page = _part("page.html")
    # Nothing in the data can end the element that it is in.
    for mark, text in (
        ("/*style*/", _part("page.css")),
        ("/*script*/", _part("step.js") + _part("page.js")),
        ("/*data*/", data.replace("<", "\\u003c")),
    ):
        page = page.replace(mark, text)
    return page


def _part(name: str) -> str:
    return files(__package__).joinpath(FOLDER, name).read_text(encoding="utf-8")


def data_of(plan: PlanFacts) -> dict[str, Any]:
    """What the script draws: bytes and seconds as they are in the plan.

    Raises:
        PlanError: the plan does not say which tensors are held when.
    """
    memory = memory_of(plan)
    stories = tuple(story for story in tell_stages(plan) if story.executed)
    return {
        "summary": list(summarize(plan, stories)),
        "regions": [],
        "kept": plan.kept and asdict(plan.kept),
        "peak_bytes": plan.predicted_held_bytes,
        **figures_of(plan, plan),
        "stages": [stage_of(story, memory) for story in stories],
        **drawn(memory, plan.timeline, memory.times(plan.timeline)),
        "frontier": [[p.peak_bytes, p.predicted_s] for p in plan.frontier.points],
    }


def figures_of(plan: Figures, first: PlanFacts) -> dict[str, Any]:
    """Of what a page is, and its figures.

    Args:
        plan: of one graph or of several.
        first: the plan of its first graph.
    """
    return {
        "model": first.model,
        "device": first.origin.device if first.origin else "",
        "batch": batch_of(first),
        "written": datetime.now(tz=timezone.utc).astimezone().strftime("%d %B %Y, %H:%M"),
        "budget_bytes": plan.budget_bytes,
        "least_budget_bytes": plan.least_budget_bytes,
        "counted_bytes": plan.counted_bytes,
        "measured_peak_bytes": plan.measured_peak_bytes,
        "baseline_bytes": plan.baseline_peak_bytes,
        "predicted_s": plan.predicted_s,
        "baseline_s": plan.baseline_s,
        "host_bytes": plan.host_bytes,
    }


def drawn(memory: StepMemory, timeline: Timeline, times_s: tuple[float, ...]) -> dict[str, Any]:
    """What the script draws of a step.

    Args:
        memory: what is held, instant by instant.
        timeline: what happens when.
        times_s: at which each instant begins.
    """
    return {
        "makespan_s": timeline.makespan_s,
        "turn": memory.turn,
        "end": memory.end,
        "times_s": times_s,
        "areas": [
            {"name": a.name, "kind": a.kind.name, "colour": a.colour} for a in areas_of(memory)
        ],
        "tensors": [
            [t.name, t.nbytes, t.stage, t.operation, t.module, t.kind.name] for t in memory.tensors
        ],
        "lives": _lives(memory),
        "events": [
            [str(e.op), e.lane.value, e.start_s, e.end_s, e.op.stage, _nbytes(e.op), e.peak_bytes]
            for e in timeline.events
            if hasattr(e.op, "stage")
        ],
    }


def _nbytes(op: object) -> int:
    return op.nbytes if isinstance(op, Copy) else 0


def _lives(memory: StepMemory) -> list[int]:
    """Tensor, first instant, instant after the last and area of each, lowest area first."""
    return [
        number
        for index, area in enumerate(areas_of(memory))
        for life in area.lives
        for number in (life.tensor, life.begin, life.end, index)
    ]


def stage_of(story: StageStory, memory: StepMemory) -> dict[str, Any]:
    """A row of the page's table."""
    return {
        "stage": story.index,
        "name": story.name,
        "module": memory.modules[story.index],
        "forward_s": story.forward_s,
        "boundary_bytes": story.boundary_bytes,
        "saved_bytes": story.saved_bytes,
        "held_bytes": story.held_bytes,
        "moved_bytes": story.moved_bytes,
        "extra_s": story.extra_s,
        "what": describe(story),
        "why": explain(story),
    }
