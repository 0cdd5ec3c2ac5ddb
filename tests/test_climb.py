"""Local search: single storages held, swept exactly, the same bits."""

from __future__ import annotations

import itertools

import pytest

from fxremat.passes.stages.block import Mode
from fxremat.planner.candidate import Candidate
from fxremat.planner.effects import Operations
from fxremat.planner.improve import improve
from fxremat.planner.search import Search
from fxremat.planner.surroundings import Caller
from tests.harness import captured, measured_peak_bytes, run_emitted, silent
from tests.models.bits import assert_bitwise_equal

NAMES = ("resnet50", "unet")


@pytest.fixture(scope="module", params=NAMES)
def improved(request: pytest.FixtureRequest) -> tuple[str, Search, list[Candidate]]:
    """The least candidate of a model and every step of its improvement."""
    step = captured(request.param)
    real = {step.joint.primals[i]: tensor for i, tensor in step.real.items()}
    search = Search.of(step.joint, real=real, caller=Caller(loss_bytes=0), progress=silent)
    start = search.solved[0]
    operations = Operations.of(search.sweeps.line)
    return request.param, search, [start, *improve(start, search.sweeps, operations)]


def test_each_step_is_faster_and_holds_more(improved: tuple[str, Search, list[Candidate]]):
    _, _, found = improved
    assert len(found) > 3
    for before, after in itertools.pairwise(found):
        assert after.total_s < before.total_s
        assert sum(map(len, before.held.values())) < sum(map(len, after.held.values()))


def test_what_is_held_is_never_computed_again(improved: tuple[str, Search, list[Candidate]]):
    _, _, found = improved
    last = found[-1]
    held = frozenset().union(*last.held.values())
    for call in last.program.calls:
        again = call.block.nodes if call.block.mode is Mode.AGAIN else call.block.again
        assert not held.intersection(again)
        assert call.block.mode is not Mode.AGAIN or not held.intersection(call.block.outputs)


def test_the_same_bits_within_the_swept_peak(improved: tuple[str, Search, list[Candidate]]):
    name, search, found = improved
    step = captured(name)
    expected = run_emitted(step, search.baseline.program)
    for candidate in (found[len(found) // 2], found[-1]):
        assert_bitwise_equal(run_emitted(step, candidate.program), expected)
        assert measured_peak_bytes(step, candidate.program) <= candidate.peak_bytes


def test_the_frontier_has_the_best_of_them(improved: tuple[str, Search, list[Candidate]]):
    _, search, found = improved
    for candidate in found:
        if candidate.peak_bytes < search.baseline.peak_bytes:
            best = search.fastest_within(candidate.peak_bytes)
            assert best.total_s <= candidate.total_s
