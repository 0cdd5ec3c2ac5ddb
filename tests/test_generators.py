"""The turn as a stage: less memory where the loss is outside, and nothing slower for it."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from benchmarks.frontier import BLOCKS
from benchmarks.least import compare, entries, holds
from fxremat.costs.cost import Progress
from fxremat.ir import Backward, Chain, Problem, Schedule
from fxremat.planner.candidate import Sweeps
from fxremat.planner.joining import equivalent_schedules, join_schedules
from fxremat.planner.search import Search, line_schedules
from fxremat.planner.surroundings import Caller
from fxremat.planner.turn import Planner, kept_over_turn
from tests.harness import Captured, capture, captured, run_emitted, run_traced, silent
from tests.models.bits import assert_bitwise_equal
from tests.models.hf import qwen

PLANNERS = (line_schedules, equivalent_schedules, join_schedules)


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
def searched(towers: int, *, only_kept: bool = False) -> Search:
    """Of a step whose loss takes much."""
    step = wide(towers)
    real = {step.joint.primals[i]: tensor for i, tensor in step.real.items()}
    caller = Caller(loss_bytes=5 * step.surroundings.tangent_bytes)
    planners = tuple(map(kept_over_turn, PLANNERS)) if only_kept else None
    return Search.of(step.joint, real=real, caller=caller, progress=silent, planners=planners)


both = pytest.mark.parametrize("towers", [1, 2], ids=["line", "join"])


@both
def test_letting_go_at_the_turn_takes_less_memory(towers: int):
    search, kept = searched(towers), searched(towers, only_kept=True)
    assert bool(search.measured.line.branch_ends) == (towers > 1)
    assert search.least_bytes < kept.least_bytes
    assert search.baseline.peak_bytes == kept.baseline.peak_bytes
    assert search.least.sweep.turn_bytes < kept.least.sweep.turn_bytes


@both
def test_nothing_is_slower_than_what_keeps_the_last_stage_over_the_turn(towers: int):
    search, kept = searched(towers), searched(towers, only_kept=True)
    assert len(kept.frontier) > 10
    for candidate in kept.frontier:
        assert search.fastest_within(candidate.peak_bytes).total_s <= candidate.total_s


@both
def test_schedules_of_the_merged_line_are_carried_out_on_the_whole(towers: int):
    search, step = searched(towers), wide(towers)
    truth, last = run_traced(step), len(search.chain) - 1
    found = [s for p in PLANNERS for s in kept_over_turn(p)(search.sweeps, search.chain, silent)]
    schedules = list(dict.fromkeys(found))
    assert len(schedules) > 10
    for schedule in schedules[:: len(schedules) // 6]:
        first = next(op for op in schedule.computations if isinstance(op, Backward))
        assert first.stage == last
        program = step.program(schedule)
        assert program.calls[program.turn].op == Backward(last - 1)
        assert_bitwise_equal(run_emitted(step, program), truth)


def seen_by_planner(search: Search) -> tuple[Sweeps, Chain]:
    """What a planner is given in place of the whole line."""
    seen: list[tuple[Sweeps, Chain]] = []

    def spy(sweeps: Sweeps, chain: Chain, progress: Progress) -> Iterator[Schedule]:
        seen.append((sweeps, chain))
        yield from line_schedules(sweeps, chain, progress)

    assert list(kept_over_turn(spy)(search.sweeps, search.chain, silent))
    (found,) = seen
    return found


@both
def test_the_merged_line_is_charged_with_the_turn(towers: int):
    search = searched(towers)
    sweeps, chain = seen_by_planner(search)
    Problem(chain, sweeps.costs, 0)  # validates
    assert len(chain) == len(sweeps.line.stages) == len(search.chain) - 1
    last = sweeps.costs.stages[-1]
    turn_bytes = sweeps.surroundings.turn_bytes
    assert last.gradient_bytes == 0
    assert min(o.backward_extra_bytes for o in (last, *last.options)) >= turn_bytes
    assert sweeps.costs.stages[:-1] == search.costs.stages[:-2]


def planned_apart(step: Captured, planner: Planner, loss_bytes: int) -> list[Schedule]:
    """What ``planner`` gives beside what it finds itself."""
    real = {step.joint.primals[i]: tensor for i, tensor in step.real.items()}
    caller = Caller(loss_bytes=loss_bytes)
    search = Search.of(
        step.joint, real=real, caller=caller, progress=silent, planners=(line_schedules,)
    )
    return list(kept_over_turn(planner)(search.sweeps, search.chain, silent))


def test_nothing_is_planned_twice_where_the_turn_does_not_count():
    assert planned_apart(wide(1), line_schedules, 5 * wide(1).surroundings.tangent_bytes)
    assert not planned_apart(captured("gpt"), line_schedules, 0), "its loss is inside"
    assert not planned_apart(captured("inplace"), line_schedules, 0), "its last backward needs more"


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
