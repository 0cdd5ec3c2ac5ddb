"""Exhaustive search over the operation sequences of small joins.

Written from the model (see ``tests.reference.simulate.join``) without any recurrence: a best-first
search over the states that memory can be in, with what is still to run as lower bound (A*).
Exponential in the number of stages.

As for chains, only sequences are searched in which no boundary is held twice. ``Kind``
narrows them down:

* ``ANY``: nothing else.
* ``PERSISTENT``: as for chains. What is checkpointed stays until the backward of its
  stage; on every line (a branch or the trunk) forwards start from the deepest boundary in
  memory, and the next operation of the line reads what ``F_none`` writes; branches do not
  run while a boundary of the trunk is in memory and its backward to come. Operations of
  several branches may alternate in any way.
* ``CANONICAL``: persistent, and

  - ``F_ck s, F_none … s' - 1`` run through without another branch in between; where they go
    on into the trunk by ``F_none 0``, all branches are swept to their ends before, one
    after the other, each from its deepest boundary or with its end in a saved set;
  - once the trunk's backward is done, a backward or a forward from a checkpoint concerns
    the checkpoint that was read or written last; and while a branch has a boundary in
    flight, no other one runs.

  These are the paper's properties (Beaumont et al. 2019, "Optimal memory-aware
  backpropagation of deep join networks", Property 2 and section 3(a)): the last rule is
  *Stability 2*, and the one before says that segments go forward in the reverse of the order
  in which they are backpropagated.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from enum import Enum
from itertools import permutations
from typing import NamedTuple

from fxremat.ir import (
    Backward,
    Compute,
    Forward,
    Infeasible,
    JoinProblem,
    Keep,
    Schedule,
    Solved,
)
from tests.reference.brute.join_memory import Held, State, put


class Kind(Enum):
    """Which sequences are searched."""

    ANY = "any"
    PERSISTENT = "persistent"
    CANONICAL = "canonical"


def solve(problem: JoinProblem, *, kind: Kind = Kind.CANONICAL) -> Solved | Infeasible:
    """The fastest sequence within the budget, or ``Infeasible`` with the least budget of any."""
    search = _Search(problem, kind)
    found = search.cheapest(problem.budget_bytes)
    return found if found is not None else Infeasible(search.least_budget())


class _Step(NamedTuple):
    seconds: float
    peak: int
    ops: tuple[Compute, ...]
    after: State

    def then(self, other: _Step) -> _Step:
        """Both steps as one."""
        peak = max(self.peak, other.peak)
        return _Step(self.seconds + other.seconds, peak, self.ops + other.ops, other.after)


class _Search(Held):
    def __init__(self, problem: JoinProblem, kind: Kind) -> None:
        super().__init__(problem)
        self.kind = kind

    def cheapest(self, budget_bytes: int) -> Solved | None:
        """The fastest sequence whose peak is at most ``budget_bytes``."""
        start = self._start()
        heap: list[tuple[float, int, float, State]] = [(0.0, 0, 0.0, start)]
        best: dict[State, float] = {start: 0.0}
        came: dict[State, tuple[State, tuple[Compute, ...]]] = {}
        pushes = 0
        while heap:
            _, _, seconds, state = heapq.heappop(heap)
            if not any(state.levels):
                return Solved(_schedule(came, state), seconds)
            if seconds > best[state]:
                continue
            for step in self._steps(state):
                total = seconds + step.seconds
                if step.peak > budget_bytes or total >= best.get(step.after, float("inf")):
                    continue
                if self._still_needs(step.after) <= budget_bytes:
                    best[step.after] = total
                    came[step.after] = (state, step.ops)
                    pushes += 1
                    bound = total + self._still_to_run_s(step.after)
                    heapq.heappush(heap, (bound, -pushes, total, step.after))
        return None

    def _still_to_run_s(self, state: State) -> float:
        """No less is missing: every backward that is not done, and a forward where not saved."""
        seconds = 0.0
        for line, level in enumerate(state.levels):
            for stage in range(self.first[line], self.first[line] + level):
                cost = self.costs[stage]
                seconds += cost.backward_s
                if state.saved[stage] < 0:
                    seconds += min(cost.forward_s, cost.rebuild_s)
        return seconds

    def _still_needs(self, state: State) -> int:
        """No less will be held at the trunk's next backward: what is kept stays until then."""
        level = state.levels[self.loss_point]
        if self.kind is Kind.ANY or not level:
            return 0
        stage = self.first[self.loss_point] + level - 1
        cost = self.costs[stage]
        held = self.total(state._replace(flight=()), 0)
        least = min([cost.backward_extra_bytes, *(o.backward_extra_bytes for o in cost.options)])
        return held + min(least, cost.rebuild_bytes)

    def least_budget(self) -> int:
        """The least peak of any sequence."""
        start = self._start()
        heap: list[tuple[int, int, int, State]] = [(0, 0, 0, start)]
        best: dict[State, int] = {start: 0}
        pushes = 0
        while heap:
            peak, _, _, state = heapq.heappop(heap)
            if not any(state.levels):
                return peak
            if peak > best[state]:
                continue
            for step in self._steps(state):
                total = max(peak, step.peak)
                if step.after not in best or total < best[step.after]:
                    best[step.after] = total
                    pushes += 1
                    heapq.heappush(heap, (total, sum(step.after.levels), -pushes, step.after))
        raise AssertionError("keeping everything is a sequence too")

    def _start(self) -> State:
        nothing = (-1,) * self.first[-1]
        flight = [self.instances.new(sets[0], held=0, source=0) for sets in self.sets[:-1]]
        return State(
            levels=tuple(map(len, self.lines)),
            last_ran=False,
            pending=False,
            at=(*(0 for _ in flight), -1),
            flight=(*flight, 0),
            kept=nothing,
            saved=nothing,
            order=(),
            option=(0,) * self.first[-1],
        )

    # What may come next.

    def _steps(self, state: State) -> Iterator[_Step]:
        for line in self._lines_that_go_on(state):
            yield from self._forwards(state, line)
            yield from self._backwards(state, line)
        if self.kind is Kind.CANONICAL and state.levels[self.loss_point] > 1:
            yield from self._turns(state)

    def _lines_that_go_on(self, state: State) -> list[int]:
        branches = list(range(self.loss_point))
        if self.kind is Kind.ANY:
            return [*branches, self.loss_point]
        if state.levels[self.loss_point]:
            if self._deepest(state, self.loss_point) >= 0:
                return [self.loss_point]
            return branches
        if self.kind is Kind.PERSISTENT:
            return branches
        usable = [b for b in branches if 0 <= state.at[b] < state.levels[b]]
        return usable or [self.line_of(stage) for stage in state.order[-1:]]

    def _forwards(self, state: State, line: int) -> Iterator[_Step]:
        level = state.levels[line]
        only = None if self.kind is Kind.ANY else self._deepest(state, line)
        for i in range(level):
            if only in (None, i):
                yield from self._forward(state, line, i, Keep.INPUT)
                for option in range(len(self.costs[self.first[line] + i].options) + 1):
                    yield from self._forward(state, line, i, Keep.ALL, option)
                if self.kind is not Kind.CANONICAL:
                    yield from self._forward(state, line, i, Keep.NONE)
                else:
                    yield from self._sweeps(state, line, i, level)
                yield from self._rebuild(state, line, i)

    def _sweeps(self, state: State, line: int, begin: int, level: int) -> Iterator[_Step]:
        """``F_ck begin, F_none begin + 1 … end``, for every possible end."""
        last = level if self._is_read_after(state, line) else level - 1
        for step in self._forward(state, line, begin, Keep.INPUT):
            so_far = step
            for i in range(begin + 1, last):
                more = next(iter(self._forward(so_far.after, line, i, Keep.NONE)), None)
                if more is None:
                    break
                so_far = so_far.then(more)
                yield so_far

    def _is_read_after(self, state: State, line: int) -> bool:
        """Whether something other than a backward reads the boundary at the line's level."""
        return line != self.loss_point and state.levels[self.loss_point] > 0

    def _turns(self, state: State) -> Iterator[_Step]:
        """All branches to their ends and on into the trunk, only their heads kept."""
        if self._deepest(state, self.loss_point) >= 0:
            return
        heads = [self._deepest(state, b) for b in range(self.loss_point)]
        if any(
            head == self.lengths[b] and state.saved[self.first[b + 1] - 1] < 0
            for b, head in enumerate(heads)
        ):
            return
        moving = [b for b, head in enumerate(heads) if head < self.lengths[b]]
        for order in permutations(moving):
            swept = _Step(0.0, 0, (), state)
            stages = [
                (b, i, Keep.INPUT if i == heads[b] else Keep.NONE)
                for b in order
                for i in range(heads[b], self.lengths[b])
            ]
            stages += [
                (self.loss_point, i, Keep.NONE) for i in range(state.levels[self.loss_point] - 1)
            ]
            for line, i, keep in stages:
                more = next(iter(self._forward(swept.after, line, i, keep)), None)
                if more is None:
                    break
                swept = swept.then(more)
                if line == self.loss_point:
                    yield swept

    def _deepest(self, state: State, line: int) -> int:
        """The deepest boundary of a line in memory that a stage can use, -1 if there is none."""
        level = state.levels[line]
        if level and state.saved[self.first[line] + level - 1] >= 0:
            return level
        at = state.at[line]
        if 0 <= at < level or (at == level and self._is_read_after(state, line)):
            return at
        readable = (i for i in range(level) if self.read(state, line, i) is not None)
        return max(readable, default=-1)

    # Single operations.

    def _forward(
        self, state: State, line: int, i: int, keep: Keep, option: int = 0
    ) -> Iterator[_Step]:
        """At most one step."""
        found = self.read(state, line, i)
        if found is None or self.is_held(state, line, i + 1):
            return
        source, from_kept = found
        if keep is Keep.NONE and self.kind is not Kind.ANY:
            used = i + 1 < state.levels[line] or self._is_read_after(state, line)
            if from_kept or not used:
                return
        stage = self.first[line] + i
        cost = self.costs[stage]
        state = self.landed(state, line, i)
        again = self._may_go_back(state, line, i) and (line != self.loss_point or state.last_ran)
        if keep is Keep.ALL and again and self.kind is not Kind.ANY:
            return  # its backward comes next, and that is a rebuild
        keeping = cost.options[option - 1] if option else cost
        new = self.instances.new(
            self.touched[line][i][option], held=self.held(state), source=source
        )
        written = (source | new) & self.within[line][i + 1]
        adds = written | new if keep is Keep.ALL else written
        extra = keeping.keep_extra_bytes if keep is Keep.ALL else cost.forward_extra_bytes
        peak = self.total(state, adds) + extra

        kept, saved, order = state.kept, state.saved, state.order
        if keep is Keep.NONE:
            if from_kept:
                kept = put(kept, stage, -1)
                order = tuple(s for s in order if s != stage)
        else:
            kept = put(kept, stage, source)
            order = (*(s for s in order if s != stage), stage)
        if keep is Keep.ALL:
            saved = put(saved, stage, adds)
        if line == self.loss_point and i == 0:
            state = self.without_ends(state)
        after = state._replace(
            last_ran=state.last_ran or stage == self.first[-1] - 1,
            pending=keep is Keep.ALL and again,
            at=put(state.at, line, i + 1),
            flight=put(state.flight, line, written),
            kept=kept,
            saved=saved,
            order=order if self.kind is Kind.CANONICAL else (),
            option=put(state.option, stage, option) if keep is Keep.ALL else state.option,
        )
        yield _Step(cost.forward_s, peak, (Forward(stage, keep, option),), after)

    def _rebuild(self, state: State, line: int, i: int) -> Iterator[_Step]:
        """The forward of a stage for the second time, and its backward straight after."""
        found = self.read(state, line, i)
        again = line != self.loss_point or state.last_ran
        if found is None or not again or not self._may_go_back(state, line, i):
            return
        if self.is_held(state, line, i + 1):
            return
        stage = self.first[line] + i
        cost = self.costs[stage]
        state = self.landed(state, line, i)
        peak = self.total(state, 0) + cost.rebuild_bytes
        ops = (Forward(stage, Keep.ALL), Backward(stage))
        if line == self.loss_point and i == 0:
            state = self.without_ends(state)
        yield _Step(cost.rebuild_s + cost.backward_s, peak, ops, self._after_backward(state, line))

    def _backwards(self, state: State, line: int) -> Iterator[_Step]:
        i = state.levels[line] - 1
        if i < 0 or state.pending or not self._may_go_back(state, line, i):
            return
        stage = self.first[line] + i
        if state.saved[stage] < 0 or self.read(state, line, i) is None:
            return
        state = self.landed(state, line, i)
        cost, option = self.costs[stage], state.option[stage]
        chosen = cost.options[option - 1] if option else None
        peak = self.total(state, 0) + (chosen or cost).backward_extra_bytes
        seconds = cost.backward_s + (chosen.recompute_s if chosen else 0.0)
        yield _Step(seconds, peak, (Backward(stage),), self._after_backward(state, line))

    def _may_go_back(self, state: State, line: int, i: int) -> bool:
        return state.levels[line] == i + 1 and (
            line == self.loss_point or not state.levels[self.loss_point]
        )

    def _after_backward(self, state: State, line: int) -> State:
        i = state.levels[line] - 1
        stage = self.first[line] + i
        if line == self.loss_point and i == 0:
            state = self.without_ends(state)
        return state._replace(
            levels=put(state.levels, line, i),
            last_ran=True,
            pending=False,
            at=put(state.at, line, -1),
            flight=put(state.flight, line, 0),
            kept=put(state.kept, stage, -1),
            saved=put(state.saved, stage, -1),
            order=tuple(s for s in state.order if s != stage),
            option=put(state.option, stage, 0),
        )


def _schedule(came: dict[State, tuple[State, tuple[Compute, ...]]], state: State) -> Schedule:
    parts: list[tuple[Compute, ...]] = []
    while state in came:
        state, ops = came[state]
        parts.append(ops)
    return Schedule(tuple(op for part in reversed(parts) for op in part))
