"""The fastest schedule with storages that travel: never slower than either way alone."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from fxremat.ir import Forward, MeasuredLink, Solved
from fxremat.ir.schedule import decoded
from fxremat.planner.allocator.allocator import AllocatorSettings
from fxremat.planner.context.context_bytes import Caller
from fxremat.planner.decision.candidates import Candidate
from fxremat.planner.decision.moves import Movable
from fxremat.planner.search.generators import chain_schedules
from fxremat.planner.search.search import Search
from fxremat.planner.transfers import transfers as module
from fxremat.planner.transfers.transfers import HostMemory, Transfers, relieved_schedules
from fxremat.runtime.slots import slot_bytes
from fxremat.solvers.rotor import RotorTable
from fxremat.units import Counted
from tests.harness import captured, search_of, searched

FAST, SLOW = 1e12, 1e3
"""Bytes a second: everything arrives at once, nothing ever does."""

models = pytest.mark.parametrize("name", ["gpt", "resnet50"])
with_bases = pytest.mark.parametrize("name", ["gpt_logits", "unet"])


def transfers(
    name: str, bytes_per_s: float, host: HostMemory, search: Search | None = None
) -> Transfers:
    link = MeasuredLink(bytes_per_s, bytes_per_s, bytes_per_s, slowdown=1.0, shared=False)
    return replace(Transfers.of(search or search_of(name), host), link=link)


def budgets(found: Transfers) -> list[int]:
    least, full = found.least_bytes, found.search.baseline.peak_bytes
    return [least + (full - least) * part // 4 for part in range(5)]


def peak_of(found: Transfers, moved: Candidate) -> int:
    """The peak that an evaluation finds, which is what the candidate says."""
    assert found.search.evaluator.evaluation(moved).peak_bytes == moved.peak_bytes
    return moved.peak_bytes


@models
@pytest.mark.parametrize("speed", [FAST, 1e9, SLOW])
def test_both_are_never_slower_than_one(name: str, speed: float):
    both = transfers(name, speed, HostMemory())
    only = transfers(name, speed, HostMemory(only=True))
    search = search_of(name)
    assert both.least_bytes <= min(only.least_bytes, search.least.peak_bytes)
    for budget in budgets(both):
        found = both.fastest_within(budget)
        assert peak_of(both, found) <= budget
        if budget >= search.least.peak_bytes:
            assert found.total_s <= search.fastest_within(budget).total_s * (1 + 1e-9)
        if budget >= only.least_bytes:
            assert found.total_s <= only.fastest_within(budget).total_s * (1 + 1e-9)


@pytest.mark.parametrize("name", ["siamese", "image_recipe"])
@pytest.mark.parametrize("speed", [1e8, 1e9])
def test_on_a_join_never_slower_than_on_its_line_or_without(name: str, speed: float):
    line = searched(captured(name), generators=(chain_schedules,))
    whole = transfers(name, speed, HostMemory())
    alone = transfers(name, speed, HostMemory(), line)
    assert whole.least_bytes <= min(alone.least_bytes, whole.search.least.peak_bytes)
    for budget in budgets(alone):
        found = whole.fastest_within(budget)
        assert found.total_s <= alone.fastest_within(budget).total_s * (1 + 1e-9)
        if budget >= whole.search.least.peak_bytes:
            assert found.total_s <= whole.search.fastest_within(budget).total_s * (1 + 1e-9)


def test_the_least_is_looked_for_once(monkeypatch: pytest.MonkeyPatch):
    """And anew where something else holds."""
    found = transfers("gpt", 1e9, HostMemory())
    looked: list[Movable] = []
    least = Movable.least_bytes.fget
    monkeypatch.setattr(Movable, "least_bytes", property(lambda x: looked.append(x) or least(x)))
    nbytes = found.least_bytes
    assert len(looked) == len(found.movable)
    moved = found.fastest_within(nbytes)
    found.describe_least()
    assert found.least_bytes == nbytes == peak_of(found, moved)
    assert len(looked) == len(found.movable)
    tight = replace(found, host=HostMemory(limit_bytes=1))
    assert tight.least_bytes > nbytes
    assert found.least_bytes == nbytes


@models
def test_a_fast_link_makes_recomputation_needless(name: str):
    found = transfers(name, FAST, HostMemory())
    only = transfers(name, FAST, HostMemory(only=True))
    moved = found.fastest_within(only.least_bytes)
    assert moved.moves
    baseline_s = found.search.baseline.total_s
    assert moved.total_s <= baseline_s * 1.001


@models
def test_over_a_slow_link_nothing_travels(name: str):
    found = transfers(name, SLOW, HostMemory())
    moved = found.fastest_within(found.search.least.peak_bytes)
    assert not moved.moves


@models
def test_transfers_alone_run_each_forward_once(name: str):
    found = transfers(name, 1e9, HostMemory(only=True))
    for budget in budgets(found):
        moved = found.fastest_within(budget)
        forwards = [op for op in decoded(moved.codes) if isinstance(op, Forward)]
        assert len(forwards) == len(found.search.chain)


@models
def test_no_more_of_the_host_than_allowed(name: str):
    free = transfers(name, 1e9, HostMemory(only=True))
    taken = sum(m.nbytes for m in free.fastest_within(free.least_bytes).moves)
    limit = taken // 2
    found = transfers(name, 1e9, HostMemory(only=True, limit_bytes=limit))
    assert found.least_bytes > free.least_bytes
    moved = found.fastest_within(found.least_bytes)
    assert 0 < sum(m.nbytes for m in moved.moves) <= limit
    assert peak_of(found, moved) <= found.least_bytes


@models
def test_a_limit_holds_for_what_is_allocated(name: str):
    """Slots are aligned: their sum, and not that of the tensors, is within the limit."""
    free = transfers(name, 1e9, HostMemory(only=True))
    moves = free.fastest_within(free.least_bytes).moves
    exact = sum(slot_bytes(m.nbytes) for m in moves)
    enough = transfers(name, 1e9, HostMemory(only=True, limit_bytes=exact))
    assert enough.least_bytes == free.least_bytes
    short = transfers(name, 1e9, HostMemory(only=True, limit_bytes=exact - 1))
    assert short.least_bytes > free.least_bytes


@models
def test_every_budget_from_the_least_is_met_within_a_limit(name: str):
    free = transfers(name, 1e9, HostMemory(only=True))
    limit = sum(m.nbytes for m in free.fastest_within(free.least_bytes).moves) // 3
    found = transfers(name, 1e9, HostMemory(only=True, limit_bytes=limit))
    least, most = found.least_bytes, found.search.baseline.peak_bytes
    for budget in range(least, most, max((most - least) // 16, 1)):
        moved = found.fastest_within(budget)
        assert peak_of(found, moved) <= budget
        assert sum(slot_bytes(m.nbytes) for m in moved.moves) <= limit


def test_only_inputs_of_convolutions_travel_if_asked():
    found = transfers("resnet50", 1e9, HostMemory(only=True, conv=True))
    everything = transfers("resnet50", 1e9, HostMemory(only=True))
    assert everything.least_bytes < found.least_bytes < found.search.baseline.peak_bytes
    nodes = found.search.measured.line.nodes
    readers = {
        str(user.target)
        for move in found.fastest_within(found.least_bytes).moves
        for node in move.nodes
        for user in nodes[node].users
    }
    assert any("convolution" in name for name in readers)


@models
@pytest.mark.parametrize("only", [False, True])
@pytest.mark.parametrize("counted", ["allocated", "reserved"])
def test_more_travels_where_more_is_handed_out_than_asked_for(
    name: str, only: bool, counted: Counted
):
    """On a device whose allocator hands out more than is asked for."""
    search = replayed(name, counted)
    found = transfers(name, 1e9, HostMemory(only=only), search)
    assert found.least_bytes > transfers(name, 1e9, HostMemory(only=only)).least_bytes
    least, full = found.least_bytes, search.counted_bytes(search.baseline)
    for part in range(3):
        budget = least + (full - least) * part // 2
        moved = found.fastest_within(budget)
        peak = peak_of(found, moved)
        taken = search.allocated(moved)
        assert peak <= taken.counted_bytes(counted) <= budget
        if budget >= search.least_bytes and not only:
            without = search.fastest_within(budget)
            assert moved.total_s <= without.total_s * (1 + 1e-9)


@functools.cache
def replayed(name: str, counted: Counted) -> Search:
    caller = Caller(loss_bytes=0, budget_on=counted)
    return searched(captured(name), caller=caller, allocator=AllocatorSettings())


def middle_bytes(name: str) -> int:
    """A budget between the least and the full peak."""
    search = search_of(name)
    return search.least_bytes + (search.baseline.peak_bytes - search.least_bytes) // 4


@with_bases
def test_the_first_base_is_that_of_recomputation_alone(name: str):
    search, budget = search_of(name), middle_bytes(name)
    table = RotorTable.build(search.chain, search.costs, max_budget_bytes=budget, slots=500)
    solved = table.schedule(budget)
    assert isinstance(solved, Solved)
    assert decoded(next(relieved_schedules(search.setting, budget))) == solved.schedule


@with_bases
def test_every_base_is_another_and_the_last_keeps_everything(name: str):
    search, budget = search_of(name), middle_bytes(name)
    evaluator = search.evaluator
    found = [evaluator.candidate(codes) for codes in relieved_schedules(search.setting, budget)]
    assert len({start.codes.tobytes() for start in found}) == len(found) > 2
    # All that is kept at the loss point may be away at last: nothing is left to run again.
    assert found[-1].total_s == search.baseline.total_s
    first, last = evaluator.evaluation(found[0]), evaluator.evaluation(found[-1])
    assert first.loss_point_bytes < last.loss_point_bytes


@with_bases
def test_plans_gain_by_them(name: str, monkeypatch: pytest.MonkeyPatch):
    search = search_of(name)
    # The link carries this much while a forward lasts.
    nbytes = 0.2 * (search.baseline.peak_bytes - search.costs.fixed_bytes)
    found = transfers(name, nbytes / (search.baseline.total_s / 3), HostMemory())
    gained = []
    least, full = found.least_bytes, search.baseline.peak_bytes
    for budget in (least, least + (full - least) // 6):
        with monkeypatch.context() as patched:
            patched.setattr(module, "relieved_schedules", lambda *_: iter(()))
            without = found.fastest_within(budget)
        moved = found.fastest_within(budget)
        assert moved.peak_bytes <= budget
        assert moved.total_s <= without.total_s
        gained.append(without.total_s - moved.total_s)
    assert max(gained) > 0.005 * search.baseline.total_s


def test_some_candidates_of_every_generator_are_bases():
    search = search_of("unet")
    pools = (search.pool, *search.separate)
    found = transfers("unet", FAST, HostMemory()).candidates
    assert len(set(found)) == len(found) <= search.effort.base_candidates * len(pools)
    for pool in pools:
        assert {pool.members[0], pool.baseline} <= set(found)
    assert search.baseline in found
    assert search.least in found


@pytest.mark.parametrize("share", [2, 3, 8])
@models
def test_the_least_within_a_limit_is_that_of_the_best_base(name: str, share: int):
    free = transfers(name, 1e9, HostMemory())
    limit = sum(m.nbytes for m in free.fastest_within(free.least_bytes).moves) // share
    found = transfers(name, 1e9, HostMemory(limit_bytes=limit))

    def least_of(base: Movable) -> int:
        low, high = base.least_bytes, base.evaluation.peak_bytes
        while low < high:
            middle = (low + high) // 2
            low, high = (
                (low, middle) if base.moves(middle, limit) is not None else (middle + 1, high)
            )
        return low

    assert found.least_bytes == min(map(least_of, found.movable))
