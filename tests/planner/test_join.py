"""Graphs of joins: the same bits and the expected peak in whatever order branches go back."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from fxremat.errors import ScheduleError
from fxremat.ir import Backward, Compute, Forward, JoinProblem, Keep, Schedule
from fxremat.ir.schedule import coded, decoded
from fxremat.passes.emit.program import Program
from fxremat.passes.stages.linearize import Line
from fxremat.passes.stages.order import any_order, check_draws
from fxremat.planner.search.generators import chain_schedules
from fxremat.planner.search.join import (
    Branching,
    branchings_of,
    build_join,
    build_join_costs,
    equivalent_schedules,
    in_graph_order,
    join_schedules,
)
from fxremat.planner.search.search import Search
from tests.harness import (
    Captured,
    capture,
    captured,
    measured_peak_bytes,
    random_schedule,
    run_emitted,
    run_traced,
    search_of,
    searched,
)
from tests.models.bits import assert_bitwise_equal
from tests.passes.test_branches import JOINS, NESTED, Fused
from tests.reference.join_units import least_slots
from tests.reference.simulate.join import simulate
from tests.unit_joins import (
    budget_bytes,
    captured_join,
    counted_steps,
    optimal_steps,
    unit_search,
)

every_join = pytest.mark.parametrize("name", JOINS)
seeds = pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))]
)


def shifted(schedule: Schedule, first: int) -> list[Compute]:
    moved: list[Compute] = []
    for op in schedule.computations:
        stage = op.stage + first
        moved.append(Forward(stage, op.keep) if isinstance(op, Forward) else Backward(stage))
    return moved


def random_join_schedule(line: Line, seed: int, branching: Branching | None = None) -> Schedule:
    """Branches forward in the order of the graph, and back in any: stage by stage at random."""
    branching = branching or branchings_of(line)[0]
    draw = random.Random(seed)
    before: list[Compute] = []
    after: list[list[Compute]] = []
    for first, end in pairwise((0, *branching.ends)):
        ops = shifted(random_schedule(end - first, draw.randrange(1000)), first)
        loss_point = next(i for i, op in enumerate(ops) if isinstance(op, Backward))
        before += ops[:loss_point]
        after.append(ops[loss_point:])
    start = branching.ends[-1]
    trunk = shifted(random_schedule(len(line.stages) - start, draw.randrange(1000)), start)
    mixed: list[Compute] = []
    while any(after):
        mixed.append(draw.choice([ops for ops in after if ops]).pop(0))
    return ordered(line, branching.on_line(Schedule((*before, *trunk, *mixed))))


def ordered(line: Line, schedule: Schedule) -> Schedule:
    """With the forwards in the order of the graph."""
    segment = np.array([line.segments.at(stage) for stage in range(len(line.stages))])
    return decoded(in_graph_order(segment, coded(schedule)))


def check(step: Captured, program: Program) -> None:
    """The same bits at the peak that was foretold."""
    assert_bitwise_equal(vars(run_emitted(step, program)), vars(run_traced(step)))
    assert measured_peak_bytes(step, program) == step.sweep(program).peak_bytes


@every_join
@seeds
def test_any_order_back_gives_the_same_bits_at_the_expected_peak(name: str, seed: int):
    step = captured(name, input_gradients=True)
    program = step.program(random_join_schedule(step.measured.line, seed))
    check(step, program)


@pytest.mark.parametrize("name", NESTED)
@seeds
def test_branches_of_branches_go_back_in_any_order_too(name: str, seed: int):
    step = captured(name, input_gradients=True)
    line = step.measured.line
    outer, inner = branchings_of(line)
    assert len(outer.ends) == JOINS[name] < len(inner.ends)
    program = step.program(random_join_schedule(line, seed, inner))
    check(step, program)


def test_branches_of_branches_that_draw_nothing_run_forward_in_any_order():
    step = capture(Fused(), tuple(torch.randn(32, 16, requires_grad=True) for _ in range(3)))
    line = step.measured.line
    assert line.segments.depth == 2
    assert any_order(line)
    search = searched(step, generators=(join_schedules,))
    found = list(join_schedules(search.setting))
    schedules = list(map(decoded, found))
    assert any(ordered(line, schedule) != schedule for schedule in schedules)
    for codes in found[:: max(len(found) // 12, 1)]:
        check(step, search.evaluator.program(search.evaluator.candidate(codes)))


@pytest.mark.parametrize("name", ["siamese", "hf_clip", "two_texts"])
def test_branches_that_draw_nothing_run_forward_in_any_order(name: str):
    step = captured(name)
    line = step.measured.line
    assert any_order(line)
    schedule = random_join_schedule(line, 0)
    ops = schedule.computations
    start = next(i for i, op in enumerate(ops) if op.stage >= line.branch_ends[-1])
    middle = line.branch_ends[0]
    swapped = [op for op in ops[:start] if op.stage >= middle]
    swapped += [op for op in ops[:start] if op.stage < middle]
    other = Schedule((*swapped, *ops[start:]))
    assert ordered(line, other) == schedule
    program = step.program(other)
    check(step, program)


def test_draws_keep_their_order():
    line = captured("triplet").line
    assert not any_order(line)
    drawing = line.drawing
    ends = line.branch_ends
    assert drawing[0] < ends[0] < drawing[-1] < ends[-1]
    right = [Forward(stage, Keep.ALL) for stage in range(len(line.stages))]
    check_draws(line, right)
    with pytest.raises(ScheduleError, match="draws random numbers before"):
        check_draws(line, [*right[ends[0] :], *right[: ends[0]]])


def test_statistics_that_two_branches_move_keep_their_order():
    step = captured("siamese_resnet")
    line = step.measured.line
    assert not any_order(line)
    ops = random_join_schedule(line, 0).computations
    first = [op for op in ops if op.stage < line.branch_ends[0]]
    others = [op for op in ops if op.stage >= line.branch_ends[0]]
    with pytest.raises(ScheduleError):
        step.program(Schedule((*others[:-1], *first, others[-1])))


@pytest.fixture(scope="module", params=["siamese_resnet", "triplet", "image_recipe", "composed"])
def search(request: pytest.FixtureRequest) -> Search:
    return search_of(request.param)


def test_candidates_of_all_kinds_can_be_carried_out(search: Search):
    evaluator = search.evaluator
    for generator in (join_schedules, equivalent_schedules):
        found = {codes.tobytes(): codes for codes in generator(search.setting)}
        schedules = list(found.values())
        assert len(schedules) > 5
        for codes in schedules[:: max(len(schedules) // 5, 1)]:
            candidate = evaluator.candidate(codes)
            assert candidate.total_s >= search.baseline.total_s * (1 - 1e-9)
            assert evaluator.program(candidate).calls


def test_no_slower_than_the_line_nor_the_equivalent_chain(search: Search):
    for generator in (chain_schedules, equivalent_schedules, join_schedules):
        for codes in generator(search.setting):
            other = search.evaluator.candidate(codes)
            if other.peak_bytes < search.baseline.peak_bytes:
                assert search.least.peak_bytes <= other.peak_bytes
                assert search.fastest_within(other.peak_bytes).total_s <= other.total_s


def test_the_join_of_a_model_is_valid_and_close_to_what_is_evaluated(search: Search):
    line = search.measured.line
    branching = branchings_of(line)[0]
    join = build_join(search.chain, branching)
    costs = build_join_costs(search.costs, line, branching, search.setting.context_bytes)
    JoinProblem(join, costs, 0)  # validates
    assert [len(b) for b in join.branches] == [b - a for a, b in pairwise((0, *line.branch_ends))]
    for seed in range(5):
        schedule = random_join_schedule(line, seed)
        timeline = simulate(join, costs, schedule)
        peak_bytes = search.evaluator.candidate(coded(schedule)).peak_bytes
        modelled_bytes = max(event.peak_bytes for event in timeline.events)
        assert peak_bytes <= 1.1 * modelled_bytes


@pytest.mark.parametrize("lengths", [(6, 5), (5, 5, 5)])
def test_unit_joins_take_the_steps_of_the_paper(lengths: tuple[int, ...]):
    step = captured_join(lengths)
    assert len(step.line.branch_ends) == len(lengths)
    search = unit_search(step)
    for slots in range(least_slots(lengths), sum(lengths) + len(lengths) + 1, 2):
        chosen = search.fastest_within(budget_bytes(search, slots))
        program = search.evaluator.program(chosen)
        assert counted_steps(search, chosen).total() == optimal_steps(lengths, slots), slots
        assert measured_peak_bytes(step, program) <= budget_bytes(search, slots)
        assert_bitwise_equal(vars(run_emitted(step, program)), vars(run_traced(step)))
