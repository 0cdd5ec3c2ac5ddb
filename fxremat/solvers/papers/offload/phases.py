"""Ordered no-wait schedules: when every operation runs, given what is offloaded and in which order.

Beaumont et al. 2019, sections 4.1 and 5.2. Offloads run in the order of the stages and prefetches
in the opposite one, all offloads before all prefetches. Forwards run as early as memory allows.
Backwards run as late as possible before the end of the step. That is the same reversed in time,
where a prefetch is an offload. So both phases are computed by ``_no_wait``, and only their distance
remains to be computed.

At any time ``t``, ``min(O(t), R(T - t))`` bytes are in host memory only: ``O(t)`` of what was
offloaded, and ``R`` of what, counted from the end ``T`` of the step, still has to be prefetched.
One of the two is always everything that is moved, since prefetches wait for the last offload. An
operation runs while at least ``away`` bytes (see ``OffloadChain``) are in host memory only, so the
shortest step is

    T = max(end of F + length of B,
            end of O and of the last F_i that reads what is moved + length of R,
            start of B_j in R's time + when O reaches B_j's away,
            end of F_j + when R reaches F_j's away).

This is (9) and (10) of the paper, but exact: the paper leaves out what ``B_{j+1}`` and earlier
backwards free, and lets ``x_i`` be prefetched while ``F_i`` still runs, before its memory is freed.
Transfers are fluid (memory is freed byte by byte) or whole (assumption (D)).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fxremat.ir import (
    Backward,
    Forward,
    Free,
    Infeasible,
    Keep,
    Offload,
    Op,
    Prefetch,
    Problem,
    Schedule,
    Solved,
    Wait,
)
from fxremat.solvers.papers.offload.line import OffloadChain, activations, line_of

_TOLERANCE = 2.0**-46
"""Times are treated as equal if they differ by less than this share of the makespan.

What the link moves in that time has to stay below what a fluid replay treats as rounding."""


@dataclass(frozen=True, slots=True)
class Transferred:
    """A transfer of ``nbytes`` of activation ``x_index``, from ``begin_s`` to ``end_s``."""

    index: int
    begin_s: float
    end_s: float
    nbytes: float


@dataclass(frozen=True, slots=True)
class Phase:
    """Times of the forwards and offloads, or reversed in time, of the backwards and prefetches.

    Attributes:
        starts: starts of the operations, in order.
        end_s: end of the last operation.
        transfers: transfers, in order.
        moved: for each transfer the bytes moved by it and all before it.
        whole: whether a transfer frees or allocates all its memory at once.
    """

    starts: tuple[float, ...]
    end_s: float
    transfers: tuple[Transferred, ...]
    moved: tuple[float, ...]
    whole: bool

    @property
    def transferred_s(self) -> float:
        """Seconds from the start of the phase to the end of its last transfer."""
        return self.transfers[-1].end_s if self.transfers else 0.0

    def reaches(self, nbytes: float) -> float:
        """Return at how many seconds ``nbytes`` have been moved.

        Where rounding makes the total less, return the end of the last transfer.
        """
        return _reached(self.transfers, self.moved, nbytes, whole=self.whole)


@dataclass(frozen=True, slots=True)
class OffloadTimes:
    """Times of a whole step in seconds, with transfers in order of time.

    Attributes:
        forwards, backwards: start of each ``F_i`` and ``B_i``.
        prefetches: the prefetches.
        makespan_s: length of the step.
    """

    forwards: tuple[float, ...]
    backwards: tuple[float, ...]
    prefetches: tuple[Transferred, ...]
    makespan_s: float


def plan(line: OffloadChain, amounts: Sequence[float], *, whole: bool) -> OffloadTimes | None:
    """Return the times of a step that offloads ``amounts[i]`` bytes of activation ``x_i``.

    They are those of the ordered no-wait schedule, see the module. ``None`` if the amounts are not
    enough for some operation, however long it waits. ``O(L log L)``.

    Args:
        amounts: bytes to offload of each activation.
        whole: whether a transfer frees or allocates all its memory at once, else byte by byte.
    """
    forward_away, backward_away = line.away(line.forward_bytes), line.away(line.most_backward_bytes)
    if not suffices(line, amounts):
        return None
    forth = forward_phase(line, amounts, whole=whole)
    back = _no_wait(
        line.backward_s, backward_away, amounts, line.prefetch_rate, whole=whole, during=False
    )
    total = max(forth.end_s + back.end_s, first_prefetch_s(line, forth) + back.transferred_s)
    during_away, after_away = line.away(line.backward_bytes), line.away(line.after_backward_bytes)
    for i in range(len(line)):
        done = back.starts[i] + line.backward_s[i]
        total = max(total, done + forth.reaches(during_away[i]))
        total = max(total, back.starts[i] + forth.reaches(after_away[i]))
        done = forth.starts[i] + line.forward_s[i]
        total = max(total, done + back.reaches(forward_away[i]))
    return OffloadTimes(
        forwards=forth.starts,
        backwards=tuple(
            total - start - seconds
            for start, seconds in zip(back.starts, line.backward_s, strict=True)
        ),
        prefetches=tuple(
            Transferred(t.index, total - t.end_s, total - t.begin_s, t.nbytes)
            for t in reversed(back.transfers)
        ),
        makespan_s=total,
    )


def suffices(line: OffloadChain, amounts: Sequence[float]) -> bool:
    """Return whether every operation fits the budget after offloading ``amounts[i]`` of ``x_i``.

    An operation may wait for offloads as long as it must.
    """
    moved = 0.0
    for i, away in enumerate(
        zip(line.away(line.forward_bytes), line.away(line.most_backward_bytes), strict=True)
    ):
        if max(away) > moved:
            return False
        moved += amounts[i]
    return True


def forward_phase(line: OffloadChain, amounts: Sequence[float], *, whole: bool) -> Phase:
    """Return the times of the forwards and of the offloads of ``amounts``.

    The offloads must suffice for every forward.
    """
    away = line.away(line.forward_bytes)
    return _no_wait(line.forward_s, away, amounts, line.offload_rate, whole=whole, during=True)


def first_prefetch_s(line: OffloadChain, forth: Phase) -> float:
    """Return the seconds at which the first prefetch can start.

    By then what it moves has been copied to the host and read by its forward.
    """
    if not forth.transfers:
        return 0.0
    last = forth.transfers[-1].index
    return max(forth.transferred_s, forth.starts[last] + line.forward_s[last])


def _no_wait(
    seconds: Sequence[float],
    away: Sequence[int],
    amounts: Sequence[float],
    rate: float,
    *,
    whole: bool,
    during: bool,
) -> Phase:
    """Return the times of operations in order, each as early as ``away`` allows.

    Args:
        seconds: time of each operation.
        away: bytes that must have been moved before each operation.
        amounts: bytes of each operation to move. They count as moved for later operations only.
        rate: bytes per second.
        whole: whether a transfer frees or allocates all its memory at once.
        during: whether ``amounts[i]`` can be moved from the start of operation ``i`` on, else from
            its end on.
    """
    now = linked = 0.0
    starts: list[float] = []
    transfers: list[Transferred] = []
    moved: list[float] = []
    for i, takes in enumerate(seconds):
        start = max(now, _reached(transfers, moved, away[i], whole=whole))
        starts.append(start)
        if amounts[i]:
            begin = max(linked, now if during else start + takes)
            linked = begin + amounts[i] / rate
            transfers.append(Transferred(i, begin, linked, amounts[i]))
            moved.append(amounts[i] + (moved[-1] if moved else 0.0))
        now = start + takes
    return Phase(tuple(starts), now, tuple(transfers), tuple(moved), whole)


def _reached(
    transfers: Sequence[Transferred], moved: Sequence[float], nbytes: float, *, whole: bool
) -> float:
    """Return at how many seconds ``transfers`` have moved ``nbytes``.

    Args:
        moved: for each transfer the bytes moved by it and all before it.
        whole: whether a transfer counts only when it is done.
    """
    if nbytes <= 0:
        return 0.0
    at = min(bisect_left(moved, nbytes), len(moved) - 1)
    t = transfers[at]
    if whole:
        return t.end_s
    part = 1.0 - (moved[at] - nbytes) / t.nbytes
    return t.begin_s + (t.end_s - t.begin_s) * min(1.0, part)


def solve_by(
    problem: Problem, amounts_of: Callable[[OffloadChain], Sequence[float]], *, whole: bool
) -> Solved | Infeasible:
    """Return the schedule that offloads what ``amounts_of`` returns, and its time.

    It is ordered and no-wait, see the module. ``Infeasible`` if the budget is too small.

    Args:
        problem: the chain, its costs, the budget and the link.
        amounts_of: returns the bytes to offload of each activation, which have to suffice.
        whole: whether a transfer frees or allocates all its memory at once, else byte by byte.

    Raises:
        ValueError: a storage crosses two cuts, or the sizes are too large to add up.
    """
    line = line_of(problem)
    if line.budget < line.least_budget_bytes:
        return Infeasible(line.least_budget_bytes)
    return schedule_offloads(line, amounts_of(line), whole=whole)


def schedule_offloads(line: OffloadChain, amounts: Sequence[float], *, whole: bool) -> Solved:
    """Return the schedule that offloads ``amounts[i]`` bytes of activation ``x_i``, and its time.

    It is ordered and no-wait, see the module. The amounts must suffice. ``whole`` is whether a
    transfer frees or allocates all its memory at once, else byte by byte.

    Prefetches follow the last computation that starts before them. So they take no memory that this
    computation needs, and the next one need not wait for them to start. A fluid prefetch is split
    where a computation starts. Then nothing starts later than planned: at its planned time,
    everything before it in the sequence has started, and has moved as much as planned.
    """
    planned = plan(line, amounts, whole=whole)
    assert planned is not None
    starts = [*planned.forwards, *reversed(planned.backwards)]
    slack = _TOLERANCE * planned.makespan_s
    back: list[list[Op]] = [[] for _ in starts]
    for t in planned.prefetches:
        latest = 2 * len(line) - 2 - t.index  # the computation before B_index
        for begin_s, nbytes in _cuts(t, starts, slack) if not whole else [(t.begin_s, None)]:
            after = min(latest, bisect_right(starts, begin_s + slack) - 1)
            back[after].append(Prefetch(activations(t.index), nbytes))
    return Solved(sequence(line, amounts, back), planned.makespan_s)


def sequence(
    line: OffloadChain, amounts: Sequence[float], back: Sequence[Sequence[Op]]
) -> Schedule:
    """Return the schedule of all computations that offloads ``amounts[i]`` bytes of ``x_i``.

    ``x_i`` is offloaded and freed after ``F_i``. Operations ``back[c]``, the prefetches, follow
    computation ``c``.
    """
    ops: list[Op] = []
    for i in range(len(line)):
        ops.append(Forward(i, Keep.ALL))
        if amounts[i]:
            nbytes = None if amounts[i] == line.sizes[i] else amounts[i]
            ops += [Offload(activations(i), nbytes), Free(activations(i))]
        ops += back[i]
    for i in reversed(range(len(line))):
        if amounts[i]:
            ops.append(Wait(activations(i)))
        ops += [Backward(i), *back[2 * len(line) - 1 - i]]
    return Schedule(tuple(ops))


def _cuts(
    t: Transferred, starts: list[float], slack: float
) -> Iterator[tuple[float, float | None]]:
    """Yield begin and bytes of the parts of a prefetch that is split where computations start.

    The bytes of the last part are ``None``, for all that is left. Parts are longer than ``slack``
    seconds.
    """
    begin_s = t.begin_s
    for start in starts[bisect_right(starts, begin_s + slack) :]:
        if start >= t.end_s - slack:
            break
        if start > begin_s + slack:
            yield begin_s, t.nbytes * ((start - begin_s) / (t.end_s - t.begin_s))
            begin_s = start
    yield begin_s, None
