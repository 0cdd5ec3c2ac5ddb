"""Computes when the transfers of a plan run, and the schedule that runs them then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fxremat.ir import Free, Link, Offload, Op, Prefetch, Schedule, Wait
from fxremat.solvers.papers.pofo.steps import Computation, Computations


class _Times(NamedTuple):
    """Times of one phase in seconds from its begin; after the loss point, back from its end.

    Attributes:
        begins: begin of each step.
        copies: begin and end of the copy of each moved value.
        seconds: end of the phase.
    """

    begins: list[float]
    copies: list[tuple[float, float]]
    seconds: float


def _follow(
    steps: tuple[Computation, ...],
    copies: list[tuple[int, int]],
    budget: int,
    byte_s: float,
    *,
    ready: bool,
) -> _Times:
    """Return the times of steps that run as early as memory allows.

    What is copied is freed while it is copied.

    Args:
        steps: the steps.
        copies: for each value to copy, in order, the step that reads it and its bytes.
        budget: bytes.
        byte_s: seconds to copy a byte.
        ready: whether a value can be copied from the end of its reader on, else from when the
            reader could have begun.
    """
    now = lane = 0.0
    begins: list[float] = []
    done: list[tuple[float, float]] = []
    for at, step in enumerate(steps):
        made = now
        now = max(now, lane - (budget - step.nbytes) * byte_s)
        begins.append(now)
        now += step.seconds
        for reader, nbytes in copies:
            if reader == at:
                begin = max(lane, now if ready else made)
                lane = begin + nbytes * byte_s
                done.append((begin, lane))
    return _Times(begins, done, max(now, lane))


def _times_of_phases(plan: Computations, budget: int, link: Link | None) -> tuple[_Times, _Times]:
    out_s = 1.0 / link.offload_bytes_per_s if link else 0.0
    back_s = 1.0 / link.prefetch_bytes_per_s if link else 0.0
    ahead = _follow(
        plan.sweep, [(v.kept, v.nbytes) for v in plan.moved], budget, out_s, ready=False
    )
    last = len(plan.back) - 1
    undone = [(last - v.needed, v.nbytes) for v in plan.moved]
    return ahead, _follow(plan.back[::-1], undone, budget, back_s, ready=True)


def fluid_seconds(plan: Computations, budget: int, link: Link | None) -> float:
    """Return the seconds of a plan with fluid transfers, which move memory byte by byte.

    The phases before and after the loss point do not overlap.
    """
    ahead, back = _times_of_phases(plan, budget, link)
    return ahead.seconds + back.seconds


def fluid_schedule(plan: Computations, budget: int, link: Link | None) -> Schedule:
    """Return the schedule of a plan that takes ``fluid_seconds`` in a no-wait replay.

    Offloads follow their readers, and start as soon as they can. A prefetch that starts as soon as
    it can would take memory from computations that should come first. So with all prefetches as
    late as possible, it is split where a computation ends, and each part follows the last
    computation that begins no later than the part. Replayed as early as possible, nothing happens
    later than that: a computation waits for no part that begins after it, and what has been
    prefetched when it ends is no more than planned.

    A prefetch of no bytes at the loss point keeps the backward from starting before all offloads
    are done, and prefetches stay behind the first computation after it. That is the supplement's
    model, in which the phases do not overlap.
    """
    ops = list(_first_sweep(plan))
    if plan.moved:
        ops.append(Prefetch(plan.moved[-1].what, 0))
    parts = _parts(plan, _times_of_phases(plan, budget, link)[1], link)
    for at, step in enumerate(plan.back):
        ops += parts.get((at, 0), [])
        ops += [Wait(value.what) for value in plan.moved if value.needed == at]
        for n, op in enumerate(step.ops):
            ops.append(op)
            ops += parts.get((at, n + 1), [])
    return Schedule(tuple(ops))


def _first_sweep(plan: Computations) -> Iterator[Op]:
    kept = {value.kept: value for value in plan.moved}
    for at, step in enumerate(plan.sweep):
        yield from step.ops
        if at in kept:
            yield Offload(kept[at].what)
            yield Free(kept[at].what)


def _parts(
    plan: Computations, times: _Times, link: Link | None
) -> dict[tuple[int, int], list[Prefetch]]:
    """Return the parts of prefetches by where they start.

    The key is the index of a step after the loss point, and how many of its operations come first.

    Args:
        times: times of the phase after the loss point, from its end.
    """
    parts: dict[tuple[int, int], list[Prefetch]] = {}
    if link is None:
        return parts
    # Times count back from the end: step ``at`` ends at ``ends[at]``, less than ``ends[at - 1]``.
    ends = times.begins[::-1]
    for value, (begin, end) in zip(reversed(plan.moved), reversed(times.copies), strict=True):
        last = value.needed
        while last > 0 and ends[last - 1] <= begin:
            last -= 1
        at = last
        while at > 0 and ends[at - 1] < end:
            at -= 1
        for k in range(at, last + 1):
            starts = min(end, ends[k - 1]) if k else end
            nbytes = (starts - max(begin, ends[k])) * link.prefetch_bytes_per_s
            if k == last or nbytes > 0:
                place = (k, _begun(plan.back[k], k, starts - ends[k]))
                part = Prefetch(value.what, None if k == last else nbytes)
                parts.setdefault(place, []).append(part)
    return parts


def _begun(step: Computation, at: int, left_s: float) -> int:
    """Return how many operations of step ``at`` have begun ``left_s`` seconds before its end."""
    if left_s > step.seconds:
        return 0 if at else 1  # see ``fluid_schedule``
    return len(step.ops) if left_s <= step.seconds - step.first_s else 1


def whole_schedule(plan: Computations, budget: int, link: Link | None) -> tuple[Schedule, float]:
    """Return the schedule of a plan with whole transfers, and its seconds in a no-wait replay.

    An offload frees everything at its end, a prefetch allocates everything at its start. A prefetch
    starts when its lane is free, the last stage's forward is done, and its memory is available
    until it is needed, in addition to what all computations before that need; at the latest right
    before it is needed.
    """
    if link is None:
        return fluid_schedule(plan, budget, link), fluid_seconds(plan, budget, link)
    replay = _Whole(plan, budget, link)
    replay.run()
    return Schedule(tuple(replay.ops)), replay.seconds


class _Whole:
    """Follows a plan in time with whole transfers, and places the prefetches."""

    def __init__(self, plan: Computations, budget: int, link: Link) -> None:
        self.plan = plan
        self.budget = budget
        self.link = link
        self.ops: list[Op] = []
        self.now = 0.0  # end of the computations so far
        self.order = 0.0  # last start of an operation that takes memory
        self.out = 0.0  # when the lane of offloads is free
        self.back = 0.0  # when the lane of prefetches is free
        self.gone: dict[int, float] = {}  # when a value's memory is freed
        self.here: dict[int, float] = {}  # when a value is entirely back
        # Free bytes of steps after the loss point, with prefetched values counted as held.
        self.room = [budget - step.nbytes for step in plan.back]

    @property
    def seconds(self) -> float:
        """Seconds from the start of the step to the end of all operations."""
        return max(self.now, self.out, self.back)

    def run(self) -> None:
        kept = {value.kept: k for k, value in enumerate(self.plan.moved)}
        for at, step in enumerate(self.plan.sweep):
            made = self.now
            self._compute(step, self.budget - step.nbytes)
            if at in kept:
                self._offload(kept[at], made)
        waiting = len(self.plan.moved)
        for at, step in enumerate(self.plan.back):
            while waiting and at > 0 and self._starts(waiting - 1, at):
                waiting -= 1
                self._prefetch(waiting, at)
            for k, value in enumerate(self.plan.moved):
                if value.needed == at:
                    self.ops.append(Wait(value.what))
                    self.now = max(self.now, self.here[k])
            self._compute(step, self.room[at])

    def _compute(self, step: Computation, room: int) -> None:
        self.now = max(self.now, self.order)
        pending = sorted((t, k) for k, t in self.gone.items() if t > self.now)
        left = sum(self.plan.moved[k].nbytes for _, k in pending)
        for t, k in pending:
            if left <= room:
                break
            self.now = t
            left -= self.plan.moved[k].nbytes
        self.order = self.now + step.first_s
        self.now += step.seconds
        self.ops += step.ops

    def _offload(self, k: int, made: float) -> None:
        value = self.plan.moved[k]
        begin = max(self.out, made)
        self.out = begin + value.nbytes / self.link.offload_bytes_per_s
        if self.link.shared:
            self.back = self.out
        self.gone[k] = self.out  # by the time that this is read, the value's reader has ended
        self.ops += [Offload(value.what), Free(value.what)]

    def _starts(self, k: int, at: int) -> bool:
        """Return whether the prefetch of moved value ``k`` is placed before step ``at``."""
        value = self.plan.moved[k]
        if value.needed == at:
            return True
        if max(self.back, self.gone[k]) > self.now:
            return False
        return all(room >= value.nbytes for room in self.room[at : value.needed])

    def _prefetch(self, k: int, at: int) -> None:
        value = self.plan.moved[k]
        begin = max(self.order, self.back, self.gone[k])
        if begin < self.now and self.room[at - 1] < value.nbytes:
            begin = self.now
        self.back = begin + value.nbytes / self.link.prefetch_bytes_per_s
        self.order = begin
        for j in range(at, value.needed):
            self.room[j] -= value.nbytes
        if begin < self.now:
            self.room[at - 1] -= value.nbytes
        self.here[k] = self.back
        self.ops.append(Prefetch(value.what))
