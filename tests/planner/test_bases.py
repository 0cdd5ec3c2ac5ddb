"""Schedules that plans with transfers are built on: they keep more than fits, and gain by it."""

from __future__ import annotations

import pytest

from fxremat.ir import Solved
from fxremat.ir.schedule import decoded
from fxremat.planner.transfers.transfers import HostMemory, bases
from fxremat.solvers.rotor import RotorTable
from tests.harness import search_of
from tests.planner.test_transfers import transfers

models = pytest.mark.parametrize("name", ["gpt_logits", "unet"])


def middle_bytes(name: str) -> int:
    """A budget between the least and the full peak."""
    search = search_of(name)
    return search.least_bytes + (search.baseline.peak_bytes - search.least_bytes) // 4


@models
def test_the_first_base_is_that_of_recomputation_alone(name: str):
    search, budget = search_of(name), middle_bytes(name)
    table = RotorTable.build(search.chain, search.costs, max_budget_bytes=budget, slots=500)
    solved = table.schedule(budget)
    assert isinstance(solved, Solved)
    assert decoded(next(bases.relieved(search.setting, budget))) == solved.schedule


@models
def test_every_base_is_another_and_the_last_keeps_everything(name: str):
    search, budget = search_of(name), middle_bytes(name)
    evaluator = search.evaluator
    found = [evaluator.candidate(codes) for codes in bases.relieved(search.setting, budget)]
    assert len({start.codes.tobytes() for start in found}) == len(found) > 2
    # All that is kept over the turn may be away at last: nothing is left to run again.
    assert found[-1].total_s == search.baseline.total_s
    first, last = evaluator.evaluation(found[0]), evaluator.evaluation(found[-1])
    assert first.turn_bytes < last.turn_bytes


@models
def test_plans_gain_by_them(name: str, monkeypatch: pytest.MonkeyPatch):
    search = search_of(name)
    # The link carries this much while a forward lasts.
    nbytes = 0.2 * (search.baseline.peak_bytes - search.costs.fixed_bytes)
    found = transfers(name, nbytes / (search.baseline.total_s / 3), HostMemory())
    gained = []
    least, full = found.least_bytes, search.baseline.peak_bytes
    for budget in (least, least + (full - least) // 6):
        with monkeypatch.context() as patched:
            patched.setattr(bases, "relieved", lambda *_: iter(()))
            without = found.fastest_within(budget)
        moved = found.fastest_within(budget)
        assert moved.peak_bytes <= budget
        assert moved.total_s <= without.total_s
        gained.append(without.total_s - moved.total_s)
    assert max(gained) > 0.005 * search.baseline.total_s


def test_some_candidates_of_every_generator_are_bases():
    search = search_of("unet")
    pools = (search.pool, *search.alone)
    found = bases.of_pools(pools, 5)
    assert len(set(found)) == len(found) <= 5 * len(pools)
    for pool in pools:
        assert {pool.members[0], pool.baseline} <= set(found)
    assert search.baseline in found
    assert search.least in found
