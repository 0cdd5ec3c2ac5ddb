"""Local search: single storages held, evaluated exactly, the same bits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fxremat.effort import USUAL
from fxremat.passes.stages.block import Mode
from fxremat.planner.decision.candidates import Candidate
from tests.harness import captured, measured_peak_bytes, run_emitted, search_of
from tests.models.bits import assert_bitwise_equal

NAMES = ("resnet50", "unet", "siamese")
models = pytest.mark.parametrize("name", NAMES)


def climbed(name: str) -> list[Candidate]:
    """The least candidate of a model's solvers and every step of a climb from there."""
    search = search_of(name)
    start = search.solved.members[0]
    return [start, *search.evaluator.climb(start, USUAL)]


def bits(candidate: Candidate) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(candidate.held, np.uint8))).tolist())


@models
def test_each_step_is_faster_and_holds_more(name: str):
    found = climbed(name)
    assert len(found) > 3
    for before, after in itertools.pairwise(found):
        assert after.total_s < before.total_s
        assert bits(before) < bits(after)


@models
def test_each_step_is_what_its_decision_comes_to(name: str):
    evaluator = search_of(name).evaluator
    for step in climbed(name):
        again = evaluator.candidate(step.codes, step.held)
        assert (again.peak_bytes, again.total_s) == (step.peak_bytes, step.total_s)


@models
def test_a_climb_goes_on_from_where_it_is_set_out(name: str):
    evaluator, found = search_of(name).evaluator, climbed(name)
    start = found[len(found) // 2]
    for step in evaluator.climb(start, USUAL):
        assert step.total_s < start.total_s
        assert bits(start) < bits(step)


@models
def test_nothing_is_found_where_everything_is_kept(name: str):
    search = search_of(name)
    assert search.evaluator.climb(search.baseline, USUAL) == []


@models
def test_what_is_held_is_never_computed_again(name: str):
    evaluator, last = search_of(name).evaluator, climbed(name)[-1]
    nodes = evaluator.line.nodes
    held = frozenset(nodes[i] for _, own in evaluator.decision(last).held for i in own)
    assert held
    for call in evaluator.program(last).calls:
        again = call.block.nodes if call.block.mode is Mode.AGAIN else call.block.again
        assert held.isdisjoint(again)
        assert call.block.mode is not Mode.AGAIN or held.isdisjoint(call.block.outputs)


@models
def test_the_same_bits_at_the_evaluated_peak(name: str):
    step, evaluator, found = captured(name), search_of(name).evaluator, climbed(name)
    expected = run_emitted(step, evaluator.program(evaluator.keep_all()))
    around = step.context_bytes.given_bytes  # which a run of the graphs alone does not allocate
    for candidate in (found[len(found) // 2], found[-1]):
        program = evaluator.program(candidate)
        assert_bitwise_equal(run_emitted(step, program), expected)
        assert measured_peak_bytes(step, program) <= candidate.peak_bytes - around


@models
def test_the_pool_has_the_best_of_them(name: str):
    search = search_of(name)
    for candidate in climbed(name):
        if candidate.peak_bytes < search.baseline.peak_bytes:
            assert search.fastest_within(candidate.peak_bytes).total_s <= candidate.total_s
