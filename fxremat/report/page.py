"""A plan as one HTML file that needs no network, and as a summary and a picture for a notebook."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime, timezone
from html import escape
from importlib.resources import files
from typing import Any

from fxremat.ir import Copy
from fxremat.report.facts import AnyPlan, StepFacts, plans_of
from fxremat.report.memory import BUDGET_COLOUR, areas_of
from fxremat.report.stages import StageReport, deciders, describe, explain
from fxremat.report.summary import batch_of, group_regions, summarize
from fxremat.report.view import StepView, has_memory, view_of
from fxremat.units import format_bytes, format_seconds

FOLDER = "html"
"""Where the parts of the page are."""

WIDTH, HEIGHT = 720, 190
"""Of a notebook's picture, in pixels."""


def page_with(data: dict[str, Any]) -> str:
    """A page that shows what its script reads."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    page = _part("page.html")
    # Nothing in the data can end the element that it is in.
    for mark, part in (
        ("/*style*/", _part("page.css")),
        ("/*script*/", _part("step.js") + _part("page.js")),
        ("/*data*/", text.replace("<", "\\u003c")),
    ):
        page = page.replace(mark, part)
    return page


def _part(name: str) -> str:
    return files(__package__).joinpath(FOLDER, name).read_text(encoding="utf-8")


def data_of(plan: AnyPlan) -> dict[str, Any]:
    """What the script draws: bytes and seconds as they are in the plan.

    Raises:
        PlanError: the plan does not say which tensors are held when.
    """
    view, (first, *_) = view_of(plan), plans_of(plan)
    is_step = isinstance(plan, StepFacts)
    memory, areas = view.memory, areas_of(view.memory)
    return {
        "summary": list(summarize(plan)),
        "regions": list(_regions(plan, view)) if isinstance(plan, StepFacts) else [],
        "kept": view.kept and asdict(view.kept),
        "peak_bytes": memory.peak_bytes,
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
        "stages": [_stage(stage, memory.modules[stage.index]) for stage in view.stages],
        "frontier": []
        if is_step
        else [[p.peak_bytes, p.predicted_s] for p in first.frontier.points],
        "makespan_s": view.timeline.makespan_s,
        "turn": memory.turn,
        "end": memory.end,
        "times_s": view.times_s,
        "areas": [{"name": a.name, "kind": a.kind.name, "colour": a.colour} for a in areas],
        "tensors": [
            [t.name, t.nbytes, t.stage, t.operation, t.module, t.kind.name] for t in memory.tensors
        ],
        # Tensor, first instant, instant after the last and area of each, lowest area first.
        "lives": [
            number
            for index, area in enumerate(areas)
            for life in area.lives
            for number in (life.tensor, life.begin, life.end, index)
        ],
        "events": [
            [str(e.op), e.lane.value, e.start_s, e.end_s, e.op.stage, _nbytes(e.op), e.peak_bytes]
            for e in view.timeline.events
            if hasattr(e.op, "stage")
        ],
    }


def _nbytes(op: object) -> int:
    return op.nbytes if isinstance(op, Copy) else 0


def _stage(stage: StageReport, module: str) -> dict[str, Any]:
    """A row of the page's table of stages."""
    return {
        "stage": stage.index,
        "module": module,
        "forward_s": stage.forward_s,
        "boundary_bytes": stage.boundary_bytes,
        "saved_bytes": stage.saved_bytes,
        "held_bytes": stage.held_bytes,
        "moved_bytes": stage.moved_bytes,
        "extra_s": stage.extra_s,
        "what": describe(stage) + (f" ({deciders(stage)})" if stage.decided else ""),
        "why": explain(stage),
    }


def _regions(step: StepFacts[Any], view: StepView) -> Iterator[dict[str, Any]]:
    """Rows of the page's table of regions."""
    begins = (*view.first_stages, len(view.stage_names))
    for group in group_regions(step):
        yield {
            **asdict(group),
            "region": group.label,
            "stages": [begins[group.first - 1], begins[group.last]],
            "begin_s": view.spans_s[group.first - 1][0],
            "end_s": view.spans_s[group.last - 1][1],
        }


def notebook_of(plan: AnyPlan) -> str:
    """A table of the summary; above it, where the plan says what is held when, the picture."""
    rows = "".join(
        f'<tr><td style="text-align:left;opacity:.65">{escape(name)}</td>'
        f'<td style="text-align:left">{escape(text)}</td></tr>'
        for name, text in summarize(plan)
    )
    picture = _picture(view_of(plan), plan.budget_bytes) if has_memory(plan) else ""
    return f"<div>{picture}<table>{rows}</table></div>"


def _picture(view: StepView, budget_bytes: int) -> str:
    """Areas over time as SVG."""
    memory, end_s = view.memory, view.timeline.makespan_s or 1.0
    most = 1.06 * max(budget_bytes, memory.peak_bytes)
    columns = _columns(memory.held_bytes(), [t / end_s for t in view.times_s])
    floor = [0] * len(columns)
    shapes = []
    for area in areas_of(memory):
        held = memory.held_bytes(area.lives)
        top = [below + held[instant] for below, instant in zip(floor, columns, strict=True)]
        path = _outline(floor, top, HEIGHT / most)
        shapes.append(f'<path d="{path}" fill="{area.colour}"><title>'
                      f"{escape(area.name)}, {format_bytes(max(held))}</title></path>")  # fmt: skip
        floor = top
    line = HEIGHT * (1 - budget_bytes / most)
    peak = f"peak {format_bytes(memory.peak_bytes)} in {format_seconds(end_s)}"
    text = 'font-size="11" font-family="sans-serif" fill="currentColor"'
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT + 16}" width="{WIDTH}" role="img" '
        f'aria-label="{peak}">{"".join(shapes)}'
        f'<path d="M0 {line:.1f}H{WIDTH}" stroke="{BUDGET_COLOUR}" stroke-dasharray="6 4"/>'
        f'<text x="4" y="{line + 12:.1f}" {text}>budget {format_bytes(budget_bytes)}</text>'
        f'<text x="0" y="{HEIGHT + 13}" {text}>{peak}</text></svg>'
    )


def _columns(totals: tuple[int, ...], places: list[float]) -> list[int]:
    """For each column of pixels the instant at which most is held."""
    found: list[int] = []
    begin = 0
    for column in range(WIDTH):
        end = begin
        while end + 1 < len(places) and places[end + 1] * WIDTH < column + 1:
            end += 1
        found.append(max(range(begin, end + 1), key=totals.__getitem__))
        begin = end
    return found


def _outline(floor: list[int], top: list[int], scale: float) -> str:
    """A closed path between two lines of steps, in pixels."""

    def steps(line: list[int], columns: range) -> Iterator[str]:
        last = -1
        for column in columns:
            if line[column] != last:
                last = line[column]
                x = column if columns.step > 0 else column + 1
                yield f"H{x}V{HEIGHT - last * scale:.1f}"

    there = "".join(steps(top, range(len(top))))
    back = "".join(steps(floor, range(len(floor) - 1, -1, -1)))
    return f"M0 {HEIGHT}{there}H{len(top)}{back}H0Z"
