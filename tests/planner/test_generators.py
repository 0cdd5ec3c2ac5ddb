"""Schedules from solvers, and the turn as a stage: less memory, and nothing slower for it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxremat
from benchmarks.frontier import BLOCKS
from benchmarks.least import compare, entries, holds
from fxremat.ir import Backward, Problem
from fxremat.ir.schedule import Codes, decoded
from fxremat.planner.context_bytes import Caller
from fxremat.planner.generators import (
    Generator,
    Setting,
    ceilings,
    chain_schedules,
    kept_over_turn,
)
from fxremat.planner.join import equivalent_schedules, join_schedules
from fxremat.planner.search import GENERATORS, GENERATORS_BY_NAME, Search, generators_of
from tests.harness import (
    Captured,
    capture,
    run_emitted,
    run_traced,
    search_of,
    searched,
)
from tests.models.bits import assert_bitwise_equal
from tests.models.hf import qwen
from tests.reference.simulate import simulate

EACH = (chain_schedules, equivalent_schedules, join_schedules)


class Wide(nn.Module):
    """``towers`` of layers that meet in a few more, and a wide result."""

    def __init__(self, towers: int):
        super().__init__()
        self.towers = nn.ModuleList(self.layers(4) for _ in range(towers))
        self.trunk = self.layers(4)
        self.head = nn.Linear(32, 96)

    @staticmethod
    def layers(count: int) -> nn.Sequential:
        """Each keeps several tensors for its backward."""
        parts = [nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Tanh()) for _ in range(count)]
        return nn.Sequential(*parts)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Shape ``(rows, 32)`` for each tower, ``(rows, 96)`` out."""
        ends = [tower(x) for tower, x in zip(self.towers, inputs, strict=True)]
        return self.head(self.trunk(torch.stack(ends).sum(dim=0)).relu())


@functools.cache
def wide(towers: int) -> Captured:
    """The step of a line, or of a join."""
    return capture(Wide(towers), tuple(torch.randn(256, 32) for _ in range(towers)))


@functools.cache
def searched_wide(towers: int, *, only_kept: bool = False) -> Search:
    """Of a step whose loss takes much."""
    step = wide(towers)
    caller = Caller(loss_bytes=5 * step.context_bytes.tangent_bytes)
    generators = tuple(map(kept_over_turn, EACH)) if only_kept else GENERATORS
    return searched(step, caller=caller, generators=generators)


def peaks(search: Search, generator: Generator) -> list[int]:
    """Of its schedules, as the solvers see them."""
    found = map(decoded, generator(search.setting))
    return [simulate(search.chain, search.costs, schedule).peak_bytes for schedule in found]


def test_schedules_are_for_budgets_from_the_least_to_all():
    search = search_of("gpt")
    found = peaks(search, chain_schedules)
    least = min(found)
    assert found[0] == least
    assert max(found) > 0.9 * search.baseline.peak_bytes
    between = [n for n in sorted(set(found)) if n < 2 * least]
    assert len(between) > 10, "few where time falls steeply"


def test_ceilings_fall_towards_the_least():
    found = list(ceilings(1000, 120, 100))
    assert found == sorted(found, reverse=True)
    assert found[0] == 1000
    assert 120 < found[-1] <= 120 + 4 * 20
    assert list(ceilings(100, 100, 0)) == []


both = pytest.mark.parametrize("towers", [1, 2], ids=["line", "join"])


@both
def test_letting_go_at_the_turn_takes_less_memory(towers: int):
    search, kept = searched_wide(towers), searched_wide(towers, only_kept=True)
    assert bool(search.measured.line.branch_ends) == (towers > 1)
    assert search.least_bytes < kept.least_bytes
    assert search.baseline.peak_bytes == kept.baseline.peak_bytes
    turns = [s.evaluator.evaluation(s.least).turn_bytes for s in (search, kept)]
    assert turns[0] < turns[1]


@both
def test_nothing_is_slower_than_what_keeps_the_last_stage_over_the_turn(towers: int):
    search, kept = searched_wide(towers), searched_wide(towers, only_kept=True)
    assert len(kept.pool.members) > 10
    for candidate in kept.pool.members:
        assert search.fastest_within(candidate.peak_bytes).total_s <= candidate.total_s


@both
def test_schedules_of_the_merged_line_are_carried_out_on_the_whole(towers: int):
    search, step = searched_wide(towers), wide(towers)
    truth, last = run_traced(step), len(search.chain) - 1
    found = [codes for g in EACH for codes in kept_over_turn(g)(search.setting)]
    schedules = list({codes.tobytes(): decoded(codes) for codes in found}.values())
    assert len(schedules) > 10
    for schedule in schedules[:: len(schedules) // 6]:
        first = next(op for op in schedule.computations if isinstance(op, Backward))
        assert first.stage == last
        program = step.program(schedule)
        assert program.calls[program.turn].op == Backward(last - 1)
        assert_bitwise_equal(run_emitted(step, program), truth)


def seen_by_generator(search: Search) -> Setting:
    """What a generator is given in place of the whole line."""
    seen: list[Setting] = []

    def spy(setting: Setting) -> Iterator[Codes]:
        seen.append(setting)
        yield from chain_schedules(setting)

    assert list(kept_over_turn(spy)(search.setting))
    (found,) = seen
    return found


@both
def test_the_merged_line_is_charged_with_the_turn(towers: int):
    search = searched_wide(towers)
    setting = seen_by_generator(search)
    Problem(setting.chain, setting.costs, 0)  # validates
    assert len(setting.chain) == len(setting.line.stages) == len(search.chain) - 1
    last = setting.costs.stages[-1]
    turn_bytes = setting.context_bytes.turn_bytes
    assert last.gradient_bytes == 0
    assert min(o.backward_extra_bytes for o in (last, *last.options)) >= turn_bytes
    assert setting.costs.stages[:-1] == search.costs.stages[:-2]


@pytest.mark.parametrize("name", ["gpt", "inplace"])  # loss inside; last backward needs more
def test_nothing_is_planned_twice_where_the_turn_does_not_count(name: str):
    search = search_of(name)
    assert list(chain_schedules(search.setting))
    assert not list(kept_over_turn(chain_schedules)(search.setting))


def test_no_more_memory_than_a_checkpoint_around_each_block():
    entry = qwen("qwen_small", vocabulary=256, width=64, layers=4, batch=2, length=128)
    found = compare("qwen8", "qwen_small", entry)
    assert found["least_budget_bytes"] < 0.9 * found["everything_kept_bytes"]
    assert holds(found), found


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_no_more_memory_than_a_checkpoint_around_each_block_of_larger_models(name: str):
    for label, entry in entries(name):
        found = compare(name, label, entry)
        assert holds(found), found


@pytest.mark.parametrize("name", GENERATORS_BY_NAME)
def test_schedules_of_a_solver_by_its_name(name: str):
    search = searched(wide(2), generators=generators_of([name]))
    everything = searched(wide(2), generators=generators_of(GENERATORS_BY_NAME))
    assert everything.least_bytes <= search.least_bytes
    if name != "store_all":
        assert search.least_bytes < search.counted_bytes(search.baseline)


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_plan_of_a_named_solver_is_followed_again(tmp_path: Path):
    model, x = nn.Sequential(*Wide.layers(6)), torch.randn(256, 32)
    plan = fxremat.plan(model, x, "min", generators=["revolve"])
    assert plan.predicted_peak_bytes < plan.baseline_peak_bytes
    plan.save(tmp_path / "plan.json")
    kept = tmp_path / "plan.json"
    again = fxremat.compile(model, x, plan=kept, generators=["revolve"]).plan
    assert again.schedule == plan.schedule
