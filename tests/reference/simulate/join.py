"""Replay a schedule of a join: branches that meet in a trunk, all on one compute lane.

The model is that of ``tests.reference.simulate.chain``, line by line (a line is a branch or the
trunk). What is new:

* Every line may have a boundary in flight. It stays while other lines run, and is freed
  before the next operation *of its line* that does not read it. At the start boundary 0 of
  every branch is in flight.
* Boundary 0 of the trunk consists of the branches' ends. A forward of trunk stage 0 takes
  each end from the first of: in flight on its branch, the kept boundary 0 of the trunk, the
  saved set of the branch's last stage. What is in flight is consumed, or becomes part of
  the kept boundary; ``NONE`` also drops the kept boundary if it read any of it.
* A branch's backward needs the whole trunk's done, and the branch's own later ones.
  Branches are independent of each other.
* Gradients. Until the trunk's backward is done, memory holds ``gradient_bytes`` of the trunk
  stage whose backward comes next. Then it holds ``trunk_done_bytes``, and for every branch
  ``gradient_bytes`` of its stage whose backward comes next, or ``done_bytes`` of the branch
  when all are done: the gradient at a branch's level lies in memory until that branch goes
  on, however long the others take.
* ``Backward(i)`` on a branch drops a leftover in flight of that branch only; ``Backward`` of
  trunk stage 0 also drops what the branches have in flight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from fxremat.errors import ScheduleError
from fxremat.ir import (
    Backward,
    Chain,
    Compute,
    Event,
    Forward,
    Join,
    JoinCosts,
    JoinProblem,
    Keep,
    SaveOption,
    Schedule,
    StageCosts,
    Timeline,
)
from tests.reference.simulate.memory import Memory, Value


def simulate(join: Join, costs: JoinCosts, schedule: Schedule) -> Timeline:
    """Replay ``schedule``, whose stages are numbered as ``Join`` says.

    Returns:
        One event an operation, back to back. Inside a rebuild the memory between the
        two operations is not modelled: ``held_bytes`` of its forward is the peak.

    Raises:
        ScheduleError: an operation is not valid where it stands (the message has its
            index and the reason), or a backward is missing at the end.
    """
    return _Replay(join, costs).run(schedule)


def check(problem: JoinProblem, schedule: Schedule) -> Timeline:
    """Replay ``schedule`` and hold its peak against the budget.

    Raises:
        ScheduleError: as ``simulate``, or an operation exceeds ``budget_bytes``.
    """
    timeline = simulate(problem.join, problem.costs, schedule)
    for index, event in enumerate(timeline.events):
        if event.peak_bytes > problem.budget_bytes:
            raise ScheduleError(
                f"op {index} ({event.op}) peaks at {event.peak_bytes} bytes, "
                f"the budget is {problem.budget_bytes} bytes"
            )
    return timeline


@dataclass(slots=True)
class _Line:
    """A branch or the trunk during a replay.

    Attributes:
        chain, costs: what it is.
        level: the backwards of its stages ``>= level`` are done.
        flight: the boundary in flight and its value.
        kept, saved: by stage.
        options: of the saved sets held in part.
    """

    chain: Chain
    costs: tuple[StageCosts, ...]
    level: int
    ran: list[bool]
    flight: tuple[int, Value] | None = None
    kept: dict[int, Value] = field(default_factory=dict)
    saved: dict[int, Value] = field(default_factory=dict)
    options: dict[int, SaveOption] = field(default_factory=dict)


class _Replay:
    def __init__(self, join: Join, costs: JoinCosts) -> None:
        self.join = join
        self.costs = costs
        self.memory = Memory(join.storages)
        self.numbers = count()
        self.lines = [
            _Line(chain, stages, len(chain), [False] * len(chain))
            for chain, stages in zip(join.lines, costs.lines, strict=True)
        ]
        places = (
            (number, place) for number, line in enumerate(join.lines) for place in range(len(line))
        )
        self.places = list(places)  # of each stage its line, and where in it
        self.trunk = self.lines[-1]
        self.rebuild_peak: int | None = None  # set between the two operations of a rebuild
        for branch in self.lines[:-1]:
            self._fly(branch, 0, {i: next(self.numbers) for i in branch.chain.boundaries[0]})

    def run(self, schedule: Schedule) -> Timeline:
        events: list[Event] = []
        now = 0.0
        ops = schedule.computations
        if len(ops) < len(schedule):
            raise ScheduleError("the schedule has transfers: a join is replayed without a link")
        for index, op in enumerate(ops):
            follower = ops[index + 1] if index + 1 < len(ops) else None
            try:
                self._require(0 <= op.stage < len(self.join), "there is no such stage")
                number, stage = self.places[op.stage]
                line = self.lines[number]
                if isinstance(op, Forward):
                    seconds, peak = self._forward(line, stage, op, follower)
                else:
                    seconds, peak = self._backward(line, stage)
            except ScheduleError as error:
                raise ScheduleError(f"op {index} ({op}): {error}") from None
            held = self._total() if self.rebuild_peak is None else self.rebuild_peak
            events.append(Event(op, now, now + seconds, peak, held))
            now += seconds
        for number, line in reversed(list(enumerate(self.lines))):
            if line.level:
                missing = self.places.index((number, line.level - 1))
                raise ScheduleError(f"the schedule ends at op {len(ops)} before B {missing}")
        return Timeline(tuple(events))

    def _forward(
        self, line: _Line, i: int, op: Forward, follower: Compute | None
    ) -> tuple[float, int]:
        cost = line.costs[i]
        self._require(i < line.level, "its backward is done")
        self._require(0 <= op.option <= len(cost.options), "there is no such option")
        option = cost.options[op.option - 1] if op.option else None
        source, from_kept = self._read(line, i)
        before = self._total()
        kept = line.chain.stages[i].saved if option is None else option.kept
        everything = dict.fromkeys((*line.chain.boundaries[i + 1], *kept))
        produced = {s: next(self.numbers) for s in everything if s not in source}
        after = {**source, **produced}
        written = {s: after[s] for s in line.chain.boundaries[i + 1]}
        again = op.keep is Keep.ALL and line.ran[i]
        rebuilds = again and follower == Backward(op.stage) and self._is_next(line, i)
        line.ran[i] = True

        new = written if op.keep is not Keep.ALL else {**produced, **written}
        self.memory.take(new)
        peak = self._total()
        if op.keep is Keep.ALL:
            peak += (option or cost).keep_extra_bytes
            line.options.pop(i, None)
            if option is not None and not rebuilds:
                line.options[i] = option
            self._put(line.saved, i, new)
            self._put(line.kept, i, source)
        else:
            peak += cost.forward_extra_bytes
            if op.keep is Keep.INPUT:
                self._put(line.kept, i, source)
            elif from_kept:
                self._put(line.kept, i, None)
        if line is self.trunk and i == 0:
            self._land_ends()
        self._fly(line, i + 1, written)
        self.memory.drop(new)
        if not rebuilds:
            return cost.forward_s, peak
        self.rebuild_peak = before + cost.rebuild_bytes
        return cost.rebuild_s, self.rebuild_peak

    def _backward(self, line: _Line, i: int) -> tuple[float, int]:
        cost = line.costs[i]
        self._require(i < line.level, "it is done already")
        self._require(i + 1 == line.level, "the backward of the stage after it is not done")
        self._require(self._is_next(line, i), "the trunk's backward is not done")
        self._require(i in line.saved, "its saved set is not in memory")
        self._read(line, i)
        option = line.options.pop(i, None)
        peak = self._total() + (option or cost).backward_extra_bytes
        seconds = cost.backward_s + (option.recompute_s if option else 0.0)
        if self.rebuild_peak is not None:
            peak, self.rebuild_peak = self.rebuild_peak, None
        self._put(line.saved, i, None)
        self._put(line.kept, i, None)
        self._land(line)
        if line is self.trunk and i == 0:
            self._land_ends()
        line.level = i
        return seconds, peak

    def _is_next(self, line: _Line, i: int) -> bool:
        """Whether the backward of stage ``i`` of ``line`` may come next."""
        return line.level == i + 1 and (line is self.trunk or self.trunk.level == 0)

    def _read(self, line: _Line, boundary: int) -> tuple[Value, bool]:
        """What a reader of ``boundary`` gets, and whether any of it was a kept boundary.

        Frees what the line has in flight elsewhere.
        """
        if line.flight is not None:
            if line.flight[0] == boundary:
                return line.flight[1], False
            self._land(line)
        if boundary == 0 and line is self.trunk:
            return self._meet()
        if boundary in line.kept:
            return line.kept[boundary], True
        self._require(boundary - 1 in line.saved, f"boundary {boundary} is not in memory")
        value = line.saved[boundary - 1]
        return {s: value[s] for s in line.chain.boundaries[boundary]}, False

    def _meet(self) -> tuple[Value, bool]:
        """Boundary 0 of the trunk, put together from the branches' ends."""
        met: Value = {}
        from_kept = False
        kept = self.trunk.kept.get(0)
        for number, branch in enumerate(self.lines[:-1]):
            end = len(branch.chain)
            ids = branch.chain.boundaries[end]
            if branch.flight is not None and branch.flight[0] == end:
                value = branch.flight[1]
            elif kept is not None:
                value, from_kept = kept, True
            else:
                self._require(end - 1 in branch.saved, f"the end of branch {number} is missing")
                value = branch.saved[end - 1]
            met.update({s: value[s] for s in ids})
        return met, from_kept

    def _ends(self) -> Iterator[_Line]:
        """The branches whose end is in flight."""
        for branch in self.lines[:-1]:
            if branch.flight is not None and branch.flight[0] == len(branch.chain):
                yield branch

    def _land_ends(self) -> None:
        for branch in self._ends():
            self._land(branch)

    def _put(self, where: dict[int, Value], stage: int, value: Value | None) -> None:
        """Hold ``value`` (or nothing) for ``stage`` in place of what was held there."""
        if value is not None:
            self.memory.take(value)
        self.memory.drop(where.pop(stage, None))
        if value is not None:
            where[stage] = value

    def _fly(self, line: _Line, boundary: int, value: Value) -> None:
        self.memory.take(value)
        self._land(line)
        line.flight = (boundary, value)

    def _land(self, line: _Line) -> None:
        if line.flight is not None:
            self.memory.drop(line.flight[1])
        line.flight = None

    def _total(self) -> int:
        return self.memory.nbytes + self.costs.fixed_bytes + self._gradient_bytes()

    def _gradient_bytes(self) -> int:
        if self.trunk.level:
            return self.trunk.costs[self.trunk.level - 1].gradient_bytes
        held = self.costs.trunk_done_bytes
        for line, left_bytes in zip(self.lines[:-1], self.costs.left_bytes, strict=True):
            held += line.costs[line.level - 1].gradient_bytes if line.level else left_bytes
        return held

    @staticmethod
    def _require(holds: bool, reason: str) -> None:
        if not holds:
            raise ScheduleError(reason)
