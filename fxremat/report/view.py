"""A step on one axis of instants: forwards of its graphs in order, then backwards in reverse.

The plan of each graph has all memory outside that graph as one sum. A view splits this sum into the
memory that earlier graphs hold until their own backward begins, the memory that was allocated when
the step began, and other memory that was observed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import accumulate

from fxremat.errors import PlanError
from fxremat.ir import Copy, Event, Free, Lane, Offload, Op, Prefetch, Timeline, Wait
from fxremat.report.memory import CodeLine, Kind, Life, Outline, StepMemory, Tensor, Waiting
from fxremat.report.modules import BETWEEN, joined
from fxremat.report.plan import AnyPlan, Plan, StepPlan, plans_of
from fxremat.report.stages import StageReport, executed_stages

_GIVEN = (
    Kind.PARAMETERS,
    Kind.BUFFERS,
    Kind.INPUTS,
    Kind.OPTIMIZER,
    Kind.RESERVE,
    Kind.OTHER,
    Kind.GRADIENTS,
)
"""Kinds of memory that exist before a graph runs."""

REGION = "region"
"""The first part of the paths of modules in a step of several graphs."""

_SEVERAL = re.compile(f"[–,{BETWEEN.strip()}]")
"""What only names of several modules contain."""

THERE = "allocated before the step"
BESIDE = "held by code between regions"
LATER = "gradients, and results of later backwards"


@dataclass(frozen=True, slots=True)
class StepView:
    """The operations and the memory of a step over time.

    Attributes:
        memory: memory by instant. With several graphs, modules are named after the number of their
            region.
        timeline: times of all operations. Stages are numbered through all graphs.
        times_s: time in seconds at which each instant of the memory begins.
        stages: reports of the stages that run.
        stage_names: names of all stages.
        kept: the step with everything kept, or ``None`` if it is unknown.
        first_stages: index of each graph's first stage.
        spans_s: begin and end of each region's forward, and of its backward; empty for a plan of
            one graph.
        between: instants of code between two graphs, and of the loss point.
    """

    memory: StepMemory
    timeline: Timeline
    times_s: tuple[float, ...]
    stages: tuple[StageReport, ...]
    stage_names: tuple[str, ...]
    kept: Outline | None
    first_stages: tuple[int, ...] = (0,)
    spans_s: tuple[tuple[float, ...], ...] = ()
    between: frozenset[int] = frozenset()


def view_of(plan: AnyPlan) -> StepView:
    """Return the operations and the memory over time of a step, of one graph or of several.

    Code between two graphs is one instant in either direction, with half of its seconds.

    Raises:
        PlanError: a plan has no record of tensors.
    """
    if not all(own.memory.count for own in plans_of(plan)):
        raise PlanError(
            "this plan has no record of the tensors held at each instant, because it was not "
            "made from a model. Use the plan of a module that fxremat.compile returned",
            code="FXR605",
        )
    names = tuple(stage.name for own in plans_of(plan) for stage in own.chain.stages)
    if isinstance(plan, StepPlan):
        return _Joined(plan).view(names)
    return StepView(
        memory=plan.memory,
        timeline=plan.timeline,
        times_s=plan.memory.times(plan.timeline),
        stages=executed_stages(plan),
        stage_names=names,
        kept=plan.kept,
        between=frozenset((plan.memory.loss_point, plan.memory.end)),
    )


class _Joined:
    """Builds the view of a step of several graphs by joining the plans of its regions."""

    def __init__(self, step: StepPlan) -> None:
        self._count, self._now_s = 0, 0.0  # of instants so far, and when the next one begins
        self._step = step
        self._regions = [_Region(row.plan) for row in step.regions]
        sizes = [len(region.memory.modules) for region in self._regions]
        self._first_stages = tuple(accumulate(sizes, initial=0))[:-1]
        held = accumulate((row.held_bytes for row in step.regions), initial=0)
        # What is held at each region in addition to what those before it hold.
        self._beside_bytes = [
            region.given_bytes - before for region, before in zip(self._regions, held, strict=False)
        ]
        self._there_bytes = min(step.resident_bytes, *self._beside_bytes)
        self._tensors: list[Tensor] = []
        self._lives: list[Life] = []
        self._calls: list[int] = []
        self._events: list[Event] = []
        self._times_s: list[float] = []
        self._spans_s: list[tuple[float, ...]] = [()] * len(self._regions)
        self._lines: dict[CodeLine, int] = {}
        self._waiting: list[Waiting] = []
        self._again_s: list[float] = []
        self._call_numbers: list[dict[int, int]] = [{} for _ in self._regions]
        self._between_at: list[int] = []

    def view(self, names: tuple[str, ...]) -> StepView:
        """Return the view of the whole step; ``names`` are the names of all stages."""
        begins = []
        for place, (region, row) in enumerate(zip(self._regions, self._step.regions, strict=True)):
            begins.append(self._count)
            self._run(place, region.forward, range(region.memory.loss_point))
            self._between(BESIDE, Kind.OTHER, row.between_bytes, row.between_s)
        loss_point = self._count - 1
        for place in reversed(range(len(self._regions))):
            memory, back = self._regions[place].memory, self._count
            self._run(
                place, self._regions[place].backward, range(memory.loss_point + 1, memory.end + 1)
            )
            self._live(place, begins[place], back)
            earlier_s = self._step.regions[place - 1].between_s if place else None
            left_bytes = self._step.regions[place].between_back_bytes
            self._between(LATER, Kind.GRADIENTS, left_bytes, earlier_s)
        found = [t for t in self._regions[0].given if t.kind in (Kind.OPTIMIZER, Kind.RESERVE)]
        other_bytes = self._there_bytes - sum(tensor.nbytes for tensor in found)
        for tensor in (*found, Tensor(THERE, other_bytes, Kind.OTHER)):
            self._add(tensor, 0, self._count)
        memory = StepMemory(
            tuple(self._tensors),
            tuple(sorted(self._lives, key=lambda life: (life.begin, life.tensor))),
            tuple(self._calls),
            loss_point,
            self._count - 1,
            tuple(
                self._module(place, module)
                for place, region in enumerate(self._regions)
                for module in region.memory.modules
            ),
            tuple(self._lines),
            tuple(self._waiting),
            tuple(self._again_s),
        )
        return StepView(
            memory=memory,
            timeline=Timeline(tuple(self._events)),
            times_s=tuple(self._times_s),
            stages=self._stages(),
            stage_names=names,
            kept=_outline(self._step),
            first_stages=self._first_stages,
            spans_s=tuple(self._spans_s),
            between=frozenset((*self._between_at, self._count - 1)),
        )

    def _run(self, place: int, events: list[Event], instants: range) -> None:
        """Append a forward or a backward of a region to the events and instants of the step.

        Args:
            place: the index of the region.
            events: the events of this forward or backward.
            instants: its instants in the memory of the region.
        """
        region, begin_s = self._regions[place], self._now_s
        self._beside(BESIDE, Kind.OTHER, self._beside_bytes[place], len(instants))
        shift_s = begin_s - min((event.start_s for event in events), default=0.0)
        # Sums of the same seconds may differ in the last bit: time never goes back.
        self._times_s += (max(begin_s, region.times_s[at] + shift_s) for at in instants)
        for call, at in enumerate(region.memory.calls):
            if at in instants:
                self._call_numbers[place][call] = len(self._calls)
                self._calls.append(self._count + at - instants.start)
        self._events += (
            replace(
                event,
                op=_of_stage(event.op, self._first_stages[place]),
                start_s=event.start_s + shift_s,
                end_s=event.end_s + shift_s,
            )
            for event in events
        )
        self._count += len(instants)
        self._now_s = max([begin_s, *(event.end_s + shift_s for event in events)])
        self._spans_s[place] += (begin_s, self._now_s)

    def _between(self, name: str, kind: Kind, nbytes: int, between_s: float | None) -> None:
        """Append the instant of code between two regions, with the memory that it holds itself.

        Args:
            name: the name of this memory.
            kind: the purpose of this memory.
            nbytes: its bytes in addition to those allocated before the step.
            between_s: seconds of the code in both directions, or ``None`` if unknown.
        """
        self._beside(name, kind, self._step.resident_bytes + nbytes, 1)
        self._times_s.append(self._now_s)
        self._between_at.append(self._count)
        self._count += 1
        self._now_s += (between_s or 0.0) / 2

    def _beside(self, name: str, kind: Kind, nbytes: int, length: int) -> None:
        """Add memory that no region holds itself for the next ``length`` instants.

        Args:
            name: the name of this memory.
            kind: the purpose of this memory.
            nbytes: its bytes, including those held throughout the step, which are subtracted.
            length: the number of instants.
        """
        more_bytes = nbytes - self._there_bytes
        if more_bytes > 0 and length:
            self._add(Tensor(name, more_bytes, kind), self._count, self._count + length)

    def _add(self, tensor: Tensor, begin: int, end: int) -> None:
        self._lives.append(Life(len(self._tensors), begin, end))
        self._tensors.append(tensor)

    def _live(self, place: int, begin: int, back: int) -> None:
        """Add the tensors that a region allocates itself, with their intervals in the step.

        Args:
            place: the index of the region.
            begin: the first instant of its forward in the step.
            back: the first instant of its backward in the step.
        """
        region, first_stage = self._regions[place], self._first_stages[place]
        loss_point, is_last = region.memory.loss_point, place == len(self._regions) - 1
        call_numbers, first_run = self._call_numbers[place], len(self._again_s)
        self._again_s += region.memory.again_s
        numbers: dict[int, int] = {}
        for life in region.lives:
            own = region.memory.tensors[life.tensor]
            first = (
                begin + life.begin
                if life.begin < loss_point
                else back + max(0, life.begin - loss_point - 1)
            )
            last = begin + life.end if life.end <= loss_point else back + life.end - loss_point - 1
            if first >= last:
                continue
            if own.kind is Kind.LOSS and not is_last:  # tangents, and what later backwards made
                self._add(Tensor(LATER, own.nbytes, Kind.GRADIENTS), first, last)
                continue
            if life.tensor not in numbers:
                numbers[life.tensor] = len(self._tensors)
                module = self._module(place, own.module) if own.operation else ""
                stage = own.stage + first_stage if own.stage >= 0 else -1
                line = self._line(region.memory.lines[own.line]) if own.line >= 0 else -1
                if own.kind is Kind.OUTPUTS and not is_last:  # arguments of the next region
                    own = replace(own, kind=Kind.ACTIVATIONS)
                self._tensors.append(replace(own, stage=stage, module=module, line=line))
            self._lives.append(Life(numbers[life.tensor], first, last))
        self._waiting += (
            replace(
                own,
                tensor=numbers[own.tensor],
                calls=tuple(call_numbers[call] for call in own.calls),
                needs=tuple(numbers[need] for need in own.needs if need in numbers),
                runs=own.runs and tuple(first_run + run for run in own.runs),
            )
            for own in region.memory.waiting
            if own.tensor in numbers
        )

    def _module(self, place: int, module: str) -> str:
        """Return a module's path in the model, after the number of its region.

        The path in a graph begins at the module that the graph was captured from.
        """
        own = self._step.regions[place].module
        path = module if _SEVERAL.search(own) else joined(own, module)
        return ".".join(filter(None, (REGION, str(place + 1), path)))

    def _line(self, line: CodeLine) -> int:
        return self._lines.setdefault(line, len(self._lines))

    def _stages(self) -> tuple[StageReport, ...]:
        found = []
        for row, first in zip(self._step.regions, self._first_stages, strict=True):
            for stage in executed_stages(row.plan):
                runs = tuple(replace(run, start=run.start + first) for run in stage.runs)
                found.append(replace(stage, index=stage.index + first, runs=runs))
        return tuple(found)


class _Region:
    """The plan of one region: events by direction, and tensors by whether it allocates them.

    Attributes:
        memory: the memory of the plan by instant.
        times_s: the seconds at which each instant begins.
        forward, backward: the events of either direction.
        given: the tensors that exist throughout the call, which others allocate.
        lives: the intervals of the tensors that it allocates itself.
        given_bytes: the bytes of ``given``.
    """

    def __init__(self, plan: Plan) -> None:
        self.memory = memory = plan.memory
        self.times_s = memory.times(plan.timeline)
        self.forward: list[Event] = []
        self.backward: list[Event] = []
        calls = iter(memory.calls)
        for event in plan.timeline.events:
            if event.lane is Lane.COMPUTE:
                is_forward = next(calls) < memory.loss_point
            else:
                is_forward = event.lane is Lane.D2H
            (self.forward if is_forward else self.backward).append(event)
        self.given: list[Tensor] = []
        self.lives: list[Life] = []
        for life in memory.lives:
            tensor = memory.tensors[life.tensor]
            if life.begin == 0 and life.end > memory.end and tensor.kind in _GIVEN:
                self.given.append(tensor)
            else:
                self.lives.append(life)
        self.given_bytes = sum(tensor.nbytes for tensor in self.given)


def _outline(step: StepPlan) -> Outline | None:
    """Return seconds and peak of each call if every graph keeps everything, or ``None`` if unknown.

    The plan of a region counts the memory of earlier regions as planned. If these keep everything,
    they hold more: the difference of the bytes at their loss points.
    """
    rows = step.regions
    outlines = [row.plan.kept for row in rows if row.plan.kept is not None]
    if len(outlines) < len(rows):
        return None
    loss_points = [row.plan.memory.held_bytes()[row.plan.memory.loss_point] for row in rows]
    more = [
        kept.loss_point_bytes - planned for kept, planned in zip(outlines, loss_points, strict=True)
    ]
    more_bytes = list(accumulate(more, initial=0))  # by what earlier ones hold more, of each
    held_bytes = list(accumulate((row.held_bytes for row in rows), initial=step.resident_bytes))
    calls: list[tuple[float, int]] = []  # seconds and peak
    for place, (row, kept) in enumerate(zip(rows, outlines, strict=True)):
        forward = zip(kept.seconds[: kept.loss_point], kept.peaks_bytes, strict=False)
        calls += ((seconds, peak + more_bytes[place]) for seconds, peak in forward)
        if place < len(rows) - 1:
            there_bytes = held_bytes[place + 1] + row.between_bytes + more_bytes[place + 1]
            calls.append(((row.between_s or 0.0) / 2, there_bytes))
    loss_point = len(calls)
    for place in reversed(range(len(rows))):
        row, kept = rows[place], outlines[place]
        if place < len(rows) - 1:
            there_bytes = held_bytes[place + 1] + rows[place + 1].between_back_bytes
            calls.append(((row.between_s or 0.0) / 2, there_bytes + more_bytes[place + 1]))
        backward = zip(
            kept.seconds[kept.loss_point :], kept.peaks_bytes[kept.loss_point :], strict=True
        )
        calls += ((seconds, peak + more_bytes[place]) for seconds, peak in backward)
    seconds, peaks_bytes = zip(*calls, strict=True)
    return Outline(seconds, peaks_bytes, loss_point, outlines[-1].loss_point_bytes + more_bytes[-2])


def _of_stage(op: Op | Copy, first: int) -> Op | Copy:
    """Return ``op`` with ``first``, the index of the graph's first stage, added to its stage."""
    if isinstance(op, Wait | Free | Offload | Prefetch):
        return replace(op, what=replace(op.what, stage=op.what.stage + first))
    return replace(op, stage=op.stage + first)
