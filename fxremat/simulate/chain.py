"""Replay a schedule of a chain on the compute lane alone.

The model. Memory holds values; a value is a set of storage *instances*.

* ``Forward(i, …)`` reads boundary ``i`` and writes boundary ``i + 1``. Storages that
  are in both pass through: they stay the same instances. All others that it writes
  are new instances, even where an older instance of the same storage is still held.
* A boundary is available when it is in flight (written by the operation before),
  when it is kept, or when it is part of the held saved set of the stage before.
  A reader takes the first of these, in this order.
* ``NONE`` consumes what it read: a boundary in flight or kept is gone, one inside a
  saved set stays. ``INPUT`` keeps it. ``ALL`` keeps it, and the saved set with the
  whole boundary after the stage.
* ``Backward(i)`` needs all later backwards done, saved set ``i`` and boundary ``i``; it
  drops both, and the copy of boundary ``i`` in saved set ``i - 1`` stays.
* A boundary in flight that the next operation does not read is freed before it starts.
* Memory is the bytes of the distinct instances held, plus ``fixed_bytes``, plus the
  gradient bytes of the stage whose backward comes next.
* The pair ``Forward(i, ALL)``, ``Backward(i)`` is a *rebuild* unless it holds the first
  execution of the stage's forward. It costs ``rebuild_s`` and ``backward_s``, and the
  peak of both operations is what was held before, plus the gradient bytes, plus
  ``rebuild_bytes``.
"""

from __future__ import annotations

from itertools import count

from fxremat.errors import ScheduleError
from fxremat.ir import (
    Backward,
    Chain,
    Compute,
    Costs,
    Event,
    Forward,
    Keep,
    Problem,
    Schedule,
    Timeline,
)
from fxremat.simulate.memory import Memory, Value


def simulate(chain: Chain, costs: Costs, schedule: Schedule) -> Timeline:
    """Replay ``schedule`` on ``chain``.

    Returns:
        One event an operation, back to back. Inside a rebuild the memory between the
        two operations is not modelled: ``held_bytes`` of its forward is the peak.

    Raises:
        ScheduleError: an operation is not valid where it stands (the message has its
            index and the reason), or a backward is missing at the end.
    """
    return _Replay(chain, costs).run(schedule)


def check(problem: Problem, schedule: Schedule) -> Timeline:
    """Replay ``schedule`` and hold its peak against the budget.

    Raises:
        ScheduleError: as ``simulate``, or an operation exceeds ``budget_bytes``.
    """
    timeline = simulate(problem.chain, problem.costs, schedule)
    for index, event in enumerate(timeline.events):
        if event.peak_bytes > problem.budget_bytes:
            raise ScheduleError(
                f"op {index} ({event.op}) peaks at {event.peak_bytes} bytes, "
                f"the budget is {problem.budget_bytes} bytes"
            )
    return timeline


class _Replay:
    def __init__(self, chain: Chain, costs: Costs) -> None:
        self.chain = chain
        self.costs = costs
        self.memory = Memory(chain.storages)
        self.numbers = count()
        self.level = len(chain)  # the backwards of stages >= level are done
        self.ran = [False] * len(chain)
        self.kept: dict[int, Value] = {}
        self.saved: dict[int, Value] = {}
        self.rebuild_peak: int | None = None  # set between the two operations of a rebuild
        self.flight: tuple[int, Value] | None = None
        self._fly(0, {i: next(self.numbers) for i in chain.boundaries[0]})

    def run(self, schedule: Schedule) -> Timeline:
        events: list[Event] = []
        now = 0.0
        ops = schedule.computations
        if len(ops) < len(schedule):
            raise ScheduleError("the schedule has transfers: they need a link to run on")
        for index, op in enumerate(ops):
            follower = ops[index + 1] if index + 1 < len(ops) else None
            try:
                self._require(0 <= op.stage < len(self.chain), "there is no such stage")
                if isinstance(op, Forward):
                    seconds, peak = self._forward(op, follower)
                else:
                    seconds, peak = self._backward(op)
            except ScheduleError as error:
                raise ScheduleError(f"op {index} ({op}): {error}") from None
            held = self._total() if self.rebuild_peak is None else self.rebuild_peak
            events.append(Event(op, now, now + seconds, peak, held))
            now += seconds
        if self.level:
            raise ScheduleError(f"the schedule ends at op {len(ops)} before B {self.level - 1}")
        return Timeline(tuple(events))

    def _forward(self, op: Forward, follower: Compute | None) -> tuple[float, int]:
        i = op.stage
        cost = self.costs.stages[i]
        self._require(i < self.level, f"the backward of stage {i} is done")
        source = self._read(i)
        before = self._total()
        everything = dict.fromkeys((*self.chain.boundaries[i + 1], *self.chain.stages[i].saved))
        produced = {s: next(self.numbers) for s in everything if s not in source}
        after = {**source, **produced}
        written = {s: after[s] for s in self.chain.boundaries[i + 1]}
        again = op.keep is Keep.ALL and self.ran[i]
        rebuilds = again and follower == Backward(i) and self.level == i + 1
        self.ran[i] = True

        new = written if op.keep is not Keep.ALL else {**produced, **written}
        self.memory.take(new)
        peak = self._total()
        if op.keep is Keep.ALL:
            peak += cost.keep_extra_bytes
            self._put(self.saved, i, new)
            self._put(self.kept, i, source)
        else:
            peak += cost.forward_extra_bytes
            if op.keep is Keep.INPUT:
                self._put(self.kept, i, source)
            elif self.flight is None:
                self._put(self.kept, i, None)
        self._fly(i + 1, written)
        self.memory.drop(new)
        if not rebuilds:
            return cost.forward_s, peak
        self.rebuild_peak = before + cost.rebuild_bytes
        return cost.rebuild_s, self.rebuild_peak

    def _backward(self, op: Backward) -> tuple[float, int]:
        i = op.stage
        cost = self.costs.stages[i]
        self._require(i + 1 >= self.level, f"the backward of stage {i + 1} is not done")
        self._require(i + 1 == self.level, "it is done already")
        self._require(i in self.saved, f"the saved set of stage {i} is not in memory")
        self._read(i)
        peak = self._total() + cost.backward_extra_bytes
        if self.rebuild_peak is not None:
            peak, self.rebuild_peak = self.rebuild_peak, None
        self._put(self.saved, i, None)
        self._put(self.kept, i, None)
        self._land()
        self.level = i
        return cost.backward_s, peak

    def _read(self, boundary: int) -> Value:
        """The value that a reader of ``boundary`` gets; frees what is in flight elsewhere."""
        if self.flight is not None:
            if self.flight[0] == boundary:
                return self.flight[1]
            self._land()
        if boundary in self.kept:
            return self.kept[boundary]
        self._require(boundary - 1 in self.saved, f"boundary {boundary} is not in memory")
        value = self.saved[boundary - 1]
        return {s: value[s] for s in self.chain.boundaries[boundary]}

    def _put(self, where: dict[int, Value], stage: int, value: Value | None) -> None:
        """Hold ``value`` (or nothing) for ``stage`` in place of what was held there."""
        if value is not None:
            self.memory.take(value)
        self.memory.drop(where.pop(stage, None))
        if value is not None:
            where[stage] = value

    def _fly(self, boundary: int, value: Value) -> None:
        self.memory.take(value)
        self._land()
        self.flight = (boundary, value)

    def _land(self) -> None:
        if self.flight is not None:
            self.memory.drop(self.flight[1])
        self.flight = None

    def _total(self) -> int:
        gradient = self.costs.stages[self.level - 1].gradient_bytes if self.level else 0
        return self.memory.nbytes + self.costs.fixed_bytes + gradient

    @staticmethod
    def _require(holds: bool, reason: str) -> None:
        if not holds:
            raise ScheduleError(reason)
