"""A model in two processes, each with one stage of a pipeline of torch's."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import fxremat
from tests.loops.memory import recording, sizes_known
from tests.ranks import Model, beginning

ROWS, WIDTH, MICROBATCHES = 256, 64, 4

STEPS = 4


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
        peaks = [_step(schedule, part, rank, number) for number in range(STEPS)]
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
