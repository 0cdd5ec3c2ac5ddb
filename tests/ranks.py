"""Training in several processes on one machine: what each of them sees."""

from __future__ import annotations

import os
import socket
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, gelu
from torch.nn.parallel import DistributedDataParallel

import fxremat
from tests.loops.memory import recording, sizes_known

BLOCKS, ROWS, WIDTH, CLASSES = 6, 512, 64, 50

TAUGHT, STEPS = 5, 7
"""Steps before those whose peak is measured, and all of them."""

LONGEST = timedelta(seconds=120)
"""That a process waits for another."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(16, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass(frozen=True, slots=True)
class Trained:
    """What one process has seen.

    Attributes:
        parameters: after all steps, whole ones.
        peaks_bytes: of the last steps.
        budget_bytes: what they had to keep to; ``None``: nothing is planned.
        warned: what fxremat has said.
    """

    parameters: list[Tensor]
    peaks_bytes: list[int]
    budget_bytes: int | None
    warned: list[str]


def trained(how: str, budget: Any, *, processes: int = 2) -> list[Trained]:
    """Train in several processes.

    More than two add up in an order that depends on buckets, and these on the order in which
    gradients are there: without a plan ``DistributedDataParallel`` gets captured graphs, too.

    Args:
        how: ``ddp_around``: what is compiled is wrapped; ``ddp_inside``: what is wrapped is
            compiled; ``fsdp``: each block, and the model, is sharded; ``tensor_parallel``: layers
            of the blocks are spread.
        budget: ``None``: it is trained as it is.
        processes: how many.

    Returns what each of them has seen, by rank.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        arguments = processes, port, how, budget, folder
        multiprocessing.spawn(_train, arguments, nprocs=processes)  # type: ignore[no-untyped-call]
        paths = (Path(folder) / f"{rank}.pt" for rank in range(processes))
        return [torch.load(path, weights_only=False) for path in paths]


def _train(rank: int, processes: int, port: int, how: str, budget: Any, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=processes, timeout=LONGEST)
    uncut = torch._dynamo.config.patch(optimize_ddp=False)
    try:
        with warnings.catch_warnings(record=True) as told, sizes_known(), uncut:
            warnings.simplefilter("always")
            parameters, peaks, budget_bytes = _steps(rank, processes, how, budget)
        warned = [str(w.message) for w in told if issubclass(w.category, fxremat.BudgetWarning)]
        found = Trained(parameters, peaks, budget_bytes, warned)
        torch.save(found, Path(folder) / f"{rank}.pt")
    finally:
        distributed.destroy_process_group()


def _steps(
    rank: int, processes: int, how: str, budget: Any
) -> tuple[list[Tensor], list[int], int | None]:
    torch.manual_seed(0)
    model: nn.Module = Model()
    if how == "fsdp":
        mesh = init_device_mesh("cpu", (processes,))
        for module in (*model.blocks, model):  # type: ignore[misc]
            fully_shard(module, mesh=mesh)
    elif how == "tensor_parallel":
        mesh = init_device_mesh("cpu", (processes,))
        for block in model.blocks:  # type: ignore[union-attr]
            ways = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh, ways)
    elif how == "ddp_inside":
        model = DistributedDataParallel(model)
    called: Any = model
    if budget is not None:
        called = fxremat.compile(model, _batch(rank, 0)[0], budget)
    elif how != "fsdp":
        called = torch.compile(model, backend="aot_eager")
    compiled = called
    if how == "ddp_around":
        called = DistributedDataParallel(called)
    optimizer = torch.optim.AdamW(model.parameters())
    peaks = []
    for number in range(STEPS):
        torch.manual_seed(processes * number + rank)
        x, y = _batch(rank, number)

        def step(x: Tensor = x, y: Tensor = y) -> None:
            optimizer.zero_grad()
            cross_entropy(called(x), y).backward()

        if number < TAUGHT:
            step()
        else:
            peaks.append(_peak_of(step, model, optimizer, (x, y)))
        optimizer.step()
    whole = [_whole(p).detach().clone() for p in model.parameters()]
    plans = compiled.plans if isinstance(compiled, fxremat.CompiledModule) else ()
    return whole, peaks, plans[-1].budget_bytes if plans else None


def _batch(rank: int, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + number)
    x = torch.randn(ROWS, 16, generator=generator)
    return x, torch.randint(0, CLASSES, (ROWS,), generator=generator)


def _whole(parameter: Tensor) -> Tensor:
    gather: Callable[[], Tensor] | None = getattr(parameter, "full_tensor", None)
    return parameter if gather is None else gather()


def _peak_of(
    step: Callable[[], None],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, Tensor],
) -> int:
    """Most that this process has allocated in a step, with what was there."""
    optimizer.zero_grad()
    state = [value for own in optimizer.state.values() for value in own.values()]
    there = [*model.parameters(), *model.buffers(), *state, *batch]
    held_bytes = sum(getattr(t, "_local_tensor", t).nbytes for t in there)
    with recording() as memory:
        memory.mark("begin")
        step()
        memory.mark("end")
    peak_bytes, _where = memory.peak("begin", "end", held_bytes=held_bytes)
    return peak_bytes
