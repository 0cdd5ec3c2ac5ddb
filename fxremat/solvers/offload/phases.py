"""Ordered no-wait schedules: when everything runs, given what is offloaded.

Beaumont et al. 2019, sections 4.1 and 5.2. Offloads go in the order of the stages and
prefetches in the opposite one, all offloads before all prefetches. Forwards run as early as
memory allows. Backwards run as late as possible before the end of the step, which is the
same seen in a mirror: there a prefetch is an offload. So both phases are ``_no_wait``, and only
how far apart they are is left to find.

At any time ``t`` host memory alone holds ``min(O(t), R(T - t))`` bytes: ``O(t)`` of what was
offloaded, ``R`` of what, counted from the end ``T`` of the step, is still to come back. One of
the two is always all that is moved, as prefetches wait for the last offload. An operation runs
while at least ``away`` bytes (see ``Line``) are there, so the shortest step is

    T = max(end of F + length of B, end of O + length of R,
            start of B_j in R's time + when O reaches B_j's away,
            end of F_j + when R reaches F_j's away).

This is (9) and (10), but exact: the paper leaves out what ``B_{j+1}`` and those before free.
Transfers are fluid (memory goes with every byte) or whole (assumption (D)).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxremat.solvers.offload.line import Line


@dataclass(frozen=True, slots=True)
class Transferred:
    """``nbytes`` of ``x_index`` on the link."""

    index: int
    begin_s: float
    end_s: float
    nbytes: float


@dataclass(frozen=True, slots=True)
class Phase:
    """Start of each operation and the transfers, in the phase's own time."""

    starts: tuple[float, ...]
    end_s: float
    transfers: tuple[Transferred, ...]

    @property
    def transferred_s(self) -> float:
        """When the last transfer ends."""
        return self.transfers[-1].end_s if self.transfers else 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole step: starts in seconds, transfers in order of time.

    Attributes:
        forwards, backwards: start of each ``F_i`` and ``B_i``.
        offloads, prefetches: the transfers.
        makespan_s: its length.
        whole: transfers are.
    """

    forwards: tuple[float, ...]
    backwards: tuple[float, ...]
    offloads: tuple[Transferred, ...]
    prefetches: tuple[Transferred, ...]
    makespan_s: float
    whole: bool


def plan(line: Line, amounts: Sequence[float], *, whole: bool) -> Plan | None:
    """The ordered no-wait schedule that offloads ``amounts[i]`` bytes of ``x_i``.

    ``O(L (L + transfers))``.

    Returns:
        ``None`` if that is not enough for some operation, however long it waits.
    """
    forward_away, backward_away = line.away(line.forward_own), line.away(line.backward_own)
    moved = 0.0
    for i in range(len(line)):
        if max(forward_away[i], backward_away[i]) > moved:
            return None
        moved += amounts[i]
    forth = _no_wait(
        line.forward_s, forward_away, amounts, line.offload_rate, whole=whole, during=True
    )
    back = _no_wait(
        line.backward_s, backward_away, amounts, line.prefetch_rate, whole=whole, during=False
    )
    total = max(forth.end_s + back.end_s, forth.transferred_s + back.transferred_s)
    for i in range(len(line)):
        done = back.starts[i] + line.backward_s[i]
        total = max(total, done + _reached(forth.transfers, backward_away[i], whole=whole))
        done = forth.starts[i] + line.forward_s[i]
        total = max(total, done + _reached(back.transfers, forward_away[i], whole=whole))
    return Plan(
        forwards=forth.starts,
        backwards=tuple(
            total - start - seconds
            for start, seconds in zip(back.starts, line.backward_s, strict=True)
        ),
        offloads=forth.transfers,
        prefetches=tuple(
            Transferred(t.index, total - t.end_s, total - t.begin_s, t.nbytes)
            for t in reversed(back.transfers)
        ),
        makespan_s=total,
        whole=whole,
    )


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
    for i, takes in enumerate(seconds):
        start = max(now, _reached(transfers, away[i], whole=whole))
        starts.append(start)
        if amounts[i]:
            begin = max(linked, now if during else start + takes)
            linked = begin + amounts[i] / rate
            transfers.append(Transferred(i, begin, linked, amounts[i]))
        now = start + takes
    return Phase(tuple(starts), now, tuple(transfers))


def _reached(transfers: Sequence[Transferred], nbytes: float, *, whole: bool) -> float:
    """When ``transfers`` have moved ``nbytes``; they do in the end, but for rounding errors."""
    if nbytes <= 0:
        return 0.0
    left = nbytes
    for t in transfers:
        if left <= t.nbytes:
            part = 1.0 if whole else left / t.nbytes
            return t.begin_s + (t.end_s - t.begin_s) * part
        left -= t.nbytes
    return transfers[-1].end_s
