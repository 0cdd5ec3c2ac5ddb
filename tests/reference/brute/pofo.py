"""Exhaustive search over recomputation and offloading together, for small chains.

Written from the model alone: it lists every memory-persistent sequence of computations,
and for each of them every set of values to offload, and works out the least time of
each by following both phases through. No recurrence over stages, no bound, no pruning.
Exponential in the number of stages; meant for chains of at most six.

The model (assumptions of the POFO supplement, section 3.2 and appendix B of "Efficient
combination of rematerialization and offloading for training DNNs", NeurIPS 2021):

* Sequences are memory-persistent, as said in ``brute.chain``.
* What a forward of the first sweep keeps and reads, boundary ``i`` as it is or the saved
  set ``i - 1`` that has it, is a *value*. It is offloaded whole or not at all. A value
  whose boundary ``i`` has a storage of another boundary stays on the device.
* Offloads run in the first sweep, in the order in which the values are made; prefetches
  run after the loss point, in the order in which they are read. Between the two, all
  offloads are done and no prefetch has begun.
* Transfers are fluid: device memory is given back and taken at bandwidth, as the bytes
  move, and a prefetch may wait. A value can be copied as soon as it is made, but the
  forward that reads it needs all of it on the device; on the way back all of it is
  there before the first operation that reads it begins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import compress, product
from typing import NamedTuple

from fxremat.ir import (
    Activations,
    Backward,
    Chain,
    Compute,
    Costs,
    Forward,
    Free,
    Infeasible,
    Keep,
    Link,
    Offload,
    Op,
    Part,
    Prefetch,
    Problem,
    Schedule,
    Solution,
    Solved,
    Wait,
)

_Instances = frozenset[tuple[int, int]]
"""Storages, each with the number of the operation that made it."""


class Step(NamedTuple):
    """One operation, or a rebuild: two of them.

    Attributes:
        ops: the operations.
        seconds: how long they take together.
        peak_bytes: most memory during any of them if nothing is offloaded.
    """

    ops: tuple[Compute, ...]
    seconds: float
    peak_bytes: int


class Value(NamedTuple):
    """Something that may be offloaded.

    Attributes:
        what: for the schedule.
        nbytes: its size.
        kept: the step of the first sweep that reads and keeps it.
        needed: the first step after the loss point that reads it.
    """

    what: Activations
    nbytes: int
    kept: int
    needed: int


class Run(NamedTuple):
    """A sequence of computations.

    Attributes:
        steps: all of them.
        loss_point: how many of them belong to the first sweep.
        values: what may be offloaded, in the order in which it is made.
    """

    steps: tuple[Step, ...]
    loss_point: int
    values: tuple[Value, ...]


def solve(problem: Problem) -> Solution:
    """The least time within the budget, or ``Infeasible`` with the least budget of all.

    The schedule says what is transferred, and between which operations it may be; how
    the bytes flow there is in the makespan only. Without a link nothing is offloaded.
    """
    best: Solved | None = None
    least_bytes: int | None = None
    for run in runs(problem.chain, problem.costs):
        needs = needed_bytes(run, run.values if problem.link is not None else ())
        least_bytes = needs if least_bytes is None else min(needs, least_bytes)
        seconds, moved = best_seconds(problem, run)
        if seconds < (math.inf if best is None else best.makespan_s):
            best = Solved(_schedule(run, moved), seconds)
    assert least_bytes is not None
    return best if best is not None else Infeasible(least_bytes)


def best_seconds(problem: Problem, run: Run) -> tuple[float, tuple[Value, ...]]:
    """The least time of a sequence, and what it offloads; infinite if it does not fit."""
    values = run.values if problem.link is not None else ()
    best: tuple[float, tuple[Value, ...]] = (math.inf, ())
    if needed_bytes(run, values) > problem.budget_bytes:
        return best
    for chosen in product((False, True), repeat=len(values)):
        moved = tuple(compress(values, chosen))
        seconds = least_seconds(run, moved, problem.budget_bytes, problem.link)
        if seconds is not None and seconds < best[0]:
            best = (seconds, moved)
    return best


def needed_bytes(run: Run, moved: tuple[Value, ...]) -> int:
    """The least budget for a sequence: whatever is offloaded is away for as long as it can."""
    return max(
        step.peak_bytes - sum(v.nbytes for v in moved if v.kept < at < v.needed)
        for at, step in enumerate(run.steps)
    )


def least_seconds(
    run: Run, moved: tuple[Value, ...], budget_bytes: int, link: Link | None
) -> float | None:
    """The least time of a sequence of which ``moved`` is offloaded, ``None`` if it does not fit.

    Running everything as early as possible is best on the way to the loss point. On the way
    back it is running everything as late as possible: that is followed from the end, and
    a prefetch that is undone from there is an offload.
    """
    last = len(run.steps) - 1
    out_s = 1.0 / link.offload_bytes_per_s if link else 0.0
    back_s = 1.0 / link.prefetch_bytes_per_s if link else 0.0
    ahead = [(v.kept, v.nbytes) for v in moved]
    forward_s = _phase_seconds(run.steps[: run.loss_point], ahead, budget_bytes, out_s, early=True)
    behind = [(last - v.needed, v.nbytes) for v in reversed(moved)]
    reverse = run.steps[: run.loss_point - 1 : -1]
    backward_s = _phase_seconds(reverse, behind, budget_bytes, back_s, early=False)
    if forward_s is None or backward_s is None:
        return None
    return forward_s + backward_s


def _phase_seconds(
    steps: tuple[Step, ...],
    moved: list[tuple[int, int]],
    budget_bytes: int,
    byte_s: float,
    *,
    early: bool,
) -> float | None:
    """Time until all steps and all copies are done.

    Args:
        steps: in the order in which they are followed.
        moved: step that reads it, and size, of all that leaves in this order.
        budget_bytes: see ``Problem``.
        byte_s: seconds to copy a byte.
        early: a copy begins as soon as what it copies is made, when the step before its
            reader has ended; else once the reader has ended (from the end: begun).
    """
    now = 0.0
    lane = 0.0
    copies: list[tuple[float, int]] = []  # begin and bytes
    for at, step in enumerate(steps):
        made = now
        excess = step.peak_bytes - budget_bytes
        for begin, nbytes in copies:
            if excess > 0 and nbytes:
                now = max(now, begin + min(excess, nbytes) * byte_s)
                excess -= min(excess, nbytes)
        if excess > 0:
            return None
        now += step.seconds
        for reader, nbytes in moved:
            if reader == at:
                copies.append((max(lane, made if early else now), nbytes))
                lane = copies[-1][0] + nbytes * byte_s
    return max(now, lane)


def runs(chain: Chain, costs: Costs) -> Iterator[Run]:
    """Every memory-persistent sequence, as if memory had no end."""
    source = frozenset((i, -1) for i in chain.boundaries[0])
    yield from _Search(chain, costs).after((), _State(len(chain), False, 0, source, {}, {}))


class _State(NamedTuple):
    """Memory between two steps.

    Attributes:
        level: the backwards of stages ``>= level`` are done.
        turned: the last stage's forward has run.
        at: the boundary in flight, -1 if none.
        flight: its instances.
        kept: instances of each kept boundary.
        saved: instances of each held saved set with the boundary after it.
    """

    level: int
    turned: bool
    at: int
    flight: _Instances
    kept: dict[int, _Instances]
    saved: dict[int, _Instances]


class _Search:
    def __init__(self, chain: Chain, costs: Costs) -> None:
        self.chain = chain
        self.costs = costs
        self.count = len(chain)

    def after(self, steps: tuple[Step, ...], state: _State) -> Iterator[Run]:
        """All that complete ``steps``."""
        if state.level == 0:
            yield self._run(steps)
            return
        for step, then in self._next(len(steps), state):
            yield from self.after((*steps, step), then)

    def _next(self, number: int, state: _State) -> Iterator[tuple[Step, _State]]:
        last = state.level - 1
        if last in state.saved:
            yield self._backward(state)
            return
        # Forwards start from the deepest boundary in memory.
        stage = state.at
        if not 0 <= stage <= last:
            held = [i for i in range(last + 1) if i in state.kept or i - 1 in state.saved]
            if not held:
                return  # boundary 0 was consumed
            stage = max(held)
        source = self._read(state, stage)
        if state.at != stage:
            state = state._replace(at=-1, flight=frozenset())
        if stage == last and state.turned:
            yield self._rebuild(state)
            return
        yield from self._forwards(number, state, stage, source)

    def _read(self, state: _State, boundary: int) -> _Instances:
        if state.at == boundary:
            return state.flight
        if boundary in state.kept:
            return state.kept[boundary]
        ids = self.chain.boundaries[boundary]
        return frozenset(x for x in state.saved[boundary - 1] if x[0] in ids)

    def _forwards(
        self, number: int, state: _State, stage: int, source: _Instances
    ) -> Iterator[tuple[Step, _State]]:
        cost = self.costs.stages[stage]
        here = {storage for storage, _ in source}
        writes = set(self.chain.boundaries[stage + 1])
        passed = frozenset(x for x in source if x[0] in writes)
        written = passed | {(i, number) for i in writes - here}
        saved = written | {(i, number) for i in set(self.chain.stages[stage].saved) - here}
        turned = state.turned or stage == self.count - 1
        after = state._replace(turned=turned, at=stage + 1, flight=written)

        peak = self._total(state, source | written) + cost.forward_extra_bytes
        if stage not in state.kept and stage < state.level - 1:
            yield Step((Forward(stage, Keep.NONE),), cost.forward_s, peak), after
        kept = {**state.kept, stage: source}
        after = after._replace(kept=kept)
        yield Step((Forward(stage, Keep.INPUT),), cost.forward_s, peak), after
        peak = self._total(state, source | saved) + cost.keep_extra_bytes
        after = after._replace(saved={**state.saved, stage: saved})
        yield Step((Forward(stage, Keep.ALL),), cost.forward_s, peak), after

    def _backward(self, state: _State) -> tuple[Step, _State]:
        stage = state.level - 1
        cost = self.costs.stages[stage]
        # What is in flight is the boundary after the stage, and part of the saved set.
        peak = self._total(state, frozenset()) + cost.backward_extra_bytes
        return Step((Backward(stage),), cost.backward_s, peak), self._done(state)

    def _rebuild(self, state: _State) -> tuple[Step, _State]:
        stage = state.level - 1
        cost = self.costs.stages[stage]
        peak = self._total(state, frozenset()) + cost.rebuild_bytes
        ops = (Forward(stage, Keep.ALL), Backward(stage))
        return Step(ops, cost.rebuild_s + cost.backward_s, peak), self._done(state)

    def _done(self, state: _State) -> _State:
        stage = state.level - 1
        kept = {i: value for i, value in state.kept.items() if i != stage}
        saved = {i: value for i, value in state.saved.items() if i != stage}
        return _State(stage, True, -1, frozenset(), kept, saved)

    def _total(self, state: _State, more: _Instances) -> int:
        held = more | state.flight
        for value in (*state.kept.values(), *state.saved.values()):
            held |= value
        nbytes = sum(self.chain.storages[storage].nbytes for storage, _ in held)
        return nbytes + self.costs.fixed_bytes + self.costs.stages[state.level - 1].gradient_bytes

    def _run(self, steps: tuple[Step, ...]) -> Run:
        firsts = [step.ops[0] for step in steps]
        loss_point = 1 + min(at for at, op in enumerate(firsts) if op.stage == self.count - 1)
        values = []
        for at, op in enumerate(firsts[:loss_point]):
            assert isinstance(op, Forward)
            held = at and firsts[at - 1] == Forward(op.stage - 1, Keep.ALL)
            if not self._is_own(op.stage) or (op.keep is Keep.NONE and not held):
                continue
            if held:
                what = Activations(Part.SAVED, op.stage - 1)
                nbytes = self.chain.nbytes(self.chain.saved_set(op.stage - 1))
            else:
                what = Activations(Part.INPUT, op.stage)
                nbytes = self.chain.nbytes(self.chain.boundaries[op.stage])
            needed = min(n for n in range(loss_point, len(firsts)) if _reads(firsts[n], what))
            values.append(Value(what, nbytes, at, needed))
        return Run(steps, loss_point, tuple(values))

    def _is_own(self, boundary: int) -> bool:
        """Whether no storage of the boundary is in another one."""
        others = [ids for i, ids in enumerate(self.chain.boundaries) if i != boundary]
        return not set(self.chain.boundaries[boundary]) & {i for ids in others for i in ids}


def _reads(op: Compute, what: Activations) -> bool:
    """Whether ``op``, after the loss point, reads ``what`` before anything else does."""
    return op.stage in ((what.stage,) if what.part is Part.INPUT else (what.stage, what.stage + 1))


def _schedule(run: Run, moved: tuple[Value, ...]) -> Schedule:
    ops: list[Op] = []
    for at, step in enumerate(run.steps):
        if at == run.loss_point:
            ops += [Prefetch(value.what) for value in reversed(moved)]
        ops += [Wait(value.what) for value in moved if value.needed == at]
        ops += step.ops
        for value in moved:
            if value.kept == at:
                ops += [Offload(value.what), Free(value.what)]
    return Schedule(tuple(ops))
