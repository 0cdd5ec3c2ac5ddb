"""A step of several graphs on one axis: forwards in order, then backwards, the last one's first.

Each graph's plan says what the step holds while it runs, where what is there beside it is one sum.
Here that sum is told apart: what earlier regions hold, until their own backward begins, what was
there when the step began, and what else was seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

from fxremat.ir import Copy, Event, Free, Lane, Offload, Op, Prefetch, Timeline, Wait
from fxremat.report.areas import memory_of
from fxremat.report.memory import Kind, Life, StepMemory, Tensor
from fxremat.report.step_facts import RegionRow, StepFacts

_GIVEN = (
    Kind.PARAMETERS,
    Kind.BUFFERS,
    Kind.INPUTS,
    Kind.OPTIMIZER,
    Kind.RESERVE,
    Kind.OTHER,
    Kind.GRADIENTS,
)
"""Of these, what a region finds."""

THERE = "what is there when the step begins"
BESIDE = "what code between regions holds"
LATER = "gradients, and what else later backwards left"


@dataclass(frozen=True, slots=True)
class StepView:
    """A step of several regions as one.

    Attributes:
        memory: what it holds, instant by instant; modules are told after their region's number.
        timeline: what happens when; stages are numbered through all regions.
        times_s: at which each instant of the memory begins.
        stages: names.
        first_stages: number of each region's first stage.
        spans_s: begin and end of each region's forward, and of its backward.
    """

    memory: StepMemory
    timeline: Timeline
    times_s: tuple[float, ...]
    stages: tuple[str, ...]
    first_stages: tuple[int, ...]
    spans_s: tuple[tuple[float, float, float, float], ...]


def view_of(step: StepFacts) -> StepView:
    """All regions' plans as one.

    What comes between two graphs is one instant in either direction. Of its seconds half are
    taken to pass in each.

    Raises:
        PlanError: a plan does not say which tensors are held when.
    """
    made = _View(step)
    count = len(step.regions)
    for place in range(count):
        made.forward(place)
    made.turn = made.count - 1
    for place in range(count - 1, -1, -1):
        made.backward(place)
    return made.done()


class _View:
    """What :func:`view_of` has put together so far.

    Attributes:
        count: of instants.
        turn: between forward and backward.
    """

    def __init__(self, step: StepFacts) -> None:
        self.count = self.turn = 0
        self._step = step
        self._regions = [_Region(row) for row in step.regions]
        sizes = [len(region.memory.modules) for region in self._regions]
        self._first_stages = tuple(accumulate(sizes, initial=0))[:-1]
        held = [region.held_bytes for region in self._regions]
        self._held = tuple(accumulate(held, initial=0))  # by all before each
        left = (
            region.given_bytes - before
            for region, before in zip(self._regions, self._held, strict=False)
        )
        self._there_bytes = min(step.there_bytes, *left)
        self._tensors: list[Tensor] = []
        self._lives: list[Life] = []
        self._calls: list[tuple[int, ...]] = []
        self._events: list[Event] = []
        self._times_s: list[float] = []
        self._now_s = 0.0
        self._begins = [0] * len(self._regions)
        self._spans_s: list[list[float]] = [[] for _ in self._regions]

    def forward(self, place: int) -> None:
        """Of one region, and what comes until the next."""
        region, row = self._regions[place], self._step.regions[place]
        self._begins[place] = begin = self.count
        turn, begin_s = region.memory.turn, self._now_s
        self._beside(BESIDE, Kind.OTHER, region.given_bytes - self._held[place], turn)
        self._times_s += (begin_s + s for s in region.times_s[:turn])
        self._calls.append(tuple(begin + at for at in region.memory.calls if at < turn))
        self._happen(region.forward, self._first_stages[place], begin_s)
        self.count += turn
        self._pass(
            place, begin_s, max((e.end_s + begin_s for e in region.forward), default=begin_s)
        )
        there_bytes = self._step.there_bytes + row.between_bytes
        self._between(BESIDE, Kind.OTHER, there_bytes, row.between_s)

    def backward(self, place: int) -> None:
        """Of one region, and what comes until that of the one before."""
        region, row = self._regions[place], self._step.regions[place]
        begin, begin_s = self.count, self._now_s
        memory, first = region.memory, min((e.start_s for e in region.backward), default=0.0)
        length = memory.end - memory.turn
        self._beside(BESIDE, Kind.OTHER, region.given_bytes - self._held[place], length)
        shift_s = begin_s - first
        self._times_s += (max(begin_s, s + shift_s) for s in region.times_s[memory.turn + 1 :])
        later = (at for at in memory.calls if at > memory.turn)
        self._calls.append(tuple(begin + at - memory.turn - 1 for at in later))
        self._happen(region.backward, self._first_stages[place], shift_s)
        self._live(place, begin)
        self.count += length
        self._pass(
            place, begin_s, max((e.end_s + shift_s for e in region.backward), default=begin_s)
        )
        earlier_s = self._step.regions[place - 1].between_s if place else None
        there_bytes = self._step.there_bytes + row.between_back_bytes
        self._between(LATER, Kind.GRADIENTS, there_bytes, earlier_s)

    def _pass(self, place: int, begin_s: float, end_s: float) -> None:
        self._now_s = max(begin_s, end_s)  # sums of the same seconds may differ in the last bit
        self._spans_s[place] += (begin_s, self._now_s)

    def _between(self, name: str, kind: Kind, there_bytes: int, between_s: float | None) -> None:
        """An instant that is no region's."""
        self._beside(name, kind, there_bytes, 1)
        self._times_s.append(self._now_s)
        self.count += 1
        self._now_s += (between_s or 0.0) / 2

    def _beside(self, name: str, kind: Kind, there_bytes: int, length: int) -> None:
        """What is there for some instants from now on beside what regions hold."""
        more_bytes = there_bytes - self._there_bytes
        if more_bytes > 0 and length:
            self._add(Tensor(name, more_bytes, kind), self.count, self.count + length)

    def _add(self, tensor: Tensor, begin: int, end: int) -> None:
        self._lives.append(Life(len(self._tensors), begin, end))
        self._tensors.append(tensor)

    def _live(self, place: int, back: int) -> None:
        """What a region holds, but for what it finds and what stands for others' at its turn."""
        region, first = self._regions[place], self._first_stages[place]
        last = place == len(self._regions) - 1
        numbers: dict[int, int] = {}
        for tensor, begin, end, is_beside in region.lives(self._begins[place], back):
            own = region.memory.tensors[tensor]
            if is_beside and not last:  # its tangents, and what later backwards have made
                self._add(Tensor(LATER, own.nbytes, Kind.GRADIENTS), begin, end)
                continue
            if tensor not in numbers:
                numbers[tensor] = len(self._tensors)
                module = _module(place, own.module) if own.module else ""
                stage = own.stage + first if own.stage >= 0 else -1
                self._tensors.append(replace(own, stage=stage, module=module))
            self._lives.append(Life(numbers[tensor], begin, end))

    def _happen(self, events: list[Event], first_stage: int, shift_s: float) -> None:
        self._events += (
            replace(
                event,
                op=_of_stage(event.op, first_stage),
                start_s=event.start_s + shift_s,
                end_s=event.end_s + shift_s,
            )
            for event in events
        )

    def done(self) -> StepView:
        """All of it."""
        left_bytes = self._there_bytes
        for tensor in self._regions[0].told_apart:
            self._add(tensor, 0, self.count)
            left_bytes -= tensor.nbytes
        self._add(Tensor(THERE, left_bytes, Kind.OTHER), 0, self.count)
        modules = [
            _module(place, module)
            for place, region in enumerate(self._regions)
            for module in region.memory.modules
        ]
        memory = StepMemory(
            tuple(self._tensors),
            tuple(sorted(self._lives, key=lambda life: (life.begin, life.tensor))),
            tuple(at for calls in self._calls for at in calls),
            self.turn,
            self.count - 1,
            tuple(modules),
        )
        stages = (stage.name for row in self._step.regions for stage in row.plan.chain.stages)
        return StepView(
            memory,
            Timeline(tuple(self._events)),
            tuple(self._times_s),
            tuple(stages),
            self._first_stages,
            tuple((a, b, c, d) for a, b, c, d in self._spans_s),
        )


class _Region:
    """A plan of one region, its two directions apart.

    Attributes:
        memory: of the plan.
        times_s: of its instants.
        forward, backward: events.
        given_bytes: what it finds.
        held_bytes: that it holds from forward to backward.
        told_apart: of what it finds, what every region does.
    """

    def __init__(self, row: RegionRow) -> None:
        plan = row.plan
        self.memory = memory = memory_of(plan)
        self.times_s = memory.times(plan.timeline)
        self.forward: list[Event] = []
        self.backward: list[Event] = []
        calls = iter(memory.calls)
        is_forward = True
        for event in plan.timeline.events:
            if event.lane is Lane.COMPUTE:
                is_forward = next(calls) < memory.turn
            first = is_forward if event.lane is Lane.COMPUTE else event.lane is Lane.D2H
            (self.forward if first else self.backward).append(event)
        given = [life for life in memory.lives if self._is_given(life)]
        found = [memory.tensors[life.tensor] for life in given]
        self.told_apart = [t for t in found if t.kind in (Kind.OPTIMIZER, Kind.RESERVE)]
        self.given_bytes = sum(memory.tensors[life.tensor].nbytes for life in given)
        self.held_bytes = sum(
            memory.tensors[life.tensor].nbytes
            for life in memory.lives
            if life.begin < memory.turn < life.end and not self._is_given(life)
        )

    def _is_given(self, life: Life) -> bool:
        memory = self.memory
        always = life.begin == 0 and life.end > memory.end
        return always and memory.tensors[life.tensor].kind in _GIVEN

    def lives(self, begin: int, back: int) -> Iterator[tuple[int, int, int, bool]]:
        """Tensors of its own, first instants and instants after the last, and whether they are what
        is there beside a backward.

        Args:
            begin: instant of the step at which its forward begins.
            back: and its backward.
        """
        turn = self.memory.turn
        for life in self.memory.lives:
            if self._is_given(life):
                continue
            first = life.begin + (begin if life.begin < turn else 0)
            if life.begin >= turn:
                first = back + max(0, life.begin - turn - 1)
            last = begin + life.end if life.end <= turn else back + life.end - turn - 1
            is_beside = self.memory.tensors[life.tensor].kind is Kind.LOSS
            if first < last:
                yield life.tensor, first, last, is_beside


def _of_stage(op: Op | Copy, first: int) -> Op | Copy:
    """``op``, where stages are counted from ``first``."""
    if isinstance(op, Wait | Free | Offload | Prefetch):
        return replace(op, what=replace(op.what, stage=op.what.stage + first))
    return replace(op, stage=op.stage + first)


def _module(place: int, module: str) -> str:
    """A module after its region's number."""
    return ".".join(filter(None, ("region", str(place + 1), module)))
