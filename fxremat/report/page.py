"""A plan as one HTML file that needs no network, and as a summary for a notebook."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime, timezone
from html import escape
from importlib.resources import files
from typing import Any

from fxremat.ir import Copy
from fxremat.report.areas import areas_of
from fxremat.report.peak import holders_with_tensors
from fxremat.report.plan import AnyPlan, StepPlan, plans_of
from fxremat.report.stages import StageReport, deciders, describe, explain
from fxremat.report.summary import batch_of, group_regions, summarize
from fxremat.report.view import StepView, view_of

FOLDER = "html"
"""The folder with the parts of the page."""


def page_with(data: dict[str, Any]) -> str:
    """Return the HTML page that displays ``data``, the result of :func:`data_of`."""
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
    """Return the data of a plan that the page's script draws, in bytes and seconds.

    Raises:
        PlanError: the plan has no record of tensors.
    """
    view, (first, *_) = view_of(plan), plans_of(plan)
    is_step = isinstance(plan, StepPlan)
    memory, areas = view.memory, areas_of(view.memory)
    return {
        "summary": list(summarize(plan)),
        "at_peak": [
            {
                "nbytes": holder.nbytes,
                "share": holder.share,
                "text": holder.text,
                "place": holder.place,
                "how_to_free": holder.how_to_free,
                "tensors": tensors,
            }
            for holder, tensors in holders_with_tensors(plan, view)
        ],
        "peak_instant": memory.peak_instant,
        "regions": list(_regions(plan, view)) if isinstance(plan, StepPlan) else [],
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
        "loss_point": memory.loss_point,
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
    """Return the row of one stage, by column, in the page's table of stages."""
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


def _regions(step: StepPlan, view: StepView) -> Iterator[dict[str, Any]]:
    """Yield the rows of the page's table of regions, one for each group of equal regions."""
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
    """Return the summary of a plan as an HTML table, for a notebook."""
    rows = "".join(
        f'<tr><td style="text-align:left;opacity:.65">{escape(name)}</td>'
        f'<td style="text-align:left">{escape(text)}</td></tr>'
        for name, text in summarize(plan)
    )
    return f"<table>{rows}</table>"
