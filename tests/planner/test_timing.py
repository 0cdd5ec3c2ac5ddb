"""Predicted times of calls and copies, against ones worked out by hand."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest

from fxremat.effort import USUAL
from fxremat.ir import Copy, Event, Lane, MeasuredLink, Move, Timeline
from fxremat.planner.decision.moves import Movable, moved, replay
from tests.harness import captured


@functools.cache
def whole() -> Movable:
    """Of a step that keeps everything; every call takes a second."""
    step = captured("gpt")
    evaluator, joint = step.evaluator(), step.joint
    evaluation = evaluator.evaluation(evaluator.keep_all())
    fixed = joint.storages.of((*joint.given, *joint.tangents, *step.line.pinned))
    found = Movable.of(evaluation, fixed, USUAL.small_share)
    return replace(found, evaluation=replace(evaluation, seconds=(1.0,) * len(evaluation.ops)))


def link(
    bytes_per_s: float, *, back_per_s: float = 0.0, shared: bool = False, slowdown: float = 1.0
) -> MeasuredLink:
    return MeasuredLink(bytes_per_s, back_per_s or bytes_per_s, bytes_per_s, slowdown, shared)


def timeline(moves: tuple[Move, ...], speed: MeasuredLink | None) -> Timeline:
    return replay(moved(whole().evaluation, moves), captured("gpt").line, moves, speed)


def one_move() -> Move:
    """The largest storage of the first call that has one, away as long as can be."""
    found = whole()
    life = min(found.lives, key=lambda x: (x.last, -x.nbytes))
    loss_point = found.evaluation.loss_point
    return Move(
        life.storage, life.nbytes, life.nodes, life.last + 1, loss_point, loss_point, life.next
    )


def copies(events: Timeline, lane: Lane) -> list[Event]:
    return [e for e in events.events if isinstance(e.op, Copy) and e.lane is lane]


def test_without_moves_calls_run_one_after_the_other():
    found = timeline((), None)
    count = len(whole().evaluation.ops)
    assert [e.start_s for e in found.events] == list(range(count))
    assert found.makespan_s == count
    assert found.peak_bytes == max(whole().evaluation.peaks_bytes)


def test_calls_of_transfers_take_time_however_fast_the_link():
    move = one_move()
    speed = replace(link(1e18), offload_call_s=0.25, prefetch_call_s=0.5)
    found = timeline((move,), speed)
    assert found.makespan_s == pytest.approx(len(whole().evaluation.ops) + 0.75)
    starts = [e.start_s for e in found.events if e.lane is Lane.COMPUTE]
    assert starts[move.offload] == pytest.approx(move.offload + 0.25)
    assert starts[move.wait] == pytest.approx(move.wait + 0.75)


def test_a_fast_link_costs_nothing():
    move = one_move()
    found = timeline((move,), link(1e15))
    assert found.makespan_s == pytest.approx(len(whole().evaluation.ops))
    assert found.idle.total_s == pytest.approx(0, abs=1e-6)


def test_the_step_waits_for_what_is_late():
    move = one_move()
    count, loss_point = len(whole().evaluation.ops), whole().evaluation.loss_point
    seconds = 100.0
    found = timeline((move,), link(move.nbytes / seconds))
    (away,), (back,) = copies(found, Lane.D2H), copies(found, Lane.H2D)
    assert (away.start_s, away.end_s) == (move.offload, move.offload + seconds)
    late_s = move.offload + seconds - loss_point
    assert found.idle.memory_s == pytest.approx(late_s)
    assert back.start_s == pytest.approx(loss_point + late_s)
    assert found.idle.data_s == pytest.approx(seconds - (move.wait - loss_point))
    assert found.makespan_s == pytest.approx(count + found.idle.total_s)


def test_copies_on_one_lane_queue_and_lanes_of_their_own_do_not():
    found = whole()
    loss_point = found.evaluation.loss_point
    moves = tuple(
        Move(x.storage, x.nbytes, x.nodes, x.last + 1, loss_point, loss_point, x.next)
        for x in sorted(found.lives, key=lambda x: (x.last, x.storage))
    )
    for shared in (False, True):
        speed = link(sum(m.nbytes for m in moves) / 50.0, shared=shared)
        events = timeline(moves, speed)
        lanes = [copies(events, Lane.D2H), copies(events, Lane.H2D)]
        assert all(len(lane) == len(moves) for lane in lanes)
        for lane in [lanes[0] + lanes[1]] if shared else lanes:
            for before, after in itertools.pairwise(lane):
                assert before.end_s <= after.start_s + 1e-9


def test_computing_is_slower_beside_copies():
    move = one_move()
    seconds = 2.0  # done long before the loss point
    found = timeline((move,), link(move.nbytes / seconds, back_per_s=1e15, slowdown=1.5))
    # Three seconds of computing take... two beside the copy are worth 2 / 1.5 alone.
    assert found.makespan_s == pytest.approx(len(whole().evaluation.ops) + 2.0 - 2.0 / 1.5)


def test_bytes_are_those_of_the_evaluation():
    move = one_move()
    found = whole()
    events = [e for e in timeline((move,), link(1e9)).events if not isinstance(e.op, Copy)]
    away = range(move.release, move.prefetch)
    for index, event in enumerate(events):
        less = move.nbytes if index in away else 0
        assert event.peak_bytes == found.evaluation.peaks_bytes[index] - less
