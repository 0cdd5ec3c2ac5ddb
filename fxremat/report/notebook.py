"""A plan in a notebook: its summary, and a picture of the step's memory."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from fxremat.report.areas import Area, areas_of
from fxremat.report.facts import PlanFacts
from fxremat.report.memory import Kind, StepMemory
from fxremat.report.stages import tell_stages
from fxremat.report.summary import summarize
from fxremat.units import format_bytes, format_seconds

WIDTH, HEIGHT = 720, 190
"""Of the picture, in pixels."""

COLOURS = {
    Kind.PARAMETERS: "#a3a9b4",
    Kind.BUFFERS: "#b4b9c3",
    Kind.INPUTS: "#c4c8d0",
    Kind.OTHER: "#8d939e",
    Kind.GRADIENTS: "#8f83b5",
    Kind.PASSING: "#d9a441",
    Kind.WORKSPACES: "#c87f6f",
    Kind.LOSS: "#9b3f55",
}
"""Of areas, on light and dark ground; activations go from green to blue."""


def html_of(plan: PlanFacts) -> str:
    """A table of the summary; above it, where the plan says what is held when, the picture."""
    stories = tuple(story for story in tell_stages(plan) if story.executed)
    rows = "".join(
        f'<tr><td style="text-align:left;opacity:.65">{escape(name)}</td>'
        f'<td style="text-align:left">{escape(text)}</td></tr>'
        for name, text in summarize(plan, stories)
    )
    picture = _picture(plan, plan.memory) if plan.memory.count else ""
    return f"<div>{picture}<table>{rows}</table></div>"


def _picture(plan: PlanFacts, memory: StepMemory) -> str:
    """Areas over time as SVG."""
    most = 1.06 * max(plan.budget_bytes, memory.peak_bytes)
    times_s = memory.times(plan.timeline)
    end_s = plan.timeline.makespan_s or 1.0
    columns = _columns(memory.held_bytes(), [t / end_s for t in times_s])
    floor = [0] * len(columns)
    shapes = []
    areas = areas_of(memory)
    for area in areas:
        held = memory.held_bytes(area.lives)
        top = [below + held[instant] for below, instant in zip(floor, columns, strict=True)]
        path = _outline(floor, top, HEIGHT / most)
        shapes.append(f'<path d="{path}" fill="{_colour(area, areas)}"><title>'
                      f"{escape(area.name)}, {format_bytes(max(held))}</title></path>")  # fmt: skip
        floor = top
    line = HEIGHT * (1 - plan.budget_bytes / most)
    peak = f"peak {format_bytes(memory.peak_bytes)} in {format_seconds(end_s)}"
    text = 'font-size="11" font-family="sans-serif" fill="currentColor"'
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT + 16}" width="{WIDTH}" role="img" '
        f'aria-label="{peak}">{"".join(shapes)}'
        f'<path d="M0 {line:.1f}H{WIDTH}" stroke="#b4432f" stroke-dasharray="6 4"/>'
        f'<text x="4" y="{line + 12:.1f}" {text}>budget {format_bytes(plan.budget_bytes)}</text>'
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


def _colour(area: Area, areas: tuple[Area, ...]) -> str:
    if area.kind is not Kind.ACTIVATIONS:
        return COLOURS[area.kind]
    last = max(other.band for other in areas)
    depth = max(area.band, 0) / max(last, 1)
    return f"hsl({172 + 48 * depth:.0f},40%,{66 - 18 * depth:.0f}%)"
