"""Replay a schedule of a chain on three lanes: compute, to the host and back.

The model. What each computation reads, makes and frees is in ``chain``. Beside it:

* Computations run on one lane, offloads (D2H) and prefetches (H2D) on one each, or all
  transfers on one if ``link.shared``. Each lane runs its operations in the order of the
  schedule, one at a time.
* What acquires memory (computations and prefetches) starts in the order of the schedule, or
  at the same instant. Each starts as soon as that, its lane, its data and room in memory
  allow (no-wait). It sees what operations before it give back, however late that is, and
  never depends on one after it. It has room if memory stays within the budget from then on.
* A value is moved as far as it brought in storages that no value kept before. So saved set
  ``i`` is moved without boundary ``i``, and what boundary ``i`` has of saved set ``i - 1``
  goes and comes with that.
* ``Offload`` copies a value once it was computed, be it read or not.
* ``Free`` gives back what offloads before it copy, once copied, and once the readers before
  it are done. Nothing may read the value then until a ``Wait``.
* ``Prefetch`` starts once the value's copies are complete and what was freed is given back.
* ``Wait``: computations after it start once the value is in device memory again, whole.
* Memory of a value that nobody holds any more is given back once a copy of it under way ends.

Transfers are whole (assumption (D) of Beaumont et al. 2019): an offload gives all back at its
end, a prefetch takes all at its start. Or they are *fluid*: memory goes and comes with every
byte, and ``nbytes`` moves part of a value. A fluid prefetch that could only run with pauses
starts later instead, and ends when it would have.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from math import ceil, inf

from fxremat.errors import ScheduleError
from fxremat.ir import (
    Chain,
    Compute,
    Costs,
    Event,
    Forward,
    Free,
    Idle,
    Lane,
    Link,
    Offload,
    Op,
    Part,
    Prefetch,
    Problem,
    Schedule,
    Timeline,
    Transfer,
)
from tests.reference.simulate.chain import ChainState, Step
from tests.reference.simulate.memory import Instance
from tests.reference.simulate.moved import Book, Copy, Moved
from tests.reference.simulate.profile import (
    Key,
    Profile,
    Room,
    running_totals,
    when_ramp_fits,
    when_steps_fit,
)

_BEFORE, _BEGIN, _END, _AFTER = range(4)
"""The order of an operation's changes where they coincide."""

_ROUNDING = 2.0**-44
"""Relative to what is held and to what the link can move until then: errors that a fluid replay
takes for rounding."""


def simulate(
    chain: Chain,
    costs: Costs,
    schedule: Schedule,
    *,
    link: Link | None = None,
    fluid: bool = False,
    budget_bytes: int | None = None,
) -> Timeline:
    """Replay ``schedule`` on ``chain``.

    Args:
        chain: the chain.
        costs: its costs.
        schedule: its operations.
        link: what transfers run on.
        fluid: memory goes and comes with every byte of a transfer, not all at once. Times are
            then only as exact as floats are, and so is the peak.
        budget_bytes: operations wait for room in that much memory; ``None``: there is
            always room.

    Returns:
        One event an operation. Without transfers, computations are back to back. Inside a
        rebuild the memory between the two operations is not modelled: ``held_bytes`` of its
        forward is the peak.

    Raises:
        ScheduleError: an operation is not valid where it stands (the message has its
            index and the reason), will never have room, or a backward is missing at the end.
    """
    return _Replay(chain, costs, link, fluid, budget_bytes).run(schedule)


def check(problem: Problem, schedule: Schedule, *, fluid: bool = False) -> Timeline:
    """Replay ``schedule`` within the problem's budget, on its link.

    Raises:
        ScheduleError: as ``simulate``.
    """
    return simulate(
        problem.chain,
        problem.costs,
        schedule,
        link=problem.link,
        fluid=fluid,
        budget_bytes=problem.budget_bytes,
    )


class _NoRoomError(ScheduleError):
    """There will never be room for an operation."""


class _Replay:
    def __init__(
        self, chain: Chain, costs: Costs, link: Link | None, fluid: bool, budget: int | None
    ) -> None:
        self.chain = chain
        self.link = link
        self.fluid = fluid
        self.budget = budget
        self.state = ChainState(chain, costs)
        self.profile = Profile(self.state.total_bytes)
        self.book = Book(chain)
        first = list(self.state.memory.holders)
        self.held = set(first)  # instances whose memory is counted one by one
        self.ready = dict.fromkeys(first, 0.0)
        self.lane_free_s = dict.fromkeys(Lane, 0.0)
        self.order_s = 0.0  # when the last operation that acquires memory started
        self.order_memory_s = 0.0  # of that, for how long it waited for memory
        self.data_s = 0.0  # when all that was waited for is there
        self.slack_bytes = 0.0

    def run(self, schedule: Schedule) -> Timeline:
        computations = schedule.computations
        if len(computations) < len(schedule) and self.link is None:
            raise ScheduleError("the schedule has transfers: they need a link to run on")
        self.slack_bytes = self._rounding(schedule)
        followers = iter([*computations[1:], None])
        events: list[tuple[Op, Lane, Idle, Key, Key]] = []
        for index, op in enumerate(schedule):
            try:
                if isinstance(op, Compute):
                    entry = self._compute(index, op, next(followers))
                else:
                    entry = self._transfer(index, op, self.link)
            except _NoRoomError as error:
                raise ScheduleError(f"op {index} ({op}) {error}") from None
            except ScheduleError as error:
                raise ScheduleError(f"op {index} ({op}): {error}") from None
            events.append((op, *entry))
        if self.state.level:
            raise ScheduleError(
                f"the schedule ends at op {len(schedule)} before B {self.state.level - 1}"
            )
        return self._timeline(events)

    def _compute(
        self, index: int, op: Compute, follower: Compute | None
    ) -> tuple[Lane, Idle, Key, Key]:
        step = self.state.run(op, follower)
        self.book.require(step.read)
        free_s = self.lane_free_s[Lane.COMPUTE]
        self._give_back(step.landed, (free_s, index, _BEFORE))
        made = self.state.memory.size(step.made)
        lower_s = max(free_s, self.data_s)
        start = self._find_room(step, made, max(lower_s, self.order_s))
        end = start + step.seconds
        begins, ends = (start, index, _BEGIN), (end, index, _END)
        self.profile.jump(begins, made + step.more_bytes)
        self.profile.jump(ends, step.left_bytes - step.more_bytes)
        self.held.update(step.made)
        self.ready |= dict.fromkeys(step.made, end)
        for what, instances in step.kept.items():
            self.book.keep(what, instances, ready=self.ready)
        self.book.read(step.read, until_s=end)
        self._give_back(step.gone, ends)
        order = max(0.0, self.order_s - lower_s)
        idle = Idle(
            memory_s=start - max(lower_s, self.order_s) + min(order, self.order_memory_s),
            data_s=lower_s - free_s,
            lane_s=max(0.0, order - self.order_memory_s),
        )
        self.lane_free_s[Lane.COMPUTE] = end
        self.order_s, self.order_memory_s = start, 0.0
        return Lane.COMPUTE, idle, begins, ends

    def _find_room(self, step: Step, made: int, lower_s: float) -> float:
        """When a computation can start; it must have landed what it lands."""
        if self.budget is None:
            return lower_s
        room = self._room()
        self.profile.forget(lower_s)
        pieces = self.profile.pieces(lower_s)
        freed = self.state.memory.size([i for i in step.gone if i in self.held or i in step.made])
        first = made + step.more_bytes
        later = made + step.left_bytes - freed
        start = when_steps_fit(pieces, room, seconds=step.seconds, first=first, later=later)
        if start == inf:
            peak = ceil(pieces[-1].end + max(first, later) - room.slack_bytes)
            raise _NoRoomError(f"peaks at {peak} bytes, the budget is {self.budget} bytes")
        return start

    def _room(self) -> Room:
        assert self.budget is not None
        return Room(self.budget, self.slack_bytes)

    def _rounding(self, schedule: Schedule) -> float:
        """Bytes that rounding may be: seconds of a step times bytes per second are many."""
        if self.link is None or not self.fluid:
            return 0.0
        rates = (self.link.offload_bytes_per_s, self.link.prefetch_bytes_per_s)
        seconds = 0.0
        for op in schedule:
            stage = op.stage if isinstance(op, Compute) else op.what.stage
            if not 0 <= stage < len(self.chain):
                continue  # is refused later
            if isinstance(op, Compute):
                cost = self.state.costs.stages[stage]
                seconds += cost.forward_s if isinstance(op, Forward) else cost.backward_s
            elif isinstance(op, Offload):  # what goes comes back
                seconds += self._size(op) / rates[0] + self._size(op) / rates[1]
        return _ROUNDING * ((self.budget or 0) + max(rates) * seconds)

    def _size(self, op: Offload) -> float:
        """What an offload moves, or a little more."""
        if op.nbytes is not None:
            return op.nbytes
        i = op.what.stage
        whole = self.chain.saved_set(i) if op.what.part is Part.SAVED else self.chain.boundaries[i]
        return self.chain.nbytes(whole)

    def _give_back(self, gone: list[Instance], key: Key) -> None:
        """Nobody holds ``gone`` from ``key`` on."""
        for instance in gone:
            if instance not in self.held:
                continue
            self.held.remove(instance)
            nbytes = self.chain.storages[instance[0]].nbytes
            moved = self.book.owner.get(instance)
            if moved is None:
                self.profile.jump(key, -nbytes)
            elif not moved.out:
                copied = (moved.copied_s, key[1], _AFTER)
                self.profile.jump(copied if copied[0] > key[0] else key, -nbytes)
            elif moved.back or moved.freed < moved.nbytes:
                raise ScheduleError(f"{moved.what} is dropped while only part of it is here")
        self.book.forget(gone)

    def _transfer(self, index: int, op: Transfer, link: Link | None) -> tuple[Lane, Idle, Key, Key]:
        assert link is not None
        moved = self.book.find(op.what)
        if isinstance(op, Offload):
            lane, (begin, end) = Lane.D2H, self._offload(moved, op, link)
        elif isinstance(op, Free):
            lane, (begin, end) = Lane.D2H, self._free(index, moved)
        elif isinstance(op, Prefetch):
            lane, (begin, end) = Lane.H2D, self._prefetch(index, moved, op, link)
        else:
            lane, (begin, end) = Lane.COMPUTE, self._wait(moved)
        return lane, Idle(), (begin, index, _BEGIN), (end, index, _AFTER)

    def _offload(self, moved: Moved, op: Offload, link: Link) -> tuple[float, float]:
        if moved.out:
            raise ScheduleError("some of it is not in device memory")
        nbytes = self._share(op.nbytes, left=moved.nbytes - moved.copied, of=moved.nbytes)
        begin = max(self.lane_free_s[Lane.D2H], moved.ready_s)
        end = begin + nbytes / link.offload_bytes_per_s
        moved.copies.append(Copy(begin, end, nbytes))
        self._occupy(Lane.D2H, end, link)
        return begin, end

    def _free(self, index: int, moved: Moved) -> tuple[float, float]:
        if not moved.copies:
            raise ScheduleError("nothing of it was offloaded")
        if not self.fluid and moved.copied < moved.nbytes:
            raise ScheduleError("some of it was not offloaded")
        from_s = max(moved.read_s, moved.ready_s)
        at_s = from_s
        done = moved.freed
        for copy in moved.copies:
            at_s = max(at_s, copy.end_s)
            if done >= copy.nbytes:  # an earlier Free gave this back
                done -= copy.nbytes
            elif self.fluid and copy.end_s > from_s:
                begin = max(from_s, copy.begin_s)
                rest = copy.nbytes * ((copy.end_s - begin) / (copy.end_s - copy.begin_s))
                self.profile.jump((from_s, index, _BEGIN), rest - copy.nbytes)
                self.profile.ramp((begin, index, _BEGIN), copy.end_s, -rest)
            else:
                self.profile.jump((at_s, index, _BEGIN), -copy.nbytes)
        moved.out, moved.freed, moved.freed_s = True, moved.copied, at_s
        return at_s, at_s

    def _prefetch(self, index: int, moved: Moved, op: Prefetch, link: Link) -> tuple[float, float]:
        if not moved.out:
            raise ScheduleError("all of it is in device memory")
        nbytes = self._share(op.nbytes, left=moved.freed - moved.back, of=moved.freed)
        seconds = nbytes / link.prefetch_bytes_per_s
        lower_s = max(self.order_s, self.lane_free_s[Lane.H2D], moved.copied_s, moved.freed_s)
        begin = lower_s
        if self.budget is not None:
            room = self._room()
            self.profile.forget(self.order_s)
            pieces = self.profile.pieces(lower_s)
            if self.fluid:
                begin = when_ramp_fits(pieces, room, seconds=seconds, nbytes=nbytes)
            else:
                begin = when_steps_fit(pieces, room, seconds=seconds, first=nbytes, later=nbytes)
            if begin == inf:
                peak = ceil(pieces[-1].end + nbytes - room.slack_bytes)
                raise _NoRoomError(f"peaks at {peak} bytes, the budget is {self.budget} bytes")
        end = begin + seconds
        if self.fluid:
            self.profile.ramp((begin, index, _BEGIN), end, nbytes)
        else:
            self.profile.jump((begin, index, _BEGIN), nbytes)
        moved.back += nbytes
        moved.back_s = end
        self._occupy(Lane.H2D, end, link)
        self.order_s, self.order_memory_s = begin, begin - lower_s
        return begin, end

    def _wait(self, moved: Moved) -> tuple[float, float]:
        if moved.out:
            if moved.freed - moved.back > 1e-9 * moved.freed:
                raise ScheduleError("not all of it was prefetched")
            moved.come_back()
        self.data_s = max(self.data_s, moved.ready_s)
        return moved.ready_s, moved.ready_s

    def _share(self, nbytes: float | None, *, left: float, of: float) -> float:
        """What a transfer of ``nbytes`` moves where ``left`` of the bytes ``of`` are left."""
        if nbytes is None:
            return left
        if not self.fluid and nbytes != left:
            raise ScheduleError(f"{left:g} bytes are left: parts need a fluid replay")
        if not 0 <= nbytes <= left + 1e-9 * of:
            raise ScheduleError(f"{left:g} bytes are left")
        return min(nbytes, left)

    def _occupy(self, lane: Lane, until_s: float, link: Link) -> None:
        for which in (Lane.D2H, Lane.H2D) if link.shared else (lane,):
            self.lane_free_s[which] = until_s

    def _timeline(self, entries: list[tuple[Op, Lane, Idle, Key, Key]]) -> Timeline:
        marks = [key for *_, begins, ends in entries for key in (begins, ends)]
        totals = running_totals(self.profile.first_bytes, self.profile.changes(), marks)
        keys = sorted(totals)
        place = {key: n for n, key in enumerate(keys)}
        events = []
        for op, lane, idle, begins, ends in entries:
            first, last = place[begins], place[ends]
            if begins[0] < ends[0]:  # leave out what ends or begins at the same instants
                first = bisect_right(keys, (begins[0], inf, inf)) - 1
                last = bisect_left(keys, (ends[0], -inf, -inf))
            within = [t for key in keys[first + 1 : last] for t in totals[key]]
            most = max(totals[keys[first]][1], totals[keys[last]][0], *within)
            held = totals[ends][1]
            events.append(
                Event(op, begins[0], ends[0], self._whole(most), self._whole(held), lane, idle)
            )
        return Timeline(tuple(events))

    def _whole(self, nbytes: float) -> int:
        """Rounded up, but not for a rounding error."""
        if isinstance(nbytes, int):
            return nbytes
        near = round(nbytes)
        return near if abs(nbytes - near) <= self.slack_bytes else ceil(nbytes)
