"""Schedules from solvers, for all budgets."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxremat
from benchmarks.frontier import BLOCKS
from benchmarks.least import compare, entries, holds
from fxremat.ir.schedule import decoded
from fxremat.planner.search.generators import (
    Generator,
    ceilings,
    chain_schedules,
)
from fxremat.planner.search.search import GENERATORS_BY_NAME, Search, generators_of
from tests.harness import (
    Captured,
    capture,
    search_of,
    searched,
)
from tests.models.hf import qwen
from tests.reference.simulate import simulate


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
    plan = fxremat.plan(model, x, "min", effort=fxremat.Effort(generators=["revolve"]))
    assert plan.predicted_peak_bytes < plan.baseline_peak_bytes
    plan.save(tmp_path / "plan.json")
    kept = tmp_path / "plan.json"
    again = fxremat.compile(model, x, plan=kept, effort=fxremat.Effort(generators=["revolve"])).plan
    assert again.schedule == plan.schedule
