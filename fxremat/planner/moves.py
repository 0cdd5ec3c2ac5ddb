"""Storages that travel to host memory over the turn: which, when, and how long that takes.

Which calls need a storage away is a matter of bytes alone, so a plan's peak does not depend
on how fast the link is; only its time does. A storage that is away over the turn leaves
before the first call that lacks room, and comes back as soon as no call before its next
reader lacks any. What is read again last goes first: it has most time to travel.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import fx

from fxremat.ir import Copy, Event, Idle, Lane, MeasuredLink, Move, Timeline
from fxremat.passes.joint.graph import JointGraph
from fxremat.passes.stages.linearize import Line
from fxremat.planner.candidates import AcrossTurn, Evaluation
from fxremat.runtime.slots import slot_bytes

SMALL_SHARE = 1 / 256
"""Storages up to this share of all that could travel only do where larger ones are not enough:
each transfer takes some time, however little it moves."""


@dataclass(frozen=True, slots=True)
class Movable:
    """What could be away over the turn of a decision.

    Attributes:
        evaluation: of the decision, everything on the device.
        lives: storages, the one that is read again last first, small ones after all others.
        forced: those of them that are away whatever the budget.
    """

    evaluation: Evaluation
    lives: tuple[AcrossTurn, ...]
    forced: frozenset[int] = frozenset()

    @staticmethod
    def of(
        evaluation: Evaluation, fixed: frozenset[int], forced: frozenset[int] = frozenset()
    ) -> Movable:
        """Return the storages that cross the turn in ``evaluation``, but for ``fixed`` ones."""
        lives = [life for life in evaluation.lives if life.storage not in fixed]
        small_bytes = SMALL_SHARE * sum(life.nbytes for life in lives)
        lives.sort(key=lambda x: (x.nbytes <= small_bytes, -x.next, x.last, x.storage))
        return Movable(evaluation, tuple(lives), forced)

    @property
    def least_bytes(self) -> int:
        """The least peak that moving can lead to."""
        turn_bytes = self.evaluation.turn_bytes - sum(life.nbytes for life in self.lives)
        spans = ((life.last + 1, life.next, life.nbytes) for life in self.lives)
        away = away_bytes(self.evaluation, spans)
        calls = [n - gone for n, gone in zip(self.evaluation.peaks_bytes, away, strict=True)]
        return max(turn_bytes, self.evaluation.end_bytes, *calls)

    def moves(self, budget_bytes: int, host_bytes: int | None = None) -> tuple[Move, ...] | None:
        """What to move so that the peak is within ``budget_bytes``, ``None`` if nothing does.

        Args:
            budget_bytes: what the peak may reach.
            host_bytes: most bytes on the host; ``None``: as many as it takes.

        Ensures: no storage is away that does not have to be, or is ``forced``, and none longer than
            that.
        """
        away = self._away(budget_bytes)
        if away is None:
            return None
        # All of them are there at once, at the turn.
        if (
            host_bytes is not None
            and sum(slot_bytes(self.lives[i].nbytes) for i in away) > host_bytes
        ):
            return None
        turn = self.evaluation.turn
        chosen = [(self.lives[i], *span) for i, span in away.items()]
        return tuple(
            Move(
                storage=life.storage,
                nbytes=life.nbytes,
                nodes=life.nodes,
                offload=life.last + 1,
                release=min(begin, turn),
                prefetch=max(end, turn),
                wait=life.next,
            )
            for life, begin, end in sorted(chosen, key=lambda x: (x[0].last, x[0].storage))
        )

    def _away(self, budget_bytes: int) -> dict[int, tuple[int, int]] | None:
        """For each storage to move, by its place, the calls ``[begin, end)`` while it is away.

        The turn lies within: who is away at all is away then.
        """
        if self.evaluation.end_bytes > budget_bytes:
            return None
        turn = self.evaluation.turn
        away = {i: (turn, turn) for i, own in enumerate(self.lives) if own.storage in self.forced}
        instants: list[tuple[int, int | None]] = [(self.evaluation.turn_bytes, None)]
        instants.extend((nbytes, i) for i, nbytes in enumerate(self.evaluation.peaks_bytes))
        for nbytes, call in sorted(instants, key=lambda x: -x[0]):
            if nbytes <= budget_bytes:
                break
            if not self._make_room(nbytes - budget_bytes, call, away):
                return None
        return away

    def _make_room(
        self, missing_bytes: int, call: int | None, away: dict[int, tuple[int, int]]
    ) -> bool:
        """Send storages away until ``call`` (the turn, if None) has room."""
        turn = self.evaluation.turn
        for i, (begin, end) in away.items():
            if call is None or begin <= call < end:
                missing_bytes -= self.lives[i].nbytes
        if missing_bytes <= 0:
            return True
        # Those on the move anyway first: being away for longer takes no more copies.
        places = range(len(self.lives))
        for i in [*(i for i in places if i in away), *(i for i in places if i not in away)]:
            life, (begin, end) = self.lives[i], away.get(i, (turn, turn))
            there = begin <= call < end if call is not None else i in away
            free = call is None or life.last < call < life.next
            if there or not free:
                continue
            away[i] = (begin, end) if call is None else (min(begin, call), max(end, call + 1))
            missing_bytes -= life.nbytes
            if missing_bytes <= 0:
                return True
        return False


def away_bytes(evaluation: Evaluation, spans: Iterable[tuple[int, int, int]]) -> list[int]:
    """Bytes that are away during each call.

    Args:
        evaluation: of the calls.
        spans: the first call, the call after the last, and bytes.
    """
    changes = [0] * (len(evaluation.peaks_bytes) + 1)
    for begin, end, nbytes in spans:
        changes[begin] += nbytes
        changes[end] -= nbytes
    return list(accumulate(changes[:-1]))


def moved(evaluation: Evaluation, moves: Sequence[Move]) -> Evaluation:
    """The memory of a decision whose storages travel, from what it is when they stay.

    Args:
        evaluation: with everything on the device.
        moves: what travels.
    """
    spans = ((move.release, move.prefetch, move.nbytes) for move in moves)
    away = away_bytes(evaluation, spans)
    return replace(
        evaluation,
        peaks_bytes=tuple(map(operator.sub, evaluation.peaks_bytes, away)),
        held_bytes=tuple(map(operator.sub, evaluation.held_bytes, away)),
        turn_bytes=evaluation.turn_bytes - sum(m.nbytes for m in moves),
    )


def conv_inputs(joint: JointGraph) -> frozenset[int]:
    """Storages that a convolution or a pooling of the forward reads.

    The policy of Hascoet et al., "Reducing the memory cost of training convolutional neural
    networks by CPU offloading": they are large, and take long enough to be copied beside.
    """
    read = (n for node in joint.forward if _slides(node) for n in node.all_input_nodes)
    return joint.storages.of(read)


def _slides(node: fx.Node) -> bool:
    """Whether ``node`` moves a window over its input."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    name = str(node.target)
    return "conv" in name or "pool" in name


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
