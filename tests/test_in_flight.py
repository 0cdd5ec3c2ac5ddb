"""Several forwards that wait for their backward, as microbatches do, within one budget."""

from __future__ import annotations

import itertools
import warnings
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import fxremat
from fxremat.planning.choose import all_in_flight
from tests.loops.memory import recording, sizes_known
from tests.loops.subjects import SUBJECTS
from tests.rank_training import Model, beginning

ROWS, WIDTH, MICROBATCHES = 256, 64, 4

OF_STAGES = 4
"""Steps of a pipeline."""


class Part(nn.Module):
    def __init__(self, *, first: bool) -> None:
        super().__init__()
        whole = Model()
        blocks = list(whole.blocks)
        ends = ([whole.stem, *blocks[:3]], [*blocks[3:], whole.head])
        self.layers = nn.Sequential(*ends[not first])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@dataclass(frozen=True, slots=True)
class Staged:
    """What a process has seen: parameters, peaks of all steps, the budget, what was said."""

    parameters: list[Tensor]
    peaks_bytes: list[int]
    budget_bytes: int
    warned: list[str]


def staged(share: float, folder: Path) -> list[tuple[Staged, Staged]]:
    """Train as it is, and then within a share of what that took; by rank.

    Args:
        share: of the peak.
        folder: where processes leave what they have seen.
    """
    multiprocessing.spawn(_train, (share, folder, beginning()), nprocs=2)  # type: ignore[no-untyped-call]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def _train(rank: int, share: float, folder: Path, where: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    with sizes_known():
        plain = _run(rank, None)
        planned = _run(rank, int(share * max(plain.peaks_bytes)))
    torch.save((plain, planned), folder / f"{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


def _run(rank: int, budget: int | None) -> Staged:
    torch._dynamo.reset()
    torch.manual_seed(0)
    part = Part(first=rank == 0)
    taken = torch.randn(ROWS, WIDTH, requires_grad=True) if rank else torch.randn(ROWS, 16)
    given = torch.randn(ROWS, 50 if rank else WIDTH, requires_grad=True)
    called: Any = torch.compile(part, backend="aot_eager")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if budget is not None:
            called = fxremat.compile(part, taken, budget, in_flight=MICROBATCHES)
        stage = PipelineStage(
            called, rank, 2, torch.device("cpu"), input_args=(taken,), output_args=(given,)
        )
        schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=nn.MSELoss(reduction="sum"))
        peaks = [_step(schedule, part, rank, number) for number in range(OF_STAGES)]
    warned = [str(w.message) for w in told if issubclass(w.category, fxremat.BudgetWarning)]
    return Staged([p.detach() for p in part.parameters()], peaks, budget or 0, warned)


def _step(schedule: ScheduleGPipe, part: nn.Module, rank: int, number: int) -> int:
    """The peak of one."""
    torch.manual_seed(number)
    x, y = torch.randn(ROWS * MICROBATCHES, 16), torch.randn(ROWS * MICROBATCHES, 50)
    with recording() as memory:
        memory.mark("begin")
        if rank:
            schedule.step(target=y)
        else:
            schedule.step(x)
        memory.mark("end")
    there = (*part.parameters(), x, y)
    peak_bytes, _where = memory.peak("begin", "end", held_bytes=sum(t.nbytes for t in there))
    with torch.no_grad():
        for parameter in part.parameters():
            parameter -= 1e-4 * parameter.grad
            parameter.grad = None
    return peak_bytes


pytestmark = pytest.mark.usefixtures("fresh_dynamo", "quick_search")

STEPS = 3


def train(name: str, count: int, budget: Any, *, first_in: bool) -> tuple[list[int], list[Tensor]]:
    """Peaks of steps with ``count`` forwards in flight, and gradients of the last one."""
    entry = SUBJECTS[name]
    torch._dynamo.reset()
    model = entry.build().train()
    called: Any = torch.compile(model, backend="aot_eager")
    if budget is not None:
        sample = fxremat.Sample(*entry.sample(0))
        called = fxremat.compile(model, sample, budget, in_flight=count)
    peaks = []
    with sizes_known():
        for number in range(STEPS):
            model.zero_grad()
            torch.manual_seed(number)
            held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
            with recording() as memory:
                memory.mark("begin")
                waiting: deque[Tensor] = deque()
                for microbatch in range(2 * count):
                    args, kwargs = entry.sample(microbatch)
                    waiting.append(entry.loss(called(*args, **kwargs)))
                    if len(waiting) == count:
                        (waiting.popleft if first_in else waiting.pop)().backward()
                while waiting:
                    (waiting.popleft if first_in else waiting.pop)().backward()
                memory.mark("end")
            peaks.append(memory.peak("begin", "end", held_bytes=held)[0])
    if budget is not None:
        assert called.plans[-1].budget_bytes == budget
    return peaks, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("name", "count", "first_in"),
    [
        ("mlp", 2, True),
        ("mlp", 4, False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("mlp", 2, False),
                ("mlp", 4, True),
                *itertools.product(["gpt"], [2, 4], [True, False]),
            )
        ),
    ],
)
def test_the_first_step_keeps_to_the_budget_already(name: str, count: int, first_in: bool) -> None:
    plain, gradients = train(name, count, None, first_in=first_in)
    for share in (0.9, 0.5):
        budget = int(share * max(plain))
        with warnings.catch_warnings():
            warnings.simplefilter("error", fxremat.BudgetWarning)
            peaks, planned = train(name, count, budget, first_in=first_in)
        assert max(peaks) <= budget
        assert all(map(torch.equal, planned, gradients))


@pytest.mark.parametrize("written", [1.0, "min"])
def test_a_budget_that_is_no_number_of_bytes_is_that_of_all_in_flight(written: Any) -> None:
    entry = SUBJECTS["mlp"]
    sample = fxremat.Sample(*entry.sample(0))
    budgets = []
    for count in (1, 2, 3, 4):
        model = entry.build()
        options = {"in_flight": count, "accumulate": True, "assume": "strict"}
        own = fxremat.plan(model, sample, written, **options)
        budgets.append(own.budget_bytes)
    one, two, three, four = budgets
    assert two - one > 0
    assert abs(four - three - (three - two)) <= 0.02 * (three - two)


def test_pipelines_of_torch(tmp_path: Path) -> None:
    for plain, planned in staged(0.8, tmp_path):
        assert all(map(torch.equal, plain.parameters, planned.parameters))
        assert max(planned.peaks_bytes) <= planned.budget_bytes
        assert not planned.warned


def test_the_least_that_an_error_names_is_enough() -> None:
    entry = SUBJECTS["mlp"]
    sample = fxremat.Sample(*entry.sample(0))
    with pytest.raises(fxremat.BudgetError) as refused:
        fxremat.plan(entry.build(), sample, "3 MiB", in_flight=3)
    least_bytes = refused.value.least_budget_bytes
    assert least_bytes is not None
    own = fxremat.plan(entry.build(), sample, least_bytes, in_flight=3)
    assert own.budget_bytes == least_bytes


@pytest.mark.slow
def test_the_least_budget_holds_while_a_loop_holds_its_last_loss() -> None:
    entry = SUBJECTS["gpt"]
    model = entry.build()
    with pytest.raises(fxremat.BudgetError) as refused:
        fxremat.plan(model, fxremat.Sample(*entry.sample(0)), 0.01, loss=entry.loss)
    least_bytes = refused.value.least_budget_bytes
    assert least_bytes is not None
    called: Any = fxremat.compile(
        model, fxremat.Sample(*entry.sample(0)), least_bytes, loss=entry.loss
    )
    loss = torch.zeros(())
    with sizes_known():
        for number in range(STEPS):
            model.zero_grad()
            held = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), loss))
            with recording() as memory:
                memory.mark("begin")
                args, kwargs = entry.sample(number)
                loss = entry.loss(called(*args, **kwargs))
                loss.backward()
                memory.mark("end")
            assert memory.peak("begin", "end", held_bytes=held)[0] <= least_bytes
    assert len(called.plans) == 1


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "2", None, 10**9, 10**30, float("nan")])
def test_counts_that_cannot_be_read(count: Any) -> None:
    with pytest.raises(fxremat.ArgumentError, match="in_flight"):
        fxremat.compile(torch.nn.Linear(2, 2), torch.randn(2, 2), 1.0, in_flight=count)


def test_what_does_not_go_with_it() -> None:
    model, sample = torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.randn(2, 2)
    with pytest.raises(fxremat.ArgumentError, match="1 if regions="):
        fxremat.compile(model, sample, 1.0, in_flight=2, regions=["0"])
    with pytest.raises(fxremat.ArgumentError, match="plans one step of one process"):
        fxremat.max_batch(model, sample, "1 MiB", in_flight=2)
    with pytest.raises(fxremat.ArgumentError, match="estimate does not take in_flight="):
        fxremat.estimate(model, sample, in_flight=2)


def test_the_least_of_all_is_no_less_than_that_of_one_beside_others_that_hold_more() -> None:
    model, sample = torch.nn.Sequential(torch.nn.Linear(16, 16)), torch.randn(8, 16)
    compiled: Any = fxremat.compile(model, sample, "min", in_flight=2)
    graph = compiled._training.graphs[0]
    (context,) = graph.calls.plans
    waits = replace(context, waiting=1, waiting_bytes=1 << 30)
    least_bytes = graph.held(waits).given_bytes + 1
    assert all_in_flight(graph, waits, least_bytes) >= least_bytes
