"""When the calls of a decision run, and the copies of its moves beside them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from fxremat.ir import Copy, Event, Idle, Lane, MeasuredLink, Move, Timeline
from fxremat.passes.stages.linearize import Line
from fxremat.planner.evaluation import Evaluation

_NO_WAIT = Idle()


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
    evaluation: Evaluation,
    line: Line,
    moves: Sequence[Move] = (),
    link: MeasuredLink | None = None,
) -> Timeline:
    """Predict when each call and each copy runs.

    Args:
        evaluation: of a decision with ``moves``.
        line: what it is one of.
        moves: what travels.
        link: how fast; needed if anything moves.

    Returns:
        Events in the order in which they are issued: copies right before the call that
        follows them.
    """
    assert link is not None or not moves
    events: list[Event] = []
    _Replay(evaluation, line, link, _by_place(moves), events).run()
    return Timeline(tuple(events))


def makespan_s(
    evaluation: Evaluation, line: Line, moves: Sequence[Move], link: MeasuredLink
) -> float:
    """Seconds of :func:`replay`."""
    return _Replay(evaluation, line, link, _by_place(moves)).run()


@dataclass(frozen=True, slots=True)
class _Places:
    """What happens right before a call."""

    offload: list[Move] = field(default_factory=list)
    release: list[Move] = field(default_factory=list)
    prefetch: list[Move] = field(default_factory=list)
    wait: list[Move] = field(default_factory=list)


def _by_place(moves: Sequence[Move]) -> dict[int, _Places]:
    places: dict[int, _Places] = defaultdict(_Places)
    for move in moves:
        places[move.offload].offload.append(move)
        places[move.release].release.append(move)
        places[move.wait].wait.append(move)
    for move in sorted(moves, key=lambda m: m.wait):
        places[move.prefetch].prefetch.append(move)
    return places


@dataclass(slots=True)
class _Replay:
    evaluation: Evaluation
    line: Line
    link: MeasuredLink | None
    places: dict[int, _Places]
    events: list[Event] | None = None
    copied_s: dict[int, float] = field(default_factory=dict)
    back_s: dict[int, float] = field(default_factory=dict)

    def run(self) -> float:
        """Note all events, if there is a list for them; returns when the last ends."""
        lanes = None if self.link is None else _Lanes(self.link)
        now = 0.0
        for index, op in enumerate(self.evaluation.ops):
            idle = _NO_WAIT
            if index in self.places and lanes is not None:
                now, idle = self._transfer(lanes, self.places[index], index, now)
            end_s = now + self.evaluation.seconds[index]
            if lanes is not None:
                end_s = lanes.compute_end_s(now, self.evaluation.seconds[index])
            if self.events is not None:
                peak, held = self.evaluation.peaks_bytes[index], self.evaluation.held_bytes[index]
                self.events.append(Event(op, now, end_s, peak, held, Lane.COMPUTE, idle))
            now = end_s
        return max([now, *self.copied_s.values(), *self.back_s.values()])

    def _transfer(self, lanes: _Lanes, here: _Places, index: int, now: float) -> tuple[float, Idle]:
        """Issue the copies at a place; returns when the call there can begin."""
        for move in here.offload:
            self.copied_s[move.storage] = self._issue(lanes, move, Lane.D2H, index, now)
        # Whoever computes makes the calls, of an offload where it starts, of a prefetch where
        # it is awaited.
        now += lanes.link.offload_call_s * len(here.offload)
        now += lanes.link.prefetch_call_s * len(here.wait)
        free_s = max([now, *(self.copied_s[m.storage] for m in here.release)])
        for move in here.prefetch:
            ready_s = max(free_s, self.copied_s[move.storage])
            self.back_s[move.storage] = self._issue(lanes, move, Lane.H2D, index, ready_s)
        whole_s = max([free_s, *(self.back_s[m.storage] for m in here.wait)])
        return whole_s, Idle(memory_s=free_s - now, data_s=whole_s - free_s)

    def _issue(self, lanes: _Lanes, move: Move, lane: Lane, index: int, ready_s: float) -> float:
        begin, end = lanes.copy(move.nbytes, lane, ready_s=ready_s)
        if self.events is None:
            return end
        line = self.line
        owner = line.joint.storages.owner[move.storage]
        what = Copy(owner.name, line.stage_of.get(owner, 0), move.nbytes)
        held = self.evaluation.held_bytes[index - 1] if index else 0
        self.events.append(Event(what, begin, end, held, held, lane))
        return end
