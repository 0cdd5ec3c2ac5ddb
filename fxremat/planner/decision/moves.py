"""Storages that travel to host memory across the loss point: which, when, and how long it takes.

Which calls need a storage to be away depends only on bytes, so the peak of a plan does not depend
on the speed of the link, only its time does. A storage leaves before the first call that lacks
room, and comes back as soon as no call before its next reader lacks room. The storage that is read
last goes first, because it has the most time to travel.
"""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from fxremat.ir import Copy, Event, Idle, Lane, MeasuredLink, Move, Timeline
from fxremat.jit import entry
from fxremat.passes.emit.early import Early
from fxremat.passes.joint.graph import JointGraph
from fxremat.passes.stages.linearize import Line
from fxremat.planner.decision.candidates import AcrossTurn, Evaluation
from fxremat.runtime.slots import slot_bytes

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Movable:
    """Storages of an evaluated schedule that may be in host memory between forward and backward.

    Attributes:
        evaluation: the evaluation with everything on the device.
        lives: the storages, the one that is read again last first, small ones after all others.
        forced: ids of storages that are offloaded whatever the budget.
    """

    evaluation: Evaluation
    lives: tuple[AcrossTurn, ...]
    forced: frozenset[int] = frozenset()

    @staticmethod
    def of(
        evaluation: Evaluation,
        fixed: frozenset[int],
        small_share: float,
        forced: frozenset[int] = frozenset(),
    ) -> Movable:
        """Return the storages of ``evaluation.lives`` that may be offloaded: all but ``fixed``.

        Args:
            evaluation: the evaluation with everything on the device.
            fixed: ids of storages that stay on the device.
            small_share: storages of at most this share of all selected bytes are offloaded only if
                larger ones are not enough.
            forced: ids of storages that are offloaded in any case.
        """
        lives = [life for life in evaluation.lives if life.storage not in fixed]
        small_bytes = small_share * sum(life.nbytes for life in lives)
        lives.sort(key=lambda x: (x.nbytes <= small_bytes, -x.next, x.last, x.storage))
        return Movable(evaluation, tuple(lives), forced)

    @property
    def least_bytes(self) -> int:
        """Peak bytes on the device if every storage is in host memory for as long as possible."""
        loss_point_bytes = self.evaluation.loss_point_bytes - sum(
            life.nbytes for life in self.lives
        )
        spans = ((life.last + 1, life.next, life.nbytes) for life in self.lives)
        away = away_bytes(self.evaluation, spans)
        calls = [n - gone for n, gone in zip(self.evaluation.peaks_bytes, away, strict=True)]
        return max(loss_point_bytes, self.evaluation.end_bytes, *calls)

    def moves(self, budget_bytes: int, host_bytes: int | None = None) -> tuple[Move, ...] | None:
        """Return the offloads that bring the peak within ``budget_bytes``, or ``None`` if none do.

        Args:
            budget_bytes: limit on the peak of device memory.
            host_bytes: limit on host memory; ``None``: no limit.

        Ensures: no storage is offloaded that does not have to be, or is ``forced``, and none for
            longer than that.
        """
        away = self._away(budget_bytes)
        if away is None:
            return None
        # At the loss point all of them are on the host.
        if (
            host_bytes is not None
            and sum(slot_bytes(self.lives[i].nbytes) for i in away) > host_bytes
        ):
            return None
        loss_point = self.evaluation.loss_point
        chosen = [(self.lives[i], *span) for i, span in away.items()]
        return tuple(
            Move(
                storage=life.storage,
                nbytes=life.nbytes,
                nodes=life.nodes,
                offload=life.last + 1,
                release=min(begin, loss_point),
                prefetch=max(end, loss_point),
                wait=life.next,
            )
            for life, begin, end in sorted(chosen, key=lambda x: (x[0].last, x[0].storage))
        )

    def _away(self, budget_bytes: int) -> dict[int, tuple[int, int]] | None:
        """Return when each offloaded storage is on the host; ``None`` if the budget is not met.

        The result has, by index in :attr:`lives`, a first call and the call after the last. All
        these storages are on the host at the loss point, between forward and backward.
        """
        if self.evaluation.end_bytes > budget_bytes:
            return None
        lives, instants, by_bytes, forced = self._arrays
        budget_bytes = min(budget_bytes, int(instants.max()))  # which may be beyond all memory
        is_away = forced.copy()
        spans = np.full((2, len(is_away)), self.evaluation.loss_point, dtype=np.int64)
        if not _make_room(budget_bytes, instants, by_bytes, lives, spans, is_away):
            return None
        begins, ends = spans.tolist()
        return {i: (begins[i], ends[i]) for i in np.flatnonzero(is_away).tolist()}

    @functools.cached_property
    def _arrays(self) -> tuple[Ints, Ints, Ints, Bools]:
        """Arrays for :func:`_make_room`: lives, instants, their order, and which are forced."""
        lives = np.array([(x.last, x.next, x.nbytes) for x in self.lives], dtype=np.int64)
        instants = np.array([self.evaluation.loss_point_bytes, *self.evaluation.peaks_bytes])
        by_bytes = np.argsort(-instants, kind="stable")
        forced = np.array([x.storage in self.forced for x in self.lives], dtype=np.bool_)
        return np.ascontiguousarray(lives.reshape(-1, 3).T), instants, by_bytes, forced


@entry
def _make_room(
    budget_bytes: int, instants: Ints, by_bytes: Ints, lives: Ints, spans: Ints, is_away: Bools
) -> bool:
    """Offload storages until no instant exceeds a budget; return whether that is possible.

    Args:
        budget_bytes: limit on the bytes of every instant.
        instants: bytes of the loss point, then of each call, if nothing were offloaded.
        by_bytes: the instants with most bytes first.
        lives: for each storage, in three rows, the last call before the loss point that uses it,
            the first one after it, and its bytes.
        spans: for each storage, in two rows, its first call on the host and the call after its
            last, both the loss point at the beginning; extended in place.
        is_away: for each storage whether it is offloaded; extended in place.
    """
    last, following, nbytes = lives[0], lives[1], lives[2]
    begins, ends = spans[0], spans[1]
    for instant in by_bytes:
        missing, call = instants[instant] - budget_bytes, instant - 1
        if missing <= 0:
            return True
        for i in range(is_away.size):
            if is_away[i] and (call < 0 or begins[i] <= call < ends[i]):
                missing -= nbytes[i]
        # Storages that travel anyway come first: being away longer takes no more copies.
        for travels in (True, False):
            for i in range(is_away.size):
                if missing <= 0:
                    break
                if is_away[i] != travels:
                    continue
                is_gone = begins[i] <= call < ends[i] if call >= 0 else is_away[i]
                may_leave = call < 0 or last[i] < call < following[i]
                if is_gone or not may_leave:
                    continue
                is_away[i] = True
                if call >= 0:
                    begins[i], ends[i] = min(begins[i], call), max(ends[i], call + 1)
                missing -= nbytes[i]
        if missing > 0:
            return False
    return True


def away_bytes(evaluation: Evaluation, spans: Iterable[tuple[int, int, int]]) -> list[int]:
    """Return the bytes that are in host memory, not on the device, during each call.

    ``spans`` has, for each offloaded storage, its first call on the host, the call after its last,
    and its bytes.
    """
    changes = [0] * (len(evaluation.peaks_bytes) + 1)
    for begin, end, nbytes in spans:
        changes[begin] += nbytes
        changes[end] -= nbytes
    return list(accumulate(changes[:-1]))


def moved(evaluation: Evaluation, moves: Sequence[Move]) -> Evaluation:
    """Return ``evaluation`` less the bytes that ``moves`` offload during each call.

    ``evaluation`` has everything on the device. Seconds are not changed.
    """
    spans = ((move.release, move.prefetch, move.nbytes) for move in moves)
    away = away_bytes(evaluation, spans)
    return replace(
        evaluation,
        peaks_bytes=tuple(map(operator.sub, evaluation.peaks_bytes, away)),
        held_bytes=tuple(map(operator.sub, evaluation.held_bytes, away)),
        loss_point_bytes=evaluation.loss_point_bytes - sum(m.nbytes for m in moves),
    )


def conv_inputs(joint: JointGraph) -> frozenset[int]:
    """Return ids of the storages that a convolution or a pooling of the forward reads.

    This is the policy of Hascoet et al., "Reducing the memory cost of training convolutional neural
    networks by CPU offloading": these storages are large, and their operations run long enough to
    hide the copies.
    """
    read = (n for node in joint.forward if _slides(node) for n in node.all_input_nodes)
    return joint.storages.of(read)


def _slides(node: fx.Node) -> bool:
    """Return whether ``node`` is a convolution or a pooling, by the name of its operator."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    name = str(node.target)
    return "conv" in name or "pool" in name


_NO_WAIT = Idle()


@dataclass(slots=True)
class _Lanes:
    """When copies between device and host run: one at a time in each direction, in order of issue.

    If ``link.shared`` is set, there is only one at a time in all. The times of a copy are known
    when it is issued: later copies cannot delay it.
    """

    link: MeasuredLink
    free_s: dict[Lane, float] = field(default_factory=dict)
    copies: list[tuple[float, float]] = field(default_factory=list)

    def copy(self, nbytes: int, lane: Lane, *, ready_s: float) -> tuple[float, float]:
        """Issue a copy that can begin at ``ready_s``; return the times of its begin and end."""
        rate = self.link.offload_bytes_per_s if lane is Lane.D2H else self.link.prefetch_bytes_per_s
        queue = Lane.D2H if self.link.shared else lane
        begin = max(ready_s, self.free_s.get(queue, 0.0))
        end = begin + nbytes / rate
        self.free_s[queue] = end
        self.copies.append((begin, end))
        return begin, end

    def compute_end_s(self, begin_s: float, seconds: float) -> float:
        """Return when a call ends that begins at ``begin_s``, slowed down while copies run.

        ``seconds`` is what the call takes without copies.
        """
        now, left = begin_s, seconds
        for begin, end in self._busy(begin_s):
            before_s = max(begin - now, 0.0)
            if left <= before_s:
                break
            left, now = left - before_s, max(begin, now)
            during_s = (end - now) / self.link.slowdown
            if left <= during_s:
                return now + left * self.link.slowdown
            left, now = left - during_s, end
        return now + left

    def _busy(self, after_s: float) -> list[tuple[float, float]]:
        """Return ``(begin, end)`` of copies that end after ``after_s``, overlapping ones merged.

        Earlier copies are forgotten.
        """
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
    early: Sequence[Early] = (),
) -> Timeline:
    """Return the predicted times of each call of ``evaluation`` and of each copy of ``moves``.

    Copies of parameters that start ``early`` take no time of the calls that read them.

    The events are in the order in which they are issued: copies come right before the call that
    follows them. ``link`` is required if there are transfers.
    """
    assert link is not None or not (moves or early)
    events: list[Event] = []
    _Replay(evaluation, line, link, _by_place(moves, early), events).run()
    return Timeline(tuple(events))


def makespan_s(
    evaluation: Evaluation, line: Line, moves: Sequence[Move], link: MeasuredLink
) -> float:
    """Return the predicted seconds of a step: when the last event of :func:`replay` ends."""
    return _Replay(evaluation, line, link, _by_place(moves)).run()


@dataclass(frozen=True, slots=True)
class _Places:
    """What is offloaded, released, prefetched or awaited right before one call.

    ``start`` and ``due`` are copies of parameters that start early.
    """

    offload: list[Move] = field(default_factory=list)
    release: list[Move] = field(default_factory=list)
    prefetch: list[Move] = field(default_factory=list)
    wait: list[Move] = field(default_factory=list)
    start: list[Early] = field(default_factory=list)
    due: list[Early] = field(default_factory=list)


def _by_place(moves: Sequence[Move], early: Sequence[Early] = ()) -> dict[int, _Places]:
    places: dict[int, _Places] = defaultdict(_Places)
    for move in moves:
        places[move.offload].offload.append(move)
        places[move.release].release.append(move)
        places[move.wait].wait.append(move)
    for move in sorted(moves, key=lambda m: m.wait):
        places[move.prefetch].prefetch.append(move)
    for own in early:
        places[own.begin].start.append(own)
        places[own.call].due.append(own)
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
    early_s: dict[Early, float] = field(default_factory=dict)

    def run(self) -> float:
        """Simulate the step, and return when its last event ends.

        All events are appended to :attr:`events` unless that is ``None``.
        """
        lanes = None if self.link is None else _Lanes(self.link)
        now = 0.0
        for index, op in enumerate(self.evaluation.ops):
            idle = _NO_WAIT
            if index in self.places and lanes is not None:
                now, idle = self._transfer(lanes, self.places[index], index, now)
            seconds = self.evaluation.seconds[index]
            end_s = now + seconds
            if lanes is not None:
                due = self.places[index].due if index in self.places else ()
                copied_bytes = sum([own.nbytes for own in due])
                seconds = max(0.0, seconds - copied_bytes / lanes.link.prefetch_bytes_per_s)
                end_s = lanes.compute_end_s(now, seconds)
            if self.events is not None:
                peak, held = self.evaluation.peaks_bytes[index], self.evaluation.held_bytes[index]
                self.events.append(Event(op, now, end_s, peak, held, Lane.COMPUTE, idle))
            now = end_s
        return max([now, *self.copied_s.values(), *self.back_s.values()])

    def _transfer(self, lanes: _Lanes, here: _Places, index: int, now: float) -> tuple[float, Idle]:
        """Issue the copies before call ``index``; return when it can begin, and idle seconds.

        ``now`` is when the previous call ended.
        """
        for move in here.offload:
            self.copied_s[move.storage] = self._issue(lanes, move, Lane.D2H, index, now)
        # The computing thread launches copies: an offload when it starts, a prefetch when it is
        # awaited.
        now += lanes.link.offload_call_s * len(here.offload)
        now += lanes.link.prefetch_call_s * (len(here.wait) + len(here.due))
        free_s = max([now, *(self.copied_s[m.storage] for m in here.release)])
        for move in here.prefetch:
            ready_s = max(free_s, self.copied_s[move.storage])
            self.back_s[move.storage] = self._issue(lanes, move, Lane.H2D, index, ready_s)
        for own in here.start:
            self.early_s[own] = self._start(lanes, own, index, free_s)
        awaited = [self.back_s[m.storage] for m in here.wait]
        whole_s = max([free_s, *awaited, *(self.early_s[own] for own in here.due)])
        return whole_s, Idle(memory_s=free_s - now, data_s=whole_s - free_s)

    def _issue(self, lanes: _Lanes, move: Move, lane: Lane, index: int, ready_s: float) -> float:
        begin, end = lanes.copy(move.nbytes, lane, ready_s=ready_s)
        owner = self.line.joint.storages.owner[move.storage]
        self._record(owner, move.nbytes, lane, index, (begin, end))
        return end

    def _start(self, lanes: _Lanes, early: Early, index: int, ready_s: float) -> float:
        begin, end = lanes.copy(early.nbytes, Lane.H2D, ready_s=ready_s)
        self._record(early.node, early.nbytes, Lane.H2D, index, (begin, end))
        return end

    def _record(
        self, node: fx.Node, nbytes: int, lane: Lane, index: int, times: tuple[float, float]
    ) -> None:
        if self.events is not None:
            what = Copy(node.name, self.line.stage_of.get(node, 0), nbytes)
            held = self.evaluation.held_bytes[index - 1] if index else 0
            self.events.append(Event(what, *times, held, held, lane))
