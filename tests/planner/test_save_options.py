"""Save options: a Pareto set over bytes kept and seconds to rebuild, and what it means."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from ortools.sat.python import cp_model
from torch import nn

from fxremat.effort import USUAL, Effort
from fxremat.ir import Backward, Forward, Keep, Schedule
from fxremat.ir.schedule import coded
from fxremat.passes.stages.block import Mode
from fxremat.planner.decision import save_options as module
from fxremat.planner.decision.save_options import (
    Numbers,
    Operation,
    fastest_within,
    find_options,
    greedy_masks,
    search,
)
from fxremat.planner.search.evaluator import Evaluator
from tests.examples import examples
from tests.harness import capture, captured, run_emitted
from tests.models.bits import assert_bitwise_equal


@st.composite
def numbers(draw: st.DrawFn, *, most: int = 6) -> Numbers:
    """Operations that each make one storage, or two, from earlier ones."""
    count = draw(st.integers(1, most))
    made, operations = 0, []
    while made < count:
        several = min(draw(st.sampled_from([1, 1, 2])), count - made)
        makes = ((1 << several) - 1) << made
        reads = draw(st.integers(0, (1 << made) - 1))
        operations.append(Operation(makes, reads, draw(st.integers(0, 5)) / 4))
        made += several
    nbytes = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    return Numbers(tuple(nbytes), tuple(operations), draw(st.integers(0, (1 << count) - 1)))


def recomputed_s(given_numbers: Numbers, kept: int) -> float:
    """By fetching what is required, one storage after the other."""
    ran: set[int] = set()
    waiting = [i for i in range(len(given_numbers.nbytes)) if given_numbers.required >> i & 1]
    while waiting:
        bit = waiting.pop()
        if kept >> bit & 1:
            continue
        maker = next(k for k, o in enumerate(given_numbers.operations) if o.makes >> bit & 1)
        if maker not in ran:
            ran.add(maker)
            reads = given_numbers.operations[maker].reads
            waiting += [i for i in range(len(given_numbers.nbytes)) if reads >> i & 1]
    return sum(given_numbers.operations[k].seconds for k in ran)


@examples(10)
@given(numbers(), st.integers(0, 40))
def test_no_mask_within_the_limit_is_faster(given_numbers: Numbers, limit_bytes: int) -> None:
    """Within what CP-SAT tells apart: a millionth of the time of all."""
    found = fastest_within(given_numbers, limit_bytes, USUAL)
    masks = range(1 << len(given_numbers.nbytes))
    fitting = [m for m in masks if given_numbers.kept_bytes(m) <= limit_bytes]
    assert found in fitting
    assert given_numbers.seconds(found) == min(map(given_numbers.seconds, fitting))


@given(numbers())
def test_the_search_finds_the_pareto_set(given_numbers: Numbers):
    masks = range(1 << len(given_numbers.nbytes))
    for mask in masks:
        assert given_numbers.seconds(mask) == recomputed_s(given_numbers, mask)
    found = search(given_numbers, USUAL)
    points = [(given_numbers.kept_bytes(m), recomputed_s(given_numbers, m)) for m in found]
    assert points == sorted(points, reverse=True)
    assert all(a[1] < b[1] for a, b in itertools.pairwise(points))
    points.append((given_numbers.kept_bytes(given_numbers.required), 0.0))
    for mask in masks:
        nbytes, seconds = given_numbers.kept_bytes(mask), recomputed_s(given_numbers, mask)
        assert any(b <= nbytes and s <= seconds for b, s in points)


WORK = Effort(solve_work=60.0)
"""Proofs to the end, on a busy machine too."""


@examples(0.2)
@given(numbers(most=8))
@example(
    Numbers(
        nbytes=(0, 8, 1),
        operations=(Operation(1, 0, 0.25), Operation(2, 0, 0.0), Operation(4, 0, 0.25)),
        required=7,
    )
)
def test_cpsat_finds_points_of_the_same_set(given_numbers: Numbers):
    found = search(given_numbers, WORK)
    exact = [(given_numbers.kept_bytes(m), given_numbers.seconds(m)) for m in found]
    for mask in module._pareto(given_numbers, module._by_cpsat(given_numbers, WORK, cp_model)):
        nbytes, seconds = given_numbers.kept_bytes(mask), given_numbers.seconds(mask)
        best_s = min(s for b, s in exact if b <= nbytes)
        assert seconds == pytest.approx(best_s, abs=1e-5)


@given(numbers(most=8))
@example(Numbers(nbytes=(0, 0), operations=(Operation(3, 0, 0.0),), required=3))
def test_the_greedy_search_spans_the_curve_and_beats_nothing(given_numbers: Numbers):
    found = greedy_masks(given_numbers, USUAL)
    whole = (1 << len(given_numbers.nbytes)) - 1
    assert all(mask & ~whole == 0 for mask in found)
    points = [(given_numbers.kept_bytes(m), recomputed_s(given_numbers, m)) for m in found]
    assert min(nbytes for nbytes, _ in points) == 0
    assert any(
        mask & given_numbers.required == given_numbers.required
        and given_numbers.kept_bytes(mask) == given_numbers.kept_bytes(given_numbers.required)
        for mask in found
    )
    exact = [(0, given_numbers.seconds(0))] + [
        (given_numbers.kept_bytes(m), given_numbers.seconds(m))
        for m in search(given_numbers, USUAL)
    ]
    exact.append((given_numbers.kept_bytes(given_numbers.required), 0.0))
    for nbytes, seconds in points:
        assert seconds >= min(s for b, s in exact if b <= nbytes)


def test_the_greedy_search_finds_what_is_dear_for_its_bytes():
    """Operations without inputs are a knapsack: short of the best by less than one of them."""
    draw = random.Random(0)
    alone = tuple(Operation(1 << i, 0, draw.random()) for i in range(40))
    many = Numbers(tuple(draw.randint(1, 100) for _ in alone), alone, (1 << 40) - 1)
    found = greedy_masks(many, USUAL)
    items = sorted(zip(alone, many.nbytes, strict=True), key=lambda x: -x[0].seconds / x[1])
    whole = sum(many.nbytes)
    for share in range(1, USUAL.save_options + 1):
        limit = whole * share // (USUAL.save_options + 1)
        room, spared = float(limit), 0.0
        for operation, nbytes in items:  # the last of them in part
            part = min(room / nbytes, 1.0)
            spared, room = spared + part * operation.seconds, room - part * nbytes
        least_s = many.seconds(0) - spared
        best_s = min(many.seconds(m) for m in found if many.kept_bytes(m) <= limit)
        assert least_s <= best_s + 1e-9 < least_s + max(o.seconds for o in alone) / 2


def test_the_greedy_search_is_quick_on_large_stages():
    """Each storage is looked at a few times, not once for every other."""
    count, looks = 200, 0

    class Counting(Numbers):
        __slots__ = ()

        def seconds(self, kept: int) -> float:
            nonlocal looks
            looks += 1
            return super().seconds(kept)

    draw = random.Random(0)
    chain = tuple(Operation(1 << i, 1 << i >> 1, draw.random()) for i in range(count))
    nbytes = tuple(draw.randint(1, 100) for _ in range(count))
    assert len(greedy_masks(Counting(nbytes, chain, (1 << count) - 1), USUAL)) > count
    assert looks < count**2


def test_few_options_stay_and_they_span_the_curve():
    draw = random.Random(0)
    chain = tuple(Operation(1 << i, 0, draw.random()) for i in range(10))
    many = Numbers(tuple(draw.randint(1, 100) for _ in range(10)), chain, (1 << 10) - 1)
    every = search(many, USUAL)
    kept = module._prune(many, every, USUAL)
    assert len(every) > USUAL.save_options == len(kept)
    assert kept[-1] == every[-1]
    assert set(kept) <= set(every)


class Wide(nn.Module):
    """A GELU and a dropout between two layers: cheap to rebuild, dear to keep."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Dropout(0.2), nn.Linear(128, 16))
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().sum()


@pytest.fixture(scope="module")
def wide():
    return capture(Wide(), (torch.randn(8, 16),))


def test_options_rebuild_the_same_bits_and_draw_the_same_masks(wide):
    found = find_options(wide.measured, wide.blocks, USUAL)
    assert any(found.masks), "nothing to choose"
    count = len(wide.line.stages)
    expected = run_emitted(wide, wide.program(plain(count, {})))
    tried = 0
    for stage in range(count):
        for option in range(1, len(found.masks[stage]) + 1):
            schedule = plain(count, {stage: option})
            kept = found.kept_by(schedule)
            assert kept == {stage: found.masks[stage][option - 1]}
            program = wide.program(schedule, missing=found.missing(kept))
            assert_bitwise_equal(run_emitted(wide, program), expected)
            tried += 1
    assert tried >= 3


def plain(count: int, options: dict[int, int]) -> Schedule:
    forward = [Forward(i, Keep.ALL, options.get(i, 0)) for i in range(count)]
    return Schedule((*forward, *map(Backward, reversed(range(count)))))


@pytest.mark.parametrize("name", ["gpt", "resnet50"])
def test_a_backward_rebuilds_what_is_missing_and_no_more(name: str):
    step = captured(name)
    found = find_options(step.measured, step.blocks, USUAL)
    evaluator = Evaluator.of(step.measured, step.blocks, found, step.context_bytes)
    count, seen, known = len(step.line.stages), 0, set()
    for index, parts in enumerate(found.parts):
        if parts.numbers in known:  # a stage like one before
            continue
        known.add(parts.numbers)
        backward = step.blocks(index, Mode.BACKWARD, frozenset(step.line.stages[index].results))
        for option, mask in enumerate(found.masks[index], start=1):
            missing = parts.missing(mask)
            candidate = evaluator.candidate(coded(plain(count, {index: option})))
            calls = evaluator.program(candidate).calls
            block = next(call.block for call in calls if call.op == Backward(index))
            assert not missing.intersection(block.inputs)
            assert set(block.nodes) - block.again == set(backward.nodes)
            order = {node: i for i, node in enumerate(block.nodes)}
            assert all(
                order[source] < order[node]
                for node in block.nodes
                for source in block.sources(node)
                if source in order
            )
            seen += 1
    assert seen
