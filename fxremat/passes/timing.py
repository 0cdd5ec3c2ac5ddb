"""When the calls of a program run, and the copies of its moves beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fxremat.ir import Copy, Event, Idle, Lane, Timeline
from fxremat.passes.moves import Move
from fxremat.passes.program import Program
from fxremat.passes.sweep import Sweep
from fxremat.runtime.bandwidth import MeasuredLink


@dataclass(slots=True)
class _Lanes:
    """Copies in the order in which they are issued, one after the other on a lane.

    When a copy runs is known once it is issued: what comes later cannot delay it.
    """

    link: MeasuredLink
    free_s: dict[Lane, float] = field(default_factory=dict)
    copies: list[tuple[float, float]] = field(default_factory=list)

    def copy(self, nbytes: int, lane: Lane, *, ready_s: float) -> tuple[float, float]:
        """Begin and end of a copy that may begin at ``ready_s``."""
        rate = self.link.offload_bytes_per_s if lane is Lane.D2H else self.link.prefetch_bytes_per_s
        queue = Lane.D2H if self.link.shared else lane
        begin = max(ready_s, self.free_s.get(queue, 0.0))
        end = begin + nbytes / rate
        self.free_s[queue] = end
        self.copies.append((begin, end))
        return begin, end

    def compute_end_s(self, begin_s: float, seconds: float) -> float:
        """When a call ends that takes ``seconds`` with no copy beside it."""
        now, left = begin_s, seconds
        for begin, end in self._busy(begin_s):
            alone = max(begin - now, 0.0)
            if left <= alone:
                break
            left, now = left - alone, max(begin, now)
            beside = (end - now) / self.link.slowdown
            if left <= beside:
                return now + left * self.link.slowdown
            left, now = left - beside, end
        return now + left

    def _busy(self, after_s: float) -> list[tuple[float, float]]:
        """Stretches of time with copies, from ``after_s`` on."""
        self.copies = [c for c in self.copies if c[1] > after_s]
        merged: list[tuple[float, float]] = []
        for begin, end in sorted(self.copies):
            if merged and begin <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((begin, end))
        return merged


def replay(
    program: Program,
    seconds: Sequence[float],
    sweep: Sweep,
    moves: Sequence[Move] = (),
    link: MeasuredLink | None = None,
) -> Timeline:
    """Predict when each call and each copy runs.

    Args:
        program: the calls.
        seconds: of each.
        sweep: of the program with ``moves``.
        moves: what travels.
        link: how fast; needed if anything moves.

    Returns:
        Events in the order in which they are issued: copies right before the call that
        follows them.
    """
    events: list[Event] = []
    lanes = _Lanes(link) if link is not None else None
    names = {m.storage: program.line.joint.storages.owner[m.storage].name for m in moves}
    stage_of = program.line.stage_of
    copied: dict[int, float] = {}
    back: dict[int, float] = {}
    now, held = 0.0, 0

    def issue(move: Move, lane: Lane, ready_s: float) -> float:
        assert lanes is not None
        begin, end = lanes.copy(move.nbytes, lane, ready_s=ready_s)
        stage = stage_of.get(program.line.joint.storages.owner[move.storage], 0)
        what = Copy(names[move.storage], stage, move.nbytes)
        events.append(Event(what, begin, end, held, held, lane))
        return end

    for index, call in enumerate(program.calls):
        begin_s = now
        for move in moves:
            if move.offload == index:
                copied[move.storage] = issue(move, Lane.D2H, now)
        released = [copied[m.storage] for m in moves if m.release == index]
        now = max([now, *released])
        memory_s = now - begin_s
        for move in sorted(moves, key=lambda m: m.wait):
            if move.prefetch == index:
                ready_s = max(now, copied[move.storage])
                back[move.storage] = issue(move, Lane.H2D, ready_s)
        whole_s = max([now, *(back[m.storage] for m in moves if m.wait == index)])
        idle = Idle(memory_s=memory_s, data_s=whole_s - now)
        now = whole_s
        end_s = now + seconds[index]
        if lanes is not None:
            end_s = lanes.compute_end_s(now, seconds[index])
        held = sweep.held_bytes[index]
        peak = sweep.peaks_bytes[index]
        events.append(Event(call.op, now, end_s, peak, held, Lane.COMPUTE, idle))
        now = end_s
    return Timeline(tuple(events))
