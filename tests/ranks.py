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
from unittest.mock import patch

import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, gelu, linear
from torch.nn.parallel import DistributedDataParallel

import fxremat
from tests.loops.memory import recording, sizes_known

BLOCKS, ROWS, WIDTH, CLASSES = 6, 512, 64, 50

TAUGHT, STEPS = 5, 7
"""Steps before those whose peak is measured, and all of them."""

LONGEST = timedelta(seconds=120)
"""That a process waits for another."""

PATIENCE_S = 15.0
"""That fxremat lets one wait."""


class Gathered(nn.Linear):
    """Its parameters are sharded, and gathered in its forward."""

    @staticmethod
    def of(linear: nn.Linear, mesh: DeviceMesh) -> Gathered:
        made = Gathered(linear.in_features, linear.out_features)
        made.weight = nn.Parameter(distribute_tensor(linear.weight.data, mesh, [Shard(0)]))
        made.bias = nn.Parameter(distribute_tensor(linear.bias.data, mesh, [Shard(0)]))
        return made

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self._whole(self.weight), self._whole(self.bias))

    @staticmethod
    def _whole(shard: Any) -> Tensor:
        whole: Tensor = shard.redistribute(placements=[Replicate()]).to_local(
            grad_placements=[Partial("avg")]
        )
        return whole


class Block(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.act = act
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(self.act(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor] = gelu) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(16, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(Block(act) for _ in range(BLOCKS))

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
        codes: what each plan emits.
    """

    parameters: list[Tensor]
    peaks_bytes: list[int]
    budget_bytes: int | None
    warned: list[str]
    codes: list[str]


def trained(how: str, budget: Any, *, processes: int = 2, **options: Any) -> list[Trained]:
    """Train in several processes.

    More than two add up in an order that depends on buckets, and these on the order in which
    gradients are there: without a plan ``DistributedDataParallel`` gets captured graphs, too.

    Args:
        how: ``ddp_around``: what is compiled is wrapped; ``ddp_inside``: what is wrapped is
            compiled; ``fsdp``: each block, and the model, is sharded; ``tensor_parallel``: layers
            of the blocks are spread; ``gathered``: they are sharded, and gathered in the graph.
        budget: ``None``: it is trained as it is.
        processes: how many.
        **options: of :func:`_steps`.

    Returns what each of them has seen, by rank.
    """
    found = _run(how, budget, processes, options)
    for own in found:
        assert isinstance(own, Trained), own
    return found


def refused(how: str, other: str, *, processes: int = 2) -> list[str | None]:
    """What each of several processes raises; ``None``: it is gone.

    Args:
        how: see :func:`trained`.
        other: what the last of them has: another ``batch``, ``graph`` or ``budget``; it is
            ``late`` by all of its life, or ``killed`` while it measures.
        processes: how many.
    """
    return _run(how, 0.6, processes, {"other": other})


def _run(how: str, budget: Any, processes: int, options: dict[str, Any]) -> list[Any]:
    """What each process leaves; ``None``: nothing."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        arguments = processes, port, how, budget, folder, options
        context = multiprocessing.get_context("spawn")
        started = [
            context.Process(target=_train, args=(rank, *arguments)) for rank in range(processes)
        ]
        for process in started:
            process.start()
        for process in started:
            process.join()
        paths = [Path(folder) / f"{rank}.pt" for rank in range(processes)]
        return [torch.load(p, weights_only=False) if p.exists() else None for p in paths]


def _train(
    rank: int,
    processes: int,
    port: int,
    how: str,
    budget: Any,
    folder: str,
    options: dict[str, Any],
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=processes, timeout=LONGEST)
    uncut = torch._dynamo.config.patch(optimize_ddp=False)
    try:
        with warnings.catch_warnings(record=True) as told, sizes_known(), uncut:
            warnings.simplefilter("always")
            found: Any = _steps(rank, processes, how, budget, **options)
        for warning in told:
            if issubclass(warning.category, fxremat.BudgetWarning):
                found.warned.append(str(warning.message))
    except fxremat.FxrematError as error:
        found = f"{type(error).__name__}: {error}"
    torch.save(found, Path(folder) / f"{rank}.pt")
    distributed.barrier()  # the first one keeps what the others read
    distributed.destroy_process_group()


def _steps(
    rank: int,
    processes: int,
    how: str,
    budget: Any,
    *,
    other: str = "",
    ranks: fxremat.Ranks | None = None,
) -> Trained:
    other = other if rank == processes - 1 else ""
    torch.manual_seed(0)
    model: nn.Module = Model(torch.tanh if other == "graph" else gelu)
    if how == "fsdp":
        mesh = init_device_mesh("cpu", (processes,))
        for module in (*model.blocks, model):  # type: ignore[misc]
            fully_shard(module, mesh=mesh)
    elif how == "tensor_parallel":
        mesh = init_device_mesh("cpu", (processes,))
        for block in model.blocks:  # type: ignore[union-attr]
            ways = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh, ways)
    elif how == "gathered":
        mesh = init_device_mesh("cpu", (processes,))
        for block in model.blocks:  # type: ignore[union-attr]
            for name in ("up", "down"):
                setattr(block, name, Gathered.of(getattr(block, name), mesh))
    elif how == "ddp_inside":
        model = DistributedDataParallel(model)
    called: Any = model
    if other == "late":
        os._exit(1)
    rows = ROWS // 2 if other == "batch" else ROWS
    if other == "budget":
        budget += 0.1
    if budget is not None:
        if other == "killed":
            patch("fxremat.frontend.captured.measure_line", lambda *_, **_k: os._exit(1)).start()
        ranks = ranks or fxremat.Ranks(timeout=PATIENCE_S)
        called = fxremat.compile(model, _batch(rank, 0, rows)[0], budget, ranks=ranks)
    elif how != "fsdp":
        called = torch.compile(model, backend="aot_eager")
    compiled = called
    if how == "ddp_around":
        called = DistributedDataParallel(called)
    optimizer = torch.optim.AdamW(model.parameters())
    peaks = []
    for number in range(STEPS):
        torch.manual_seed(processes * number + rank)
        x, y = _batch(rank, number, rows)

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
    codes = [plan.forward_code + plan.backward_code for plan in plans]
    return Trained(whole, peaks, plans[-1].budget_bytes if plans else None, [], codes)


def _batch(rank: int, number: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + number)
    x = torch.randn(rows, 16, generator=generator)
    return x, torch.randint(0, CLASSES, (rows,), generator=generator)


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
