"""Exhaustive search over the operation sequences of small joins.

Written from the model (see ``fxremat.simulate.join``) without any recurrence: a best-first
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
    StageCosts,
)


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


class _State(NamedTuple):
    """Memory between two operations; values are bit masks of storage instances.

    Attributes:
        levels: of each line: the backwards of its stages from there on are done.
        last_ran: the trunk's last stage has run. All others have where it matters.
        pending: the operation before was a second ``F_all`` of the stage whose backward may
            come next. That may not follow: together they are a rebuild, a step of its own.
        at: of each line, the boundary in flight, -1 if none.
        flight: their values.
        kept: of each stage, its boundary if kept, else -1.
        saved: of each stage, its saved set with the boundary after it if held, else -1.
        order: stages whose boundary is kept, the one last read or written at the end.
    """

    levels: tuple[int, ...]
    last_ran: bool
    pending: bool
    at: tuple[int, ...]
    flight: tuple[int, ...]
    kept: tuple[int, ...]
    saved: tuple[int, ...]
    order: tuple[int, ...]


class _Step(NamedTuple):
    seconds: float
    peak: int
    ops: tuple[Compute, ...]
    after: _State

    def then(self, other: _Step) -> _Step:
        """Both steps as one."""
        peak = max(self.peak, other.peak)
        return _Step(self.seconds + other.seconds, peak, self.ops + other.ops, other.after)


class _Search:
    def __init__(self, problem: JoinProblem, kind: Kind) -> None:
        join = problem.join
        self.problem = problem
        self.kind = kind
        self.lines = join.lines
        self.turn = len(self.lines) - 1  # the trunk
        self.first = join.first_stages
        self.costs: list[StageCosts] = [c for stages in problem.costs.lines for c in stages]
        self.sets = [[frozenset(ids) for ids in line.boundaries] for line in self.lines]
        self.lengths = [len(line) for line in self.lines]
        # Bit ``storage * copies + n`` is instance n of a storage. Boundaries that have it, as
        # many saved sets and one more, one in flight on either line and one new may differ.
        runs = [i for line in self.lines for ids in line.boundaries for i in set(ids)]
        self.copies = 2 * max(map(runs.count, set(runs)), default=0) + 4
        every = (1 << self.copies) - 1
        self.slot = [every << (i * self.copies) for i in range(len(join.storages))]
        self.within = [[sum(self.slot[i] for i in ids) for ids in sets] for sets in self.sets]
        self.touched = [
            [at | frozenset(stage.saved) for at, stage in zip(sets[1:], line.stages, strict=True)]
            for sets, line in zip(self.sets, self.lines, strict=True)
        ]
        self.sizes: dict[int, int] = {}

    def cheapest(self, budget_bytes: int) -> Solved | None:
        """The fastest sequence whose peak is at most ``budget_bytes``."""
        start = self._start()
        heap: list[tuple[float, int, float, _State]] = [(0.0, 0, 0.0, start)]
        best: dict[_State, float] = {start: 0.0}
        came: dict[_State, tuple[_State, tuple[Compute, ...]]] = {}
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

    def _still_to_run_s(self, state: _State) -> float:
        """No less is missing: every backward that is not done, and a forward where not saved."""
        seconds = 0.0
        for line, level in enumerate(state.levels):
            for stage in range(self.first[line], self.first[line] + level):
                cost = self.costs[stage]
                seconds += cost.backward_s
                if state.saved[stage] < 0:
                    seconds += min(cost.forward_s, cost.rebuild_s)
        return seconds

    def _still_needs(self, state: _State) -> int:
        """No less will be held at the trunk's next backward: what is kept stays until then."""
        level = state.levels[self.turn]
        if self.kind is Kind.ANY or not level:
            return 0
        stage = self.first[self.turn] + level - 1
        cost = self.costs[stage]
        held = self._total(state._replace(flight=()), 0)
        return held + min(cost.backward_extra_bytes, cost.rebuild_bytes)

    def least_budget(self) -> int:
        """The least peak of any sequence."""
        start = self._start()
        heap: list[tuple[int, int, int, _State]] = [(0, 0, 0, start)]
        best: dict[_State, int] = {start: 0}
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

    def _start(self) -> _State:
        nothing = (-1,) * self.first[-1]
        flight = [self._new(sets[0], held=0, source=0) for sets in self.sets[:-1]]
        return _State(
            levels=tuple(map(len, self.lines)),
            last_ran=False,
            pending=False,
            at=(*(0 for _ in flight), -1),
            flight=(*flight, 0),
            kept=nothing,
            saved=nothing,
            order=(),
        )

    # What may come next.

    def _steps(self, state: _State) -> Iterator[_Step]:
        for line in self._lines_that_go_on(state):
            yield from self._forwards(state, line)
            yield from self._backwards(state, line)
        if self.kind is Kind.CANONICAL and state.levels[self.turn] > 1:
            yield from self._turns(state)

    def _lines_that_go_on(self, state: _State) -> list[int]:
        branches = list(range(self.turn))
        if self.kind is Kind.ANY:
            return [*branches, self.turn]
        if state.levels[self.turn]:
            if self._deepest(state, self.turn) >= 0:
                return [self.turn]
            return branches
        if self.kind is Kind.PERSISTENT:
            return branches
        usable = [b for b in branches if 0 <= state.at[b] < state.levels[b]]
        return usable or [self._line_of(stage) for stage in state.order[-1:]]

    def _forwards(self, state: _State, line: int) -> Iterator[_Step]:
        level = state.levels[line]
        only = None if self.kind is Kind.ANY else self._deepest(state, line)
        for i in range(level):
            if only in (None, i):
                for keep in (Keep.INPUT, Keep.ALL):
                    yield from self._forward(state, line, i, keep)
                if self.kind is not Kind.CANONICAL:
                    yield from self._forward(state, line, i, Keep.NONE)
                else:
                    yield from self._sweeps(state, line, i, level)
                yield from self._rebuild(state, line, i)

    def _sweeps(self, state: _State, line: int, begin: int, level: int) -> Iterator[_Step]:
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

    def _is_read_after(self, state: _State, line: int) -> bool:
        """Whether something other than a backward reads the boundary at the line's level."""
        return line != self.turn and state.levels[self.turn] > 0

    def _turns(self, state: _State) -> Iterator[_Step]:
        """All branches to their ends and on into the trunk, only their heads kept."""
        if self._deepest(state, self.turn) >= 0:
            return
        heads = [self._deepest(state, b) for b in range(self.turn)]
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
            stages += [(self.turn, i, Keep.NONE) for i in range(state.levels[self.turn] - 1)]
            for line, i, keep in stages:
                more = next(iter(self._forward(swept.after, line, i, keep)), None)
                if more is None:
                    break
                swept = swept.then(more)
                if line == self.turn:
                    yield swept

    def _deepest(self, state: _State, line: int) -> int:
        """The deepest boundary of a line in memory that a stage can use, -1 if there is none."""
        level = state.levels[line]
        if level and state.saved[self.first[line] + level - 1] >= 0:
            return level
        at = state.at[line]
        if 0 <= at < level or (at == level and self._is_read_after(state, line)):
            return at
        readable = (i for i in range(level) if self._read(state, line, i) is not None)
        return max(readable, default=-1)

    # Single operations.

    def _forward(self, state: _State, line: int, i: int, keep: Keep) -> Iterator[_Step]:
        """At most one step."""
        found = self._read(state, line, i)
        if found is None or self._is_held(state, line, i + 1):
            return
        source, from_kept = found
        if keep is Keep.NONE and self.kind is not Kind.ANY:
            used = i + 1 < state.levels[line] or self._is_read_after(state, line)
            if from_kept or not used:
                return
        stage = self.first[line] + i
        cost = self.costs[stage]
        state = self._landed(state, line, i)
        again = self._may_go_back(state, line, i) and (line != self.turn or state.last_ran)
        if keep is Keep.ALL and again and self.kind is not Kind.ANY:
            return  # its backward comes next, and that is a rebuild
        new = self._new(self.touched[line][i], held=self._held(state), source=source)
        written = (source | new) & self.within[line][i + 1]
        adds = written | new if keep is Keep.ALL else written
        extra = cost.keep_extra_bytes if keep is Keep.ALL else cost.forward_extra_bytes
        peak = self._total(state, adds) + extra

        kept, saved, order = state.kept, state.saved, state.order
        if keep is Keep.NONE:
            if from_kept:
                kept = _set(kept, stage, -1)
                order = tuple(s for s in order if s != stage)
        else:
            kept = _set(kept, stage, source)
            order = (*(s for s in order if s != stage), stage)
        if keep is Keep.ALL:
            saved = _set(saved, stage, adds)
        if line == self.turn and i == 0:
            state = self._without_ends(state)
        after = state._replace(
            last_ran=state.last_ran or stage == self.first[-1] - 1,
            pending=keep is Keep.ALL and again,
            at=_set(state.at, line, i + 1),
            flight=_set(state.flight, line, written),
            kept=kept,
            saved=saved,
            order=order if self.kind is Kind.CANONICAL else (),
        )
        yield _Step(cost.forward_s, peak, (Forward(stage, keep),), after)

    def _rebuild(self, state: _State, line: int, i: int) -> Iterator[_Step]:
        """The forward of a stage for the second time, and its backward straight after."""
        found = self._read(state, line, i)
        again = line != self.turn or state.last_ran
        if found is None or not again or not self._may_go_back(state, line, i):
            return
        if self._is_held(state, line, i + 1):
            return
        stage = self.first[line] + i
        cost = self.costs[stage]
        state = self._landed(state, line, i)
        peak = self._total(state, 0) + cost.rebuild_bytes
        ops = (Forward(stage, Keep.ALL), Backward(stage))
        if line == self.turn and i == 0:
            state = self._without_ends(state)
        yield _Step(cost.rebuild_s + cost.backward_s, peak, ops, self._after_backward(state, line))

    def _backwards(self, state: _State, line: int) -> Iterator[_Step]:
        i = state.levels[line] - 1
        if i < 0 or state.pending or not self._may_go_back(state, line, i):
            return
        stage = self.first[line] + i
        if state.saved[stage] < 0 or self._read(state, line, i) is None:
            return
        state = self._landed(state, line, i)
        cost = self.costs[stage]
        peak = self._total(state, 0) + cost.backward_extra_bytes
        yield _Step(cost.backward_s, peak, (Backward(stage),), self._after_backward(state, line))

    def _may_go_back(self, state: _State, line: int, i: int) -> bool:
        return state.levels[line] == i + 1 and (line == self.turn or not state.levels[self.turn])

    def _after_backward(self, state: _State, line: int) -> _State:
        i = state.levels[line] - 1
        stage = self.first[line] + i
        if line == self.turn and i == 0:
            state = self._without_ends(state)
        return state._replace(
            levels=_set(state.levels, line, i),
            last_ran=True,
            pending=False,
            at=_set(state.at, line, -1),
            flight=_set(state.flight, line, 0),
            kept=_set(state.kept, stage, -1),
            saved=_set(state.saved, stage, -1),
            order=tuple(s for s in state.order if s != stage),
        )

    # Memory.

    def _read(self, state: _State, line: int, i: int) -> tuple[int, bool] | None:
        """The value that a reader of boundary ``i`` gets, and whether it was a kept one."""
        if i == 0 and line == self.turn:
            return self._meet(state)
        stage = self.first[line] + i
        if state.at[line] == i:
            return state.flight[line], False
        if state.kept[stage] >= 0:
            return state.kept[stage], True
        if i and state.saved[stage - 1] >= 0:
            return state.saved[stage - 1] & self.within[line][i], False
        return None

    def _meet(self, state: _State) -> tuple[int, bool] | None:
        """Boundary 0 of the trunk, put together from the branches' ends."""
        met, from_kept = 0, False
        kept = state.kept[self.first[self.turn]]
        for b in range(self.turn):
            end = self.lengths[b]
            last = self.first[b] + end - 1
            if state.at[b] == end:
                value = state.flight[b]
            elif kept >= 0:
                value, from_kept = kept, True
            elif state.saved[last] >= 0:
                value = state.saved[last]
            else:
                return None
            met |= value & self.within[b][end]
        return met, from_kept

    def _is_held(self, state: _State, line: int, boundary: int) -> bool:
        stage = self.first[line] + boundary
        if state.saved[stage - 1] >= 0:
            return True
        if boundary < self.lengths[line]:
            return state.kept[stage] >= 0
        return line != self.turn and state.kept[self.first[self.turn]] >= 0

    def _landed(self, state: _State, line: int, reads: int) -> _State:
        """Without what the line has in flight and an operation reading ``reads`` does not read."""
        if state.at[line] == reads:
            return state
        return state._replace(at=_set(state.at, line, -1), flight=_set(state.flight, line, 0))

    def _without_ends(self, state: _State) -> _State:
        at, flight = list(state.at), list(state.flight)
        for b in range(self.turn):
            if at[b] == self.lengths[b]:
                at[b], flight[b] = -1, 0
        return state._replace(at=tuple(at), flight=tuple(flight))

    def _held(self, state: _State) -> int:
        held = 0
        for value in (*state.flight, *state.kept, *state.saved):
            if value > 0:
                held |= value
        return held

    def _new(self, storages: frozenset[int], *, held: int, source: int) -> int:
        """New instances of ``storages`` but those in ``source``: the lowest unused numbers."""
        new = 0
        for storage in storages:
            if not source & self.slot[storage]:
                base = 1 << (storage * self.copies)
                taken = (held & self.slot[storage]) // base
                new |= (~taken & (taken + 1)) * base
        return new

    def _total(self, state: _State, more: int) -> int:
        """Bytes of what is held and of ``more``, with gradients and fixed bytes."""
        mask = self._held(state) | more
        nbytes = self.sizes.get(mask)
        if nbytes is None:
            nbytes = self.sizes[mask] = sum(
                (mask & self.slot[i]).bit_count() * storage.nbytes
                for i, storage in enumerate(self.problem.join.storages)
            )
        return nbytes + self.problem.costs.fixed_bytes + self._gradient_bytes(state)

    def _gradient_bytes(self, state: _State) -> int:
        if state.levels[self.turn]:
            return self.costs[self.first[self.turn] + state.levels[self.turn] - 1].gradient_bytes
        costs = self.problem.costs
        held = costs.trunk_done_bytes
        for b, done in enumerate(costs.left_bytes):
            level = state.levels[b]
            held += self.costs[self.first[b] + level - 1].gradient_bytes if level else done
        return held

    def _line_of(self, stage: int) -> int:
        return next(b for b in range(self.turn + 1) if stage < self.first[b + 1])


def _set(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _schedule(came: dict[_State, tuple[_State, tuple[Compute, ...]]], state: _State) -> Schedule:
    parts: list[tuple[Compute, ...]] = []
    while state in came:
        state, ops = came[state]
        parts.append(ops)
    return Schedule(tuple(op for part in reversed(parts) for op in part))
