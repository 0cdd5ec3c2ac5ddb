"""Ordered no-wait schedules: when everything runs, given what is offloaded, and in which order.

Beaumont et al. 2019, sections 4.1 and 5.2. Offloads go in the order of the stages and
prefetches in the opposite one, all offloads before all prefetches. Forwards run as early as
memory allows. Backwards run as late as possible before the end of the step, which is the
same seen in a mirror: there a prefetch is an offload. So both phases are ``_no_wait``, and only
how far apart they are is left to find.

At any time ``t`` host memory alone holds ``min(O(t), R(T - t))`` bytes: ``O(t)`` of what was
offloaded, ``R`` of what, counted from the end ``T`` of the step, is still to come back. One of
the two is always all that is moved, as prefetches wait for the last offload. An operation runs
while at least ``away`` bytes (see ``OffloadChain``) are there, so the shortest step is

    T = max(end of F + length of B,
            end of O and of the last F_i that reads what is moved + length of R,
            start of B_j in R's time + when O reaches B_j's away,
            end of F_j + when R reaches F_j's away).

This is (9) and (10), but exact: the paper leaves out what ``B_{j+1}`` and those before free,
and lets ``x_i`` come back while ``F_i`` still runs, before its memory is free. Transfers
are fluid (memory goes with every byte) or whole (assumption (D)).
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
from fxremat.solvers.offload.line import OffloadChain, activations, line_of

_TOLERANCE = 2.0**-46
"""Relative to the makespan: times that are nearer than this are taken to be the same.

What the link moves meanwhile has to stay below what a fluid replay takes for rounding."""


@dataclass(frozen=True, slots=True)
class Transferred:
    """``nbytes`` of ``x_index`` on the link."""

    index: int
    begin_s: float
    end_s: float
    nbytes: float


@dataclass(frozen=True, slots=True)
class Phase:
    """Start of each operation and the transfers, in the phase's own time.

    Attributes:
        starts: of the operations, in their order.
        end_s: when the last is done.
        transfers: in their order.
        moved: bytes of each transfer and those before it.
        whole: transfers are.
    """

    starts: tuple[float, ...]
    end_s: float
    transfers: tuple[Transferred, ...]
    moved: tuple[float, ...]
    whole: bool

    @property
    def transferred_s(self) -> float:
        """When the last transfer ends."""
        return self.transfers[-1].end_s if self.transfers else 0.0

    def reaches(self, nbytes: float) -> float:
        """When ``nbytes`` are moved. In the end they are, but for rounding errors."""
        return _reached(self.transfers, self.moved, nbytes, whole=self.whole)


@dataclass(frozen=True, slots=True)
class OffloadTimes:
    """A whole step: starts in seconds, transfers in order of time.

    Attributes:
        forwards, backwards: start of each ``F_i`` and ``B_i``.
        prefetches: the transfers back.
        makespan_s: its length.
    """

    forwards: tuple[float, ...]
    backwards: tuple[float, ...]
    prefetches: tuple[Transferred, ...]
    makespan_s: float


def plan(line: OffloadChain, amounts: Sequence[float], *, whole: bool) -> OffloadTimes | None:
    """The ordered no-wait schedule that offloads ``amounts[i]`` bytes of ``x_i``.

    ``O(L log L)``.

    Returns:
        ``None`` if that is not enough for some operation, however long it waits.
    """
    forward_away, backward_away = line.away(line.forward_own), line.away(line.backward_own)
    if not suffices(line, amounts):
        return None
    forth = forward_phase(line, amounts, whole=whole)
    back = _no_wait(
        line.backward_s, backward_away, amounts, line.prefetch_rate, whole=whole, during=False
    )
    total = max(forth.end_s + back.end_s, turned(line, forth) + back.transferred_s)
    during_away, after_away = line.away(line.during_own), line.away(line.after_own)
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
    """Whether offloading ``amounts`` makes room for every operation, if it waits."""
    moved = 0.0
    for i, away in enumerate(
        zip(line.away(line.forward_own), line.away(line.backward_own), strict=True)
    ):
        if max(away) > moved:
            return False
        moved += amounts[i]
    return True


def forward_phase(line: OffloadChain, amounts: Sequence[float], *, whole: bool) -> Phase:
    """Forwards and offloads, which must be enough for every forward."""
    away = line.away(line.forward_own)
    return _no_wait(line.forward_s, away, amounts, line.offload_rate, whole=whole, during=True)


def turned(line: OffloadChain, forth: Phase) -> float:
    """When the first prefetch can start: what it moves is copied, and was read."""
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
    """Run the operations in their order, each as early as ``away`` allows.

    ``amounts[i]`` can be on its way from the start of operation ``i`` on if ``during``, else
    from its end on. It counts as away for later operations only.
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
    """When ``transfers`` have moved ``nbytes``."""
    if nbytes <= 0:
        return 0.0
    at = min(bisect_left(moved, nbytes), len(moved) - 1)
    t = transfers[at]
    if whole:
        return t.end_s
    part = 1.0 - (moved[at] - nbytes) / t.nbytes
    return t.begin_s + (t.end_s - t.begin_s) * min(1.0, part)


def solved(
    problem: Problem, amounts_of: Callable[[OffloadChain], Sequence[float]], *, whole: bool
) -> Solved | Infeasible:
    """The ordered no-wait schedule that offloads what is chosen for the chain of a problem.

    Args:
        problem: the chain, its costs, the budget and the link.
        amounts_of: chooses bytes of each activation, enough if the budget is one that can be kept.
        whole: transfers are.

    Raises:
        ValueError: a storage crosses two cuts, or the sizes are too large to add up.
    """
    line = line_of(problem)
    if line.budget < line.least_budget_bytes:
        return Infeasible(line.least_budget_bytes)
    return answer(line, amounts_of(line), whole=whole)


def answer(line: OffloadChain, amounts: Sequence[float], *, whole: bool) -> Solved:
    """The ordered no-wait schedule that offloads ``amounts``, which must be enough.

    Prefetches follow the last computation that starts before them: so they take no memory that
    was meant for it, and the next one need not wait for them to start. A fluid prefetch is cut
    where a computation starts. Then nothing starts later than planned: when its planned time
    comes, all that is before it in the sequence has started, and has moved as much as planned.
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
    """All computations with ``back`` after each; ``x_i`` is offloaded and freed after ``F_i``."""
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
    """Parts of a prefetch between starts of computations: begin, and bytes but for the last."""
    begin_s = t.begin_s
    for start in starts[bisect_right(starts, begin_s + slack) :]:
        if start >= t.end_s - slack:
            break
        if start > begin_s + slack:
            yield begin_s, t.nbytes * ((start - begin_s) / (t.end_s - t.begin_s))
            begin_s = start
    yield begin_s, None
