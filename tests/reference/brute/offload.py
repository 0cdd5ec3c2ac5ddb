"""Exhaustive search over offloading schedules of small chains, tick by tick.

Written from the model without any recurrence: an A* search over all that can be at the start of
a tick. All forwards keep everything. At every tick the next computation may start or not, and
the link may move any activation either way, or none. The other solvers are held against it.

Three models of what a transfer is (Beaumont et al. 2019, sections 3, 4 and 5):

* ``PARTIAL``: any byte by itself. Memory comes and goes with it.
* ``INTERRUPTIBLE``: as that, but an activation goes entirely before any of it comes back,
  and comes back entirely before any of it goes again.
* ``WHOLE``: an activation goes in one piece. Its memory is free once all is gone, and taken
  from when the way back begins.

An activation can go as soon as it is computed, but its memory is not free before the forward
that reads it is done. ``ordered`` is the paper's restriction: activations go one after another
in the order of the stages, come back one after another in the opposite order, and nothing goes
any more once something came back.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from enum import Enum
from itertools import accumulate
from typing import NamedTuple

from fxremat.ir import Problem


class Transfers(Enum):
    """What can be moved."""

    PARTIAL = "partial"
    INTERRUPTIBLE = "interruptible"
    WHOLE = "whole"


def shortest_s(
    problem: Problem, transfers: Transfers, *, tick_s: float, ordered: bool = False
) -> float:
    """Seconds of the shortest step, infinite if none fits.

    Exact if all times and the time of a byte in either direction are multiples of the tick, and,
    where the directions differ, all sizes are multiples of what fits into a tick.

    Args:
        problem: the chain, its costs, the budget and a link.
        transfers: the model.
        tick_s: length of a tick.
        ordered: see the module.
    """
    return _Search(problem, transfers, tick_s, ordered).run() * tick_s


def least_budget(problem: Problem, transfers: Transfers, *, ordered: bool = False) -> int:
    """The least budget in bytes for which there is a step at all."""
    budget = 0
    while True:
        trial = Problem(problem.chain, problem.costs, budget, problem.link)
        if _Search(trial, transfers, None, ordered).run() < math.inf:
            return budget
        budget += 1


class _Way(NamedTuple):
    """A transfer of an activation; ``left`` ticks to go."""

    activation: int
    out: bool
    left: int


class _State(NamedTuple):
    """The start of a tick.

    Attributes:
        done: computations that are.
        left: ticks that the next one still runs, 0 if it has not started.
        host: bytes of each activation that are on the host, and free here if they can be.
        returning: bit ``i``: activation ``i`` is on its way back.
        back: something came back.
        ways: whole transfers under way.
    """

    done: int
    left: int
    host: tuple[int, ...]
    returning: int
    back: bool
    ways: tuple[_Way, ...]


class _Search:
    def __init__(
        self, problem: Problem, transfers: Transfers, tick_s: float | None, ordered: bool
    ) -> None:
        chain, costs, link = problem.chain, problem.costs, problem.link
        assert link is not None
        self.transfers = transfers
        self.ordered = ordered
        self.shared = link.shared
        self.budget = problem.budget_bytes
        self.count = len(chain)
        stages = costs.stages
        saved = [chain.nbytes(chain.saved_set(i)) for i in range(self.count)]
        self.sizes = [chain.nbytes(chain.boundaries[0]), *saved]
        seconds = [s.forward_s for s in stages] + [s.backward_s for s in reversed(stages)]
        extras = [s.keep_extra_bytes for s in stages]
        self.extras = extras + [s.backward_extra_bytes for s in reversed(stages)]
        self.ticks = [0 if tick_s is None else _whole(s / tick_s) for s in seconds]
        self.rest = [0, *accumulate(reversed(self.ticks))][::-1]
        # What the next computation finds beside activations, last entry: after the last.
        gradients = [s.gradient_bytes for s in stages]
        around = [gradients[-1]] * self.count + gradients[::-1] + [0]
        self.around = [n + costs.fixed_bytes for n in around]
        if tick_s is None:
            self.rates = (max(self.sizes) + 1, max(self.sizes) + 1)
        else:
            rates = (link.offload_bytes_per_s * tick_s, link.prefetch_bytes_per_s * tick_s)
            self.rates = (_whole(rates[0]), _whole(rates[1]))

    def run(self) -> float:
        """Ticks of the shortest step."""
        nothing = (0,) * len(self.sizes)
        start = _State(0, 0, nothing, 0, False, ())
        if self._memory(start) > self.budget:
            return math.inf
        heap = [(self.rest[0], 0, 0, start)]
        best = {start: 0}
        pushes = 0
        while heap:
            _, _, now, state = heapq.heappop(heap)
            if state.done == 2 * self.count:
                return now
            if now > best[state]:
                continue
            for later, after in self._steps(now, state):
                if later < best.get(after, math.inf):
                    best[after] = later
                    pushes += 1
                    rest = self.rest[after.done + (after.left > 0)] + after.left
                    heapq.heappush(heap, (later + rest, -pushes, later, after))
        return math.inf

    def _steps(self, now: int, state: _State) -> Iterator[tuple[int, _State]]:
        if not state.left and state.done < 2 * self.count and self._has_data(state):
            ticks = self.ticks[state.done]
            running = state._replace(left=max(ticks, 1))
            if self._memory(running) <= self.budget:
                if ticks:
                    yield now, running
                else:
                    yield from ((now, s) for s in self._finished(running))
        if self.transfers is Transfers.WHOLE:
            for way in self._departures(state):
                after = state._replace(ways=tuple(sorted((*state.ways, way))))
                if not way.out:
                    host = _set(state.host, way.activation, 0)
                    after = after._replace(host=host, back=True)
                if self._memory(after) <= self.budget:
                    yield now, after
            moves = [self._travelled(state)]
        else:
            moves = list(self._moved(state))
        for after in moves:
            if self._memory(after) > self.budget:
                continue
            if after.left == 1:
                yield from ((now + 1, s) for s in self._finished(after))
            else:
                yield now + 1, after._replace(left=max(0, after.left - 1))

    def _finished(self, running: _State) -> Iterator[_State]:
        after = running._replace(done=running.done + 1, left=0)
        if self._memory(after) <= self.budget:
            yield after

    def _has_data(self, state: _State) -> bool:
        if state.done < self.count:
            return True  # what a forward reads is not free, whatever was copied of it
        stage = 2 * self.count - 1 - state.done
        needed = (stage, stage + 1)
        return all(not state.host[i] for i in needed) and all(
            way.activation not in needed for way in state.ways
        )

    def _memory(self, state: _State) -> int:
        """Bytes of device memory held."""
        done, running = state.done, state.left > 0
        if done == 2 * self.count:
            return 0
        forward = done < self.count
        present = done + 1 + running if forward else 2 * self.count - done + 1
        total = self.around[done] + sum(self.sizes[:present])
        total += self.extras[done] if running else 0
        return total - sum(n for i, n in enumerate(state.host) if i < done)

    def _may_leave(self, state: _State, index: int) -> bool:
        computed = index <= state.done
        last = 2 * self.count - 1 - index  # the computation that reads it first on the way back
        wanted = state.done > last or (state.done == last and state.left > 0)
        if not computed or wanted:
            return False
        if not self.ordered:
            return True
        entire = all(
            host in (0, size) for host, size in zip(state.host[:index], self.sizes, strict=False)
        )
        return entire and not state.back and not any(state.host[index + 1 :])

    def _may_return(self, state: _State, index: int) -> bool:
        if self.ordered and any(state.host[index + 1 :]):
            return False
        return state.host[index] > 0 and index < state.done

    def _moved(self, state: _State) -> Iterator[_State]:
        """After a tick, activations moving by bytes."""
        out = [i for i in range(len(self.sizes)) if self._goes(state, i)]
        back = [i for i in range(len(self.sizes)) if self._comes(state, i)]
        yield state
        for i in out:
            yield self._one(state, i, True)
        for i in back:
            yield self._one(state, i, False)
        if not self.shared and not self.ordered:
            for i in out:
                for j in back:
                    if i != j:
                        yield self._one(self._one(state, i, True), j, False)

    def _goes(self, state: _State, index: int) -> bool:
        left = self.sizes[index] - state.host[index]
        return left > 0 and not state.returning >> index & 1 and self._may_leave(state, index)

    def _comes(self, state: _State, index: int) -> bool:
        if not self._may_return(state, index):
            return False
        entire = state.host[index] == self.sizes[index] or state.returning >> index & 1
        return bool(entire) or self.transfers is Transfers.PARTIAL

    def _one(self, state: _State, index: int, out: bool) -> _State:
        size, host = self.sizes[index], state.host[index]
        if out:
            return state._replace(host=_set(state.host, index, min(size, host + self.rates[0])))
        host = max(0, host - self.rates[1])
        returning = state.returning & ~(1 << index)
        if host and self.transfers is Transfers.INTERRUPTIBLE:
            returning |= 1 << index
        return state._replace(host=_set(state.host, index, host), returning=returning, back=True)

    def _departures(self, state: _State) -> Iterator[_Way]:
        """Whole transfers that can start."""
        for out in (True, False):
            if any(self.shared or way.out is out for way in state.ways):
                continue
            if self.ordered and not out and any(way.out for way in state.ways):
                continue
            for i, size in enumerate(self.sizes):
                if any(way.activation == i for way in state.ways):
                    continue
                home = state.host[i] == 0
                may = self._may_leave(state, i) if out else self._may_return(state, i)
                if size and may and home is out:
                    yield _Way(i, out, -(-size // self.rates[0 if out else 1]))

    def _travelled(self, state: _State) -> _State:
        """After a tick of whole transfers."""
        host = state.host
        ways = []
        for way in state.ways:
            if way.left > 1:
                ways.append(way._replace(left=way.left - 1))
            elif way.out:
                host = _set(host, way.activation, self.sizes[way.activation])
        return state._replace(host=host, ways=tuple(ways))


def _set(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _whole(value: float) -> int:
    """``value``, which must be a whole number."""
    if value != int(value):
        raise ValueError(f"{value} is not a whole number of ticks, or of bytes a tick")
    return int(value)
