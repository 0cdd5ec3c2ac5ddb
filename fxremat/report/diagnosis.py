"""What ``fxremat doctor`` reports of a model, as data and as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fxremat.units import format_bytes, format_seconds, plural

WIDTH = 100
"""The number of columns of the text."""

_NAMES = 22
"""The number of columns of the names of figures."""


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """A line of the model at which a captured graph ends, and the code that follows it.

    Attributes:
        line: the line, as ``"model.py:23"``; empty if it is unknown.
        reason: why the graph ends there, in Dynamo's words.
        count: how many times a step that was observed gets there.
        seconds: seconds of the code that follows, forward and backward, or ``None`` if they were
            not measured.
        nbytes: maximum bytes that this code allocates.
    """

    line: str
    reason: str
    count: int
    seconds: float | None
    nbytes: int


@dataclass(frozen=True, slots=True)
class Region:
    """A captured graph of a step.

    Attributes:
        module: the part of the model that it computes; empty if unknown.
        operations: number of operations of its forward.
        stages: number of stages that it is planned in.
        calls: number of times that a step runs it.
    """

    module: str
    operations: int
    stages: int
    calls: int = 1


@dataclass(frozen=True, slots=True)
class Opaque:
    """Operations that are planned as one each, because nothing inside them can be planned.

    Attributes:
        name: name of the operation.
        why: why it is one, and what that means for its plan.
        count: number of them in the forwards.
        module: the module of the first one; empty if unknown.
        line: the line of the model that runs the first one; empty if unknown.
    """

    name: str
    why: str
    count: int
    module: str
    line: str


@dataclass(frozen=True, slots=True)
class Point:
    """A budget, and the step that is planned within it.

    Attributes:
        budget_bytes: the budget.
        predicted_s: predicted seconds of a step.
        at_peak: bytes at the peak by purpose, which add up to the budget if it is a peak.
        needed_by: the operation with the peak, its module and its line; empty if unknown.
        host_bytes: bytes of host memory that transfers take.
    """

    budget_bytes: int
    predicted_s: float
    at_peak: Mapping[str, int] = field(default_factory=dict)
    needed_by: str = ""
    host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class FirstStep:
    """Seconds until the first plan runs, by phase.

    Attributes:
        cold: seconds of each phase with an empty cache folder.
        cached: seconds of each phase with the plan in the cache folder.
        plans_cached: whether a second process neither measures nor plans.
        folder: the user's cache folder, or ``None`` if it is disabled or cannot be written.
    """

    cold: Mapping[str, float]
    cached: Mapping[str, float]
    plans_cached: bool
    folder: str | None


@dataclass(frozen=True, slots=True)
class Advice:
    """A recommendation whose effect was computed.

    Attributes:
        argument: the argument of ``fxremat.compile``, as it is written.
        effect: what it changes, with numbers.
        budget_bytes: the budget that the effect is at, or ``None``.
        predicted_s: predicted seconds of a step with it, or ``None``.
    """

    argument: str
    effect: str
    budget_bytes: int | None = None
    predicted_s: float | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What can be planned of a training step, and what that takes.

    Attributes:
        model: class of the model.
        arguments: place, and dtype and shape, of each tensor of the sample.
        device: the device.
        loss: whose loss is counted: ``"own"``, the model's, or ``"unknown"``.
        optimizer: the optimizer whose state is counted, or ``None``.
        problem: what prevents planning; empty if nothing does.
        why_several: why the model cannot be captured as one graph; empty if it can.
        regions: the captured graphs, in the order of their first calls.
        breaks: the lines at which graphs end.
        unplanned: what runs as it is in addition to code after breaks, and why.
        opaque: operations that are planned as one.
        kept: the step with everything kept.
        least: the step within the least budget.
        half: the step with half of the activations at the peak or, where no plan has so few, with
            half of what a plan can free; ``None`` if no plan takes less than everything kept.
        first_step: seconds until the first plan runs.
        advice: recommendations.
        steps_run: number of training steps that were run to find this out.
    """

    model: str
    arguments: tuple[tuple[str, str], ...]
    device: str
    loss: str
    optimizer: str | None
    problem: str = ""
    why_several: str = ""
    regions: tuple[Region, ...] = ()
    breaks: tuple[GraphBreak, ...] = ()
    unplanned: tuple[str, ...] = ()
    opaque: tuple[Opaque, ...] = ()
    kept: Point | None = None
    least: Point | None = None
    half: Point | None = None
    first_step: FirstStep | None = None
    advice: tuple[Advice, ...] = ()
    steps_run: int = 0

    @property
    def graphs(self) -> int:
        """The number of graphs that a step runs."""
        return sum(region.calls for region in self.regions)

    def facts(self) -> dict[str, Any]:
        """Return the diagnosis as a dict that ``json`` can write."""
        return {**asdict(self), "graphs": self.graphs}

    def lines(self) -> list[str]:
        """Return the lines of text that the command prints, of at most 100 columns."""
        given = ", ".join(f"{place}: {tensor}" for place, tensor in self.arguments)
        loss = "its own loss" if self.loss == "own" else "a loss outside the model"
        state = f"the state of {self.optimizer}" if self.optimizer else "no optimizer"
        lines = [*_wrapped(f"{self.model} on {self.device}, {given}", "", "  ")]
        lines.append(f"  with {loss} and {state}")
        if self.problem:
            lines += ["", "not planned", *_paragraph(self.problem)]
        for title, body in (
            ("captured", self._captured()),
            ("planned", self._planned()),
            ("memory", self._memory()),
            ("first step", self._first_step()),
            ("recommended", self._recommended()),
        ):
            found = list(body)
            if found:
                lines += ["", title, *found]
        return lines

    def _captured(self) -> Iterator[str]:
        if self.steps_run:
            yield from _wrapped(
                f"{plural(self.steps_run, 'training step')} of the sample were run to see this: "
                "forward, backward, and gradients cleared. No parameter or buffer was changed."
            )
        if not self.regions:
            return
        if self.graphs == 1 and not self.why_several:
            yield "  as one graph"
            return
        several = ", each a region of one step" if self.graphs > 1 else "; the rest is not captured"
        yield f"  as {plural(self.graphs, 'graph')}{several}"
        if self.why_several:
            yield from _wrapped(f"since {self.why_several}", "    ")
        for region in self.regions:
            times = f", {region.calls} times in a step" if region.calls > 1 else ""
            yield from _wrapped(
                f"{region.module or 'a graph'}: {plural(region.operations, 'operation')}{times}",
                "    ",
            )
        for own in self.breaks:
            times = f"{own.count} times " if own.count > 1 else ""
            yield from _wrapped(
                f"ends {times}at {own.line or 'an unknown line'}: {own.reason}", "    "
            )
            if own.seconds is not None:
                takes = f"{format_seconds(own.seconds)}, {format_bytes(own.nbytes)}"
                yield f"      the code that follows takes {takes} per step"

    def _planned(self) -> Iterator[str]:
        if not self.regions:
            return
        count = sum(region.operations * region.calls for region in self.regions)
        stages = sum(region.stages * region.calls for region in self.regions)
        yield f"  {plural(count, 'operation')} of the forward, in {plural(stages, 'stage')}"
        for own in self.opaque:
            where = ", ".join(filter(None, (own.module, own.line)))
            first = f" (the first in {where})" if where else ""
            yield from _wrapped(f"as one each: {own.count} × {own.name}{first}: {own.why}")
        if self.breaks:
            yield "  as it is: the code after each line above; its bytes count"
        for text in self.unplanned:
            yield from _wrapped(f"as it is: {text}")
        if not (self.opaque or self.breaks or self.unplanned):
            yield "  nothing runs as it is"

    def _memory(self) -> Iterator[str]:
        kept, least = self.kept, self.least
        if kept is None or least is None:
            return
        rows = [("everything kept", kept), ("least budget", least)]
        for name, point in rows:
            time = f"{format_seconds(point.predicted_s)} per step"
            compared = "" if point is kept else f", {_times(point, kept)} that time"
            exact = f"{point.budget_bytes} bytes"
            size = f"{format_bytes(point.budget_bytes):>11}"
            yield f"  {name:<{_NAMES}}{size}   {exact}, {time}{compared}"
        if least.needed_by:
            yield from _wrapped(f"the least budget is needed by {least.needed_by}")
        yield ""
        yield f"  {'at the peak':<{_NAMES}}{'all kept':>11}{'least':>13}"
        for kind in dict.fromkeys((*kept.at_peak, *least.at_peak)):
            each = [point.at_peak.get(kind, 0) for point in (kept, least)]
            if any(each):
                yield f"    {kind:<{_NAMES - 2}}{format_bytes(each[0]):>11}" + (
                    f"{format_bytes(each[1]):>13}"
                )

    def _first_step(self) -> Iterator[str]:
        own = self.first_step
        if own is None:
            return
        yield "  at the least budget, without the import of torch"
        yield from _wrapped(f"with an empty cache: {_phases(own.cold)}")
        yield from _wrapped(f"from the cache: {_phases(own.cached)}")
        if not own.plans_cached:
            yield "  the plan is not cached, but its measurements are"
        if own.folder is None:
            yield "  the cache folder is disabled or not writable: each process plans again"
        else:
            yield from _wrapped(f"cache folder: {own.folder}")

    def _recommended(self) -> Iterator[str]:
        for own in self.advice:
            yield from _wrapped(f"{own.argument}: {own.effect}")


def _times(point: Point, kept: Point) -> str:
    return f"{point.predicted_s / kept.predicted_s:.2f} ×" if kept.predicted_s else "1.00 ×"


def _phases(seconds: Mapping[str, float]) -> str:
    """Return the sum of phases, and each of them, as text."""
    parts = ", ".join(f"{name} {format_seconds(own)}" for name, own in seconds.items())
    return f"{format_seconds(sum(seconds.values()))} ({parts})"


def _paragraph(text: str) -> list[str]:
    """Return each line of a text, wrapped."""
    return [line for own in text.splitlines() for line in _wrapped(own)]


def _wrapped(text: str, first: str = "  ", more: str | None = None) -> Sequence[str]:
    """Return a text in lines of at most ``WIDTH`` columns.

    Args:
        text: the text.
        first: the indentation of its first line.
        more: that of further lines; by default two columns more.
    """
    more = f"{first}  " if more is None else more
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=more, break_on_hyphens=False
    )
