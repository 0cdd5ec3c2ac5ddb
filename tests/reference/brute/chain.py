"""Exhaustive search over the operation sequences of small chains.

Written from the model (see ``tests.reference.simulate``) without any recurrence: a uniform cost
search (Dijkstra) over the states that memory can be in. The other solvers are held
against it. Exponential in the number of stages; meant for chains of at most six, or
about nine with ``persistent=True``.

What is searched: all valid sequences in which no boundary is held twice, that is, no
forward writes a boundary that is kept or in a held saved set. ``persistent=True``
narrows this to the memory-persistent sequences, as ``fxremat.solvers.rotor`` defines them.
The third line there rules out whole sweeps that only make the last stage's first execution a
cheap one, for a rebuild later.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

from fxremat.ir import (
    Backward,
    Compute,
    Forward,
    Infeasible,
    Keep,
    Problem,
    Schedule,
    Solution,
    Solved,
)
from tests.reference.brute.instances import Instances, union


def solve(problem: Problem, *, persistent: bool = True, tapes_late: bool = False) -> Solution:
    """The fastest sequence within the budget, or ``Infeasible`` with the least budget of any.

    Args:
        problem: the chain, its costs and the budget.
        persistent: search the memory-persistent sequences only.
        tapes_late: search only those in which ``B i`` comes right after ``F_all i``, as in
            automatic differentiation.
    """
    search = _Search(problem, persistent, tapes_late)
    found = search.cheapest(problem.budget_bytes)
    if found is None:
        return Infeasible(search.least_budget())
    return found


class _State(NamedTuple):
    """Memory between two operations; values are bit masks of storage instances.

    Attributes:
        level: the backwards of stages ``>= level`` are done.
        last_ran: the last stage's forward has run. All others have where it matters.
        pending: the operation before was a second ``F_all`` of stage ``level - 1``. Its
            backward may not follow: together they are a rebuild, a step of its own.
        at: the boundary in flight, -1 if none.
        flight: its value.
        kept: value of each kept boundary, -1 where it is not kept.
        saved: value of each held saved set with the boundary after it, -1 where not held.
        option: the save option of each held saved set, 0 where not held.
    """

    level: int
    last_ran: bool
    pending: bool
    at: int
    flight: int
    kept: tuple[int, ...]
    saved: tuple[int, ...]
    option: tuple[int, ...]


_Step = tuple[float, int, tuple[Compute, ...], _State]
"""Seconds, peak in bytes, operations, and the state after them."""


class _Search:
    def __init__(self, problem: Problem, persistent: bool, tapes_late: bool) -> None:
        chain = problem.chain
        self.problem = problem
        self.persistent = persistent
        self.tapes_late = tapes_late
        self.count = len(chain)
        # At most one value in flight, one new, L kept and L saved hold instances of a
        # storage at once.
        self.instances = Instances(chain.storages, 2 * self.count + 2)
        self.boundary = [frozenset(ids) for ids in chain.boundaries]
        self.touched = [
            self.boundary[i + 1] | frozenset(stage.saved) for i, stage in enumerate(chain.stages)
        ]
        self.within = [self.instances.within(ids) for ids in self.boundary]

    def cheapest(self, budget_bytes: int) -> Solved | None:
        """The fastest sequence whose peak is at most ``budget_bytes``."""
        start = self._start()
        heap: list[tuple[float, int, _State]] = [(0.0, 0, start)]
        best: dict[_State, float] = {start: 0.0}
        came: dict[_State, tuple[_State, tuple[Compute, ...]]] = {}
        pushes = 0
        while heap:
            seconds, _, state = heapq.heappop(heap)
            if state.level == 0:
                return Solved(_schedule(came, state), seconds)
            if seconds > best[state]:
                continue
            for step_s, peak, ops, after in self._steps(state):
                total = seconds + step_s
                if peak <= budget_bytes and total < best.get(after, float("inf")):
                    best[after] = total
                    came[after] = (state, ops)
                    pushes += 1
                    heapq.heappush(heap, (total, pushes, after))
        return None

    def least_budget(self) -> int:
        """The least peak of any sequence."""
        start = self._start()
        heap: list[tuple[int, int, _State]] = [(0, 0, start)]
        best: dict[_State, int] = {start: 0}
        pushes = 0
        while heap:
            peak, _, state = heapq.heappop(heap)
            if state.level == 0:
                return peak
            if peak > best[state]:
                continue
            for _, step_peak, _, after in self._steps(state):
                total = max(peak, step_peak)
                if after not in best or total < best[after]:
                    best[after] = total
                    pushes += 1
                    heapq.heappush(heap, (total, pushes, after))
        raise AssertionError("keeping everything is a sequence too")

    def _start(self) -> _State:
        nothing = (-1,) * self.count
        source = self.instances.new(self.boundary[0], held=0, source=0)
        return _State(self.count, False, False, 0, source, nothing, nothing, (0,) * self.count)

    def _steps(self, state: _State) -> Iterator[_Step]:
        """Every operation that may come next; a rebuild is one step of two."""
        only = self._deepest(state) if self.persistent else None
        for stage in range(state.level):
            source = self._read(state, stage)
            if source is not None and only in (None, stage):
                yield from self._forwards(_landed(state, stage), stage, source)
        stage = state.level - 1
        if state.saved[stage] < 0 or state.pending or self._read(state, stage) is None:
            return
        state = _landed(state, stage)
        seconds, extra = self._backward(stage, state.option[stage])
        peak = self._total(state, 0) + extra
        yield seconds, peak, (Backward(stage),), _after_backward(state)

    def _backward(self, stage: int, option: int) -> tuple[float, int]:
        """Seconds and extra bytes of a backward after an option."""
        cost = self.problem.costs.stages[stage]
        if option == 0:
            return cost.backward_s, cost.backward_extra_bytes
        chosen = cost.options[option - 1]
        return cost.backward_s + chosen.recompute_s, chosen.backward_extra_bytes

    def _deepest(self, state: _State) -> int:
        """The deepest boundary in memory, but one in flight that no stage can use."""
        if state.saved[state.level - 1] >= 0:
            return state.level
        if 0 <= state.at < state.level:
            return state.at
        readable = (i for i in range(state.level) if self._read(state, i) is not None)
        return max(readable, default=-1)

    def _forwards(self, state: _State, stage: int, source: int) -> Iterator[_Step]:
        if self._is_held(state, stage + 1):
            return
        cost = self.problem.costs.stages[stage]
        again = state.last_ran and state.level == stage + 1
        new = self.instances.new(self.touched[stage], held=_held(state), source=source)
        written = (source | new) & self.within[stage + 1]

        peak = self._total(state, written) + cost.forward_extra_bytes
        after = state._replace(
            last_ran=state.last_ran or stage == self.count - 1,
            pending=False,
            at=stage + 1,
            flight=written,
        )
        if self._may_consume(state, stage):
            kept = state.kept if state.at == stage else _set(state.kept, stage, -1)
            keep_none = (Forward(stage, Keep.NONE),)
            yield cost.forward_s, peak, keep_none, after._replace(kept=kept)
        after = after._replace(kept=_set(state.kept, stage, source))
        yield cost.forward_s, peak, (Forward(stage, Keep.INPUT),), after

        for option in range(len(cost.options) + 1):
            yield from self._keeping(state, after, stage, source, option)
        if again:
            seconds = cost.rebuild_s + cost.backward_s
            peak = self._total(state, 0) + cost.rebuild_bytes
            yield seconds, peak, (Forward(stage, Keep.ALL), Backward(stage)), _after_backward(after)

    def _keeping(
        self, state: _State, after: _State, stage: int, source: int, option: int
    ) -> Iterator[_Step]:
        """``F_all`` with an option; ``after`` is the state after ``F_ck``."""
        cost = self.problem.costs.stages[stage]
        again = state.last_ran and state.level == stage + 1
        chosen = cost.options[option - 1] if option else None
        touched = self.boundary[stage + 1] | frozenset(
            self.problem.chain.stages[stage].saved if chosen is None else chosen.kept
        )
        new = self.instances.new(touched, held=_held(state), source=source)
        written = (source | new) & self.within[stage + 1]
        peak = self._total(state, written | new)
        peak += (chosen or cost).keep_extra_bytes
        after = after._replace(
            flight=written,
            saved=_set(state.saved, stage, written | new),
            option=_set(state.option, stage, option),
            pending=again,
        )
        keep_all = Forward(stage, Keep.ALL, option)
        if not self.tapes_late:
            yield cost.forward_s, peak, (keep_all,), after
        elif state.level == stage + 1 and not again:
            # The last stage for the first time: two operations, since it is no rebuild.
            followed = _landed(after, stage)
            seconds, extra = self._backward(stage, option)
            peak = max(peak, self._total(followed, 0) + extra)
            both = (keep_all, Backward(stage))
            yield cost.forward_s + seconds, peak, both, _after_backward(followed)

    def _may_consume(self, state: _State, stage: int) -> bool:
        if not self.persistent:
            return True
        from_kept = state.at != stage and state.kept[stage] >= 0
        return not from_kept and stage + 1 < state.level

    def _read(self, state: _State, boundary: int) -> int | None:
        """The value that a reader of ``boundary`` gets, ``None`` if there is none."""
        if state.at == boundary:
            return state.flight
        if state.kept[boundary] >= 0:
            return state.kept[boundary]
        if boundary and state.saved[boundary - 1] >= 0:
            return state.saved[boundary - 1] & self.within[boundary]
        return None

    def _is_held(self, state: _State, boundary: int) -> bool:
        kept = boundary < self.count and state.kept[boundary] >= 0
        return kept or state.saved[boundary - 1] >= 0

    def _total(self, state: _State, more: int) -> int:
        """Bytes of what is held and of ``more``, with gradients and fixed bytes."""
        costs = self.problem.costs
        nbytes = self.instances.nbytes(_held(state) | more)
        return nbytes + costs.fixed_bytes + costs.stages[state.level - 1].gradient_bytes


def _held(state: _State) -> int:
    return union((state.flight, *state.kept, *state.saved))


def _landed(state: _State, reads: int) -> _State:
    """Without a boundary in flight that an operation reading ``reads`` does not read."""
    return state if state.at == reads else state._replace(at=-1, flight=0)


def _after_backward(state: _State) -> _State:
    stage = state.level - 1
    kept, saved = _set(state.kept, stage, -1), _set(state.saved, stage, -1)
    option = _set(state.option, stage, 0)
    return _State(stage, True, False, -1, 0, kept, saved, option)


def _set(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _schedule(came: dict[_State, tuple[_State, tuple[Compute, ...]]], state: _State) -> Schedule:
    parts: list[tuple[Compute, ...]] = []
    while state in came:
        state, ops = came[state]
        parts.append(ops)
    return Schedule(tuple(op for part in reversed(parts) for op in part))
