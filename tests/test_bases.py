"""Schedules that plans with transfers are built on: they keep more than fits, and gain by it."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest

from fxremat.ir import Solved
from fxremat.planner import bases
from fxremat.planner.transfers import HostMemory
from fxremat.solvers.rotor import RotorTable
from tests.test_transfers import budgets, search_of, transfers

models = pytest.mark.parametrize("name", ["gpt", "unet"])


def middle_bytes(name: str) -> int:
    """A budget between the least and the full peak."""
    search = search_of(name)
    return search.least_bytes + (search.baseline.peak_bytes - search.least_bytes) // 4


@models
def test_the_first_climb_is_that_of_recomputation_alone(name: str):
    search, budget = search_of(name), middle_bytes(name)
    table = RotorTable.build(search.chain, search.costs, max_budget_bytes=budget, slots=500)
    solved = table.schedule(budget)
    assert isinstance(solved, Solved)
    start, _ = next(bases.climbs(search, budget))
    assert start.schedule == solved.schedule


@models
def test_every_climb_keeps_more_and_goes_up(name: str):
    search, budget = search_of(name), middle_bytes(name)
    starts = []
    for start, higher in bases.climbs(search, budget):
        starts.append(start)
        for before, after in pairwise([start, *islice(higher, 5)]):
            assert after.total_s < before.total_s
    assert len({start.schedule for start in starts}) == len(starts) > 2
    # All that is kept over the turn may be away at last: nothing is left to run again.
    assert starts[-1].total_s == search.baseline.total_s
    assert starts[0].sweep.turn_bytes < starts[-1].sweep.turn_bytes


@models
def test_plans_gain_by_them(name: str, monkeypatch: pytest.MonkeyPatch):
    search = search_of(name)
    # The link carries this much while a forward lasts.
    nbytes = 0.3 * (search.baseline.peak_bytes - search.costs.fixed_bytes)
    found = transfers(name, nbytes / (search.baseline.total_s / 3), HostMemory())
    gained = []
    for budget in budgets(found)[:4]:
        with monkeypatch.context() as patched:
            patched.setattr(bases, "climbs", lambda *_: iter(()))
            without = found.fastest_within(budget)
        moved = found.fastest_within(budget)
        assert moved.sweep.peak_bytes <= budget
        assert moved.total_s <= without.total_s
        gained.append(without.total_s - moved.total_s)
    assert max(gained) > 0.001 * search.baseline.total_s


def test_the_search_gives_some_candidates_of_every_planner():
    search = search_of("unet")
    found = bases.of_search(search)
    assert len(set(map(id, found))) == len(found)
    assert search.baseline in found
    assert search.least in found
    assert len(found) <= bases.MOST * (1 + len(search.alone))
