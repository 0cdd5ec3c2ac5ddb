"""Collectives beside calls: within the budget to the byte, and quicker than one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fxremat import torch_compat
from fxremat.planner.allocator import AllocatorSettings
from fxremat.planner.candidates import Candidate
from fxremat.planner.overlap import Outcome, overlap_within
from fxremat.planner.search import Search
from tests.harness import Captured, measured_peak_bytes, run_emitted, run_traced, searched
from tests.models.bits import assert_bitwise_equal
from tests.spread import gathering, group_of_one

WAYS = ["everything kept", "the least"]


@pytest.fixture(scope="module")
def step() -> Iterator[Captured]:
    with group_of_one():
        yield gathering()


@pytest.fixture(scope="module")
def search(step: Captured) -> Search:
    return searched(step)


def chosen(search: Search, way: str) -> Candidate:
    least = search.fastest_within(search.least_bytes)
    return search.baseline if way == WAYS[0] else least


def beside(search: Search, way: str, room: float) -> tuple[Candidate, Outcome]:
    """Before, and with ``room`` times the peak for a budget."""
    before = chosen(search, way)
    budget_bytes = int(room * before.peak_bytes)
    return before, overlap_within(search, before, link=None, budget_bytes=budget_bytes)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("room", [1.0, 1.1, 2.0])
def test_bytes_are_those_of_a_run(step: Captured, search: Search, way: str, room: float) -> None:
    before, found = beside(search, way, room)
    assert found.candidate.shifts
    assert found.candidate.peak_bytes == found.evaluation.peak_bytes
    assert found.evaluation.peak_bytes <= room * before.peak_bytes
    given_bytes = search.setting.context_bytes.given_bytes
    swept = step.sweep(found.program)
    assert found.evaluation.peaks_bytes == tuple(n + given_bytes for n in swept.peaks_bytes)
    assert found.evaluation.held_bytes == tuple(n + given_bytes for n in swept.held_bytes)
    assert measured_peak_bytes(step, found.program) == swept.peak_bytes


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("room", [1.0, 2.0])
def test_numbers_stay_what_they_are(step: Captured, search: Search, way: str, room: float) -> None:
    _, found = beside(search, way, room)
    assert_bitwise_equal(run_emitted(step, found.program), run_traced(step))


@pytest.mark.parametrize("way", WAYS)
def test_more_room_leaves_less_to_wait_for(search: Search, way: str) -> None:
    before, tight = beside(search, way, 1.0)
    _, wide = beside(search, way, 2.0)
    sent_s = sum(s for _, s in search.measured.costs.messages_s)
    assert wide.candidate.total_s <= tight.candidate.total_s < before.total_s
    assert before.total_s - wide.candidate.total_s > 0.5 * sent_s
    assert wide.timeline.makespan_s == wide.candidate.total_s


def test_parameters_are_gathered_a_call_ahead(search: Search) -> None:
    _, found = beside(search, WAYS[0], 2.0)
    program = found.program
    starts, waits = {}, {}
    for index, call in enumerate(program.calls[: program.turn]):
        for node in call.block.nodes:
            if torch_compat.is_wait(node):
                waits[torch_compat.awaited(node)] = index
            elif torch_compat.group_of(node):
                starts[node] = index
    ahead = [waits[node] - index for node, index in starts.items()]
    assert len(ahead) == 12 and sum(n > 0 for n in ahead) >= 10


def test_where_nothing_is_sent_nothing_changes(step: Captured) -> None:
    plain = searched(step)
    object.__setattr__(plain.measured, "costs", step.measured.costs)
    before, found = beside(plain, WAYS[0], 2.0)
    assert found.candidate.key == before.key
    assert found.candidate.total_s == before.total_s


def test_blocks_that_an_allocator_hands_out_are_counted(step: Captured) -> None:
    search = searched(step, allocator=AllocatorSettings())
    before = chosen(search, WAYS[0])
    kept_bytes = search.counted_bytes(search.baseline)
    found = overlap_within(search, before, link=None, budget_bytes=kept_bytes)
    assert found.allocated.allocated_bytes <= kept_bytes
