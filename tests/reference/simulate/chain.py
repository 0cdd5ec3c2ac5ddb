"""What each computation of a chain reads, makes and frees.

The model. Memory holds values; a value is a set of storage *instances*.

* ``Forward(i, …)`` reads boundary ``i`` and writes boundary ``i + 1``. Storages that
  are in both pass through: they stay the same instances. All others that it writes
  are new instances, even where an older instance of the same storage is still held.
* A boundary is available when it is in flight (written by the operation before),
  when it is kept, or when it is part of the held saved set of the stage before.
  A reader takes the first of these, in this order.
* ``NONE`` consumes what it read: a boundary in flight or kept is gone, one inside a
  saved set stays. ``INPUT`` keeps it. ``ALL`` keeps it, and the saved set, or what its
  save option names, with the whole boundary after the stage.
* ``Backward(i)`` needs all later backwards done, saved set ``i`` and boundary ``i``; it
  drops both, and the copy of boundary ``i`` in saved set ``i - 1`` stays. After an
  option it takes ``recompute_s`` longer and has the option's peak.
* A boundary in flight that the next operation does not read is freed before it starts.
* Memory is the bytes of the distinct instances held, plus ``fixed_bytes``, plus the
  gradient bytes of the stage whose backward comes next.
* The pair ``Forward(i, ALL)``, ``Backward(i)`` is a *rebuild* unless it holds the first
  execution of the stage's forward. It costs ``rebuild_s`` and ``backward_s``, and the
  peak of both operations is what was held before, plus the gradient bytes, plus
  ``rebuild_bytes``, whatever the option. Memory between the two is not modelled.

When that happens, and what transfers do beside it, is in ``lanes``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from fxremat.errors import ScheduleError
from fxremat.ir import Activations, Backward, Chain, Compute, Costs, Forward, Keep, Part, SaveOption
from tests.reference.simulate.memory import Instance, Memory, Value


@dataclass(frozen=True, slots=True)
class Step:
    """What one computation does.

    Attributes:
        seconds: how long it runs.
        landed: instances that are freed before it starts.
        read: instances that it reads.
        made: instances that it takes when it starts.
        gone: instances that nobody holds once it is done.
        kept: what it keeps from now on; each value with the instances that it is made of.
        more_bytes: held beside the instances while it runs.
        left_bytes: held beside the instances once it is done, beyond what was before.
    """

    seconds: float
    landed: list[Instance]
    read: list[Instance]
    made: list[Instance]
    gone: list[Instance]
    kept: dict[Activations, list[Instance]]
    more_bytes: int
    left_bytes: int


class ChainState:
    """The state between two computations, in the order of the schedule."""

    def __init__(self, chain: Chain, costs: Costs) -> None:
        self.chain = chain
        self.costs = costs
        self.memory = Memory(chain.storages)
        self.numbers = count()
        self.level = len(chain)  # the backwards of stages >= level are done
        self.ran = [False] * len(chain)
        self.kept: dict[int, Value] = {}
        self.saved: dict[int, Value] = {}
        self.options: dict[int, SaveOption] = {}  # of the saved sets held in part
        self.rebuilding: list[Instance] | None = None  # freed by the first half of a rebuild
        self.flight: tuple[int, Value] | None = None
        self._fly(0, {i: next(self.numbers) for i in chain.boundaries[0]})

    @property
    def total_bytes(self) -> int:
        """Memory held between two computations, but inside a rebuild."""
        return self.memory.nbytes + self.costs.fixed_bytes + self._gradient_bytes()

    def run(self, op: Compute, follower: Compute | None) -> Step:
        """Run ``op``; ``follower`` is the computation after it.

        Raises:
            ScheduleError: ``op`` is not valid where it stands.
        """
        self._require(0 <= op.stage < len(self.chain), "there is no such stage")
        if isinstance(op, Forward):
            return self._forward(op, follower)
        return self._backward(op)

    def _forward(self, op: Forward, follower: Compute | None) -> Step:
        i = op.stage
        cost = self.costs.stages[i]
        self._require(i < self.level, f"the backward of stage {i} is done")
        self._require(0 <= op.option <= len(cost.options), "there is no such option")
        option = cost.options[op.option - 1] if op.option else None
        source, landed = self._read(i)
        saved = self.chain.stages[i].saved if option is None else option.kept
        everything = dict.fromkeys((*self.chain.boundaries[i + 1], *saved))
        produced = {s: next(self.numbers) for s in everything if s not in source}
        after = {**source, **produced}
        written = {s: after[s] for s in self.chain.boundaries[i + 1]}
        again = op.keep is Keep.ALL and self.ran[i]
        rebuilds = again and follower == Backward(i) and self.level == i + 1
        self.ran[i] = True

        new = written if op.keep is not Keep.ALL else {**produced, **written}
        made = self.memory.take(new)
        gone: list[Instance] = []
        kept: dict[Activations, list[Instance]] = {}
        if op.keep is Keep.ALL:
            self.options.pop(i, None)
            if option is not None and not rebuilds:
                self.options[i] = option
            gone += self._put(self.saved, i, new)
            kept[Activations(Part.SAVED, i)] = list(new.items())
        if op.keep is not Keep.NONE:
            gone += self._put(self.kept, i, source)
            kept[Activations(Part.INPUT, i)] = list(source.items())
        elif self.flight is None:
            gone += self._put(self.kept, i, None)
        gone += self._fly(i + 1, written)
        gone += self.memory.drop(new)
        read = list(source.items())
        if rebuilds:
            self.rebuilding = gone
            more = cost.rebuild_bytes
            return Step(cost.rebuild_s, landed, read, [], [], {}, more, more)
        keeping = cost if option is None else option
        extra = keeping.keep_extra_bytes if op.keep is Keep.ALL else cost.forward_extra_bytes
        return Step(cost.forward_s, landed, read, made, gone, kept, extra, 0)

    def _backward(self, op: Backward) -> Step:
        i = op.stage
        cost = self.costs.stages[i]
        self._require(i + 1 >= self.level, f"the backward of stage {i + 1} is not done")
        self._require(i + 1 == self.level, "it is done already")
        self._require(i in self.saved, f"the saved set of stage {i} is not in memory")
        source, landed = self._read(i)
        read = [*source.items(), *self.saved[i].items()]
        gone = self._put(self.saved, i, None) + self._put(self.kept, i, None) + self._land()
        grown = -self._gradient_bytes()
        self.level = i
        grown += self._gradient_bytes()
        if self.rebuilding is None:
            option = self.options.pop(i, None)
            seconds = cost.backward_s + (option.recompute_s if option else 0.0)
            extra = (option or cost).backward_extra_bytes
            return Step(seconds, landed, read, [], gone, {}, extra, grown)
        gone += self.rebuilding
        self.rebuilding = None
        return Step(cost.backward_s, landed, read, [], gone, {}, 0, grown - cost.rebuild_bytes)

    def _read(self, boundary: int) -> tuple[Value, list[Instance]]:
        """The value that a reader of ``boundary`` gets, and what was in flight elsewhere."""
        landed: list[Instance] = []
        if self.flight is not None:
            if self.flight[0] == boundary:
                return self.flight[1], landed
            landed = self._land()
        if boundary in self.kept:
            return self.kept[boundary], landed
        self._require(boundary - 1 in self.saved, f"boundary {boundary} is not in memory")
        value = self.saved[boundary - 1]
        return {s: value[s] for s in self.chain.boundaries[boundary]}, landed

    def _put(self, where: dict[int, Value], stage: int, value: Value | None) -> list[Instance]:
        """Hold ``value`` (or nothing) for ``stage`` in place of what was held there."""
        if value is not None:
            self.memory.take(value)
        gone = self.memory.drop(where.pop(stage, None))
        if value is not None:
            where[stage] = value
        return gone

    def _fly(self, boundary: int, value: Value) -> list[Instance]:
        self.memory.take(value)
        gone = self._land()
        self.flight = (boundary, value)
        return gone

    def _land(self) -> list[Instance]:
        gone = self.memory.drop(self.flight[1]) if self.flight is not None else []
        self.flight = None
        return gone

    def _gradient_bytes(self) -> int:
        return self.costs.stages[self.level - 1].gradient_bytes if self.level else 0

    @staticmethod
    def _require(holds: bool, reason: str) -> None:
        if not holds:
            raise ScheduleError(reason)
