"""A plan in a notebook: its summary, and a picture of the step's memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from fxremat.report.areas import BUDGET, areas_of
from fxremat.report.facts import PlanFacts
from fxremat.report.memory import StepMemory
from fxremat.report.stages import tell_stages
from fxremat.report.summary import summarize
from fxremat.units import format_bytes, format_seconds

WIDTH, HEIGHT = 720, 190
"""Of the picture, in pixels."""


def html_of(plan: PlanFacts) -> str:
    """A table of the summary; above it, where the plan says what is held when, the picture."""
    stories = tuple(story for story in tell_stages(plan) if story.executed)
    memory = plan.memory
    times_s = memory.times(plan.timeline) if memory.count else ()
    return html_with(
        summarize(plan, stories), memory, times_s, plan.timeline.makespan_s, plan.budget_bytes
    )


def html_with(
    summary: Iterable[tuple[str, str]],
    memory: StepMemory,
    times_s: tuple[float, ...],
    end_s: float,
    budget_bytes: int,
) -> str:
    """A table and a picture.

    Args:
        summary: what each row is about, and what it says.
        memory: of a step; there is no picture where it is empty.
        times_s: at which its instants begin.
        end_s: of the step.
        budget_bytes: of the step.
    """
    rows = "".join(
        f'<tr><td style="text-align:left;opacity:.65">{escape(name)}</td>'
        f'<td style="text-align:left">{escape(text)}</td></tr>'
        for name, text in summary
    )
    picture = _picture(memory, times_s, end_s or 1.0, budget_bytes) if memory.count else ""
    return f"<div>{picture}<table>{rows}</table></div>"


def _picture(
    memory: StepMemory, times_s: tuple[float, ...], end_s: float, budget_bytes: int
) -> str:
    """Areas over time as SVG."""
    most = 1.06 * max(budget_bytes, memory.peak_bytes)
    columns = _columns(memory.held_bytes(), [t / end_s for t in times_s])
    floor = [0] * len(columns)
    shapes = []
    areas = areas_of(memory)
    for area in areas:
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
        f'<path d="M0 {line:.1f}H{WIDTH}" stroke="{BUDGET}" stroke-dasharray="6 4"/>'
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
