"""What travels, and when: bytes alone decide, and no reader finds its storage away."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.effort import USUAL
from fxremat.ir import Move
from fxremat.ir.schedule import coded
from fxremat.passes.emit.program import Program, keep_all
from fxremat.planner.decision.moves import Movable, conv_inputs, moved
from tests.harness import captured, periodic, random_schedule

NAMES = ("gpt", "resnet50", "unet")


@functools.cache
def movable(name: str, kind: str = "all") -> tuple[Movable, Program]:
    """What could be away, and the program that it is about."""
    step = captured(name)
    count = len(step.line.stages)
    schedules = {"all": keep_all(count), "periodic": periodic(count, 3)}
    schedule = schedules[kind] if kind in schedules else random_schedule(count, int(kind))
    evaluator, joint = step.evaluator(), step.joint
    evaluation = evaluator.evaluation(evaluator.candidate(coded(schedule)))
    fixed = joint.storages.of((*joint.given, *joint.tangents, *step.line.pinned))
    return Movable.of(evaluation, fixed, USUAL.small_share), step.program(schedule)


def readers(program: Program, storage: int) -> list[int]:
    """Calls that read or make ``storage``."""
    table = program.line.joint.storages
    return [
        index
        for index, call in enumerate(program.calls)
        if storage in call.block.reads | table.of(call.block.outputs)
    ]


def check_places(program: Program, moves: tuple[Move, ...]) -> None:
    loss_point = program.loss_point
    for move in moves:
        assert move.offload <= move.release <= loss_point <= move.prefetch <= move.wait
        used = readers(program, move.storage)
        assert max(i for i in used if i < loss_point) + 1 == move.offload
        assert min(i for i in used if i >= loss_point) == move.wait


kinds = pytest.mark.parametrize("kind", ["all", "periodic", "1", "2"])
models = pytest.mark.parametrize("name", NAMES)


@kinds
@models
def test_every_budget_down_to_the_least_is_kept(name: str, kind: str):
    found, program = movable(name, kind)
    least, full = found.least_bytes, found.evaluation.peak_bytes
    assert least < full if kind == "all" else least <= full
    for part in range(9):
        budget = least + (full - least) * part // 8
        moves = found.moves(budget)
        assert moves is not None
        check_places(program, moves)
        assert moved(found.evaluation, moves).peak_bytes <= budget
    assert found.moves(least - 1) is None
    assert found.moves(full) == ()
    assert kind != "all" or found.moves(least)


@models
def test_more_room_never_takes_more_of_the_host(name: str):
    found, _ = movable(name)
    least, full = found.least_bytes, found.evaluation.peak_bytes
    taken = []
    for part in range(17):
        moves = found.moves(least + (full - least) * part // 16)
        assert moves is not None
        taken.append(sum(move.nbytes for move in moves))
    assert taken == sorted(taken, reverse=True)
    assert taken[0] > 0


@models
def test_the_limit_of_the_host_is_kept(name: str):
    found, _ = movable(name)
    budget = (found.least_bytes + found.evaluation.peak_bytes) // 2
    moves = found.moves(budget)
    assert moves
    taken = sum(move.nbytes for move in moves)
    assert found.moves(budget, taken) == moves
    assert found.moves(budget, taken - 1) is None


def test_what_is_read_last_goes_first():
    found, _ = movable("gpt")
    peaks = found.evaluation.peaks_bytes
    fullest = peaks.index(max(peaks))
    moves = found.moves(max(peaks) - 1)
    assert moves
    free = [life for life in found.lives if life.last < fullest < life.next]
    assert [move.storage for move in moves] == [free[0].storage]
    large = [life for life in free if life.nbytes >= free[0].nbytes]
    assert free[0].next == max(life.next for life in large)


@given(st.data())
def test_random_memory_is_kept_within_any_budget(data: st.DataObject):
    """Memory is made up: peaks anywhere, not where a real step has them."""
    real, program = movable("gpt")
    count = len(real.evaluation.peaks_bytes)
    peaks = data.draw(st.lists(st.integers(0, 1 << 24), min_size=count, max_size=count))
    loss_point_bytes = data.draw(st.integers(0, 1 << 24))
    evaluation = replace(
        real.evaluation, peaks_bytes=tuple(peaks), loss_point_bytes=loss_point_bytes, end_bytes=0
    )
    found = replace(real, evaluation=evaluation)
    least, full = found.least_bytes, evaluation.peak_bytes
    budget = data.draw(st.integers(max(least, 0), max(full, least, 0)))
    moves = found.moves(budget)
    assert moves is not None
    check_places(program, moves)
    assert moved(evaluation, moves).peak_bytes <= budget
    assert least <= 0 or found.moves(least - 1) is None


def test_inputs_of_convolutions_and_poolings_travel():
    joint = captured("resnet50").joint
    table = joint.storages
    expected = set()
    for node in joint.forward:
        if str(node.target).startswith(("aten.convolution", "aten.max_pool")):
            expected |= table.of(node.all_input_nodes)
    found = conv_inputs(joint)
    assert found == expected
    assert len(found - table.of(joint.given)) > 20


def test_a_transformer_has_no_inputs_of_convolutions():
    assert not conv_inputs(captured("gpt").joint)


def away_simply(base: Movable, budget_bytes: int) -> dict[int, tuple[int, int]] | None:
    """When each storage is released and prefetched, one instant and one storage after another."""
    point = base.evaluation.loss_point
    away = {i: (point, point) for i, x in enumerate(base.lives) if x.storage in base.forced}
    instants = [(base.evaluation.loss_point_bytes, -1)]
    instants += [(nbytes, call) for call, nbytes in enumerate(base.evaluation.peaks_bytes)]

    def is_gone(i: int, call: int) -> bool:
        return i in away and (call < 0 or away[i][0] <= call < away[i][1])

    for nbytes, call in sorted(instants, key=lambda x: -x[0]):
        missing = nbytes - budget_bytes
        if missing <= 0:
            break
        missing -= sum(x.nbytes for i, x in enumerate(base.lives) if is_gone(i, call))
        for i in sorted(range(len(base.lives)), key=lambda i: i not in away):
            life = base.lives[i]
            if missing > 0 and not is_gone(i, call) and (call < 0 or life.last < call < life.next):
                begin, end = away.get(i, (point, point))
                away[i] = (begin, end) if call < 0 else (min(begin, call), max(end, call + 1))
                missing -= life.nbytes
        if missing > 0:
            return None
    if base.evaluation.end_bytes > budget_bytes:
        return None
    return {base.lives[i].storage: (min(b, point), max(e, point)) for i, (b, e) in away.items()}


@pytest.mark.parametrize("kind", ["all", "periodic", "7"])
@pytest.mark.parametrize("name", NAMES)
def test_loops_that_are_compiled_choose_what_simple_ones_do(name: str, kind: str):
    base, _program = movable(name, kind)
    for forced in (frozenset(), frozenset(x.storage for x in base.lives[::5])):
        base = replace(base, forced=forced)
        least, most = base.least_bytes, base.evaluation.peak_bytes
        for budget_bytes in range(least - 1, most, 1 + (most - least) // 50):
            moves = base.moves(budget_bytes)
            times = None if moves is None else {m.storage: (m.release, m.prefetch) for m in moves}
            assert times == away_simply(base, budget_bytes)
