"""Training in several processes on one machine: what each of them sees."""

from __future__ import annotations

import os
import socket
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
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
from torch.nn.functional import gelu, linear
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

import fxremat
from tests.loops.memory import recording, sizes_known
from tests.loops.subjects import SUBJECTS
from tests.models.zoo import Args, Kwargs, ZooModel, drawn_once, seeded, sum_of_squares

ROWS, WIDTH = 512, 64

TAUGHT, STEPS = 5, 7
"""Steps before those whose peak is measured, and all of them."""

LONGEST = timedelta(seconds=120)
"""That a process waits for another."""

PATIENCE_S = 15.0
"""That fxremat lets one wait for a process that does not come."""


class Gathered(nn.Linear):
    """Its parameters are sharded, and gathered in its forward."""

    @staticmethod
    def of(linear: nn.Linear, mesh: DeviceMesh) -> Gathered:
        made = Gathered(linear.in_features, linear.out_features, bias=linear.bias is not None)
        for name, own in linear.named_parameters():
            setattr(made, name, nn.Parameter(distribute_tensor(own.data, mesh, [Shard(0)])))
        return made

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self._whole(self.bias)
        return linear(x, self._whole(self.weight), bias)

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
        self.stem, self.head = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 50)
        self.blocks = nn.ModuleList(Block(act) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _entry(act: Callable[[Tensor], Tensor]) -> ZooModel:
    def sample(seed: int) -> tuple[Args, Kwargs]:
        with seeded(seed):
            return (torch.randn(ROWS, 16),), {}

    return ZooModel("mlp", drawn_once(lambda: Model(act)), sample, sum_of_squares, draws=True)


@dataclass(frozen=True, slots=True)
class Subject:
    """What is trained.

    Attributes:
        entry: the model, its batches and its loss.
        blocks: where its blocks are.
        across, along: layers of a block that are spread over processes by their outputs, and by
            their inputs.
    """

    entry: ZooModel
    blocks: str
    across: tuple[str, ...] = ()
    along: tuple[str, ...] = ()


MODELS = {
    "mlp": Subject(_entry(gelu), "blocks", ("up",), ("down",)),
    "other": Subject(_entry(torch.tanh), "blocks", ("up",), ("down",)),
    "gpt": Subject(SUBJECTS["gpt"], "blocks", ("mlp.0",), ("mlp.2",)),
    "llama": Subject(
        SUBJECTS["llama"], "model.layers", ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)
    ),
    "resnet": Subject(SUBJECTS["resnet"], ""),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One training.

    Attributes:
        budget: ``None``: as it is; a share: of the most that any process took so before; what
            else ``fxremat.compile`` takes.
        other: what the last process has: another ``batch``, ``graph`` or ``budget``; it is
            ``late`` by all of its life, or ``killed`` while it measures.
        budgets: what is done where they differ.
        options: further ones of ``fxremat.compile``.
    """

    budget: Any
    other: str = ""
    budgets: str = "same"
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Trained:
    """What one process has seen of one training.

    Attributes:
        parameters: after all steps, whole ones.
        peaks_bytes: of the last steps.
        gathers: how often they gathered something, each.
        budget_bytes: what they had to keep to; ``None``: nothing is planned.
        host_bytes: most that a plan takes of the host.
        codes: what each plan emits, without comments, which tell peaks of this process.
        warned: what fxremat has said.
    """

    parameters: list[Tensor]
    peaks_bytes: list[int]
    gathers: list[int]
    budget_bytes: int | None
    host_bytes: int
    codes: list[str]
    warned: list[str]


def trained(
    how: str, cases: Sequence[Case], *, model: str = "mlp", processes: int = 2
) -> list[list[Any]]:
    """Train in several processes, one case after the other.

    More than two add up in an order that depends on buckets, and these on the order in which
    gradients are there: without a plan ``DistributedDataParallel`` gets captured graphs, too.

    Args:
        how: ``ddp_around``: what is compiled is wrapped; ``ddp_inside``: what is wrapped is
            compiled; ``fsdp``: each block, and the model, is sharded; ``hybrid``: among half of
            the processes; ``tensor_parallel``: layers of the blocks are spread; ``gathered``: they
            are sharded, and gathered in the graph.
        cases: which.
        model: see :data:`MODELS`.
        processes: how many.

    Returns by rank, for each case that it has gone through, what it has seen, or the error.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = processes, beginning(), how, cases, model, folder
        context = multiprocessing.get_context("spawn")
        started = [
            context.Process(target=_train, args=(rank, *arguments)) for rank in range(processes)
        ]
        for process in started:
            process.start()
        for process in started:
            process.join()
        paths = [Path(folder) / f"{rank}.pt" for rank in range(processes)]
        return [torch.load(p, weights_only=False) if p.exists() else [] for p in paths]


def beginning() -> str:
    """Where the processes of a new group meet."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{found.getsockname()[1]}"


def _train(
    rank: int,
    processes: int,
    where: str,
    how: str,
    cases: Sequence[Case],
    model: str,
    folder: str,
) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=where, rank=rank, world_size=processes, timeout=LONGEST
    )
    found: list[Any] = []
    for case in cases:
        torch._dynamo.reset()
        before = [own for own in found if isinstance(own, Trained)][:1]
        found.append(_told(_Job(rank, processes, how, case, model), before))
        torch.save(found, Path(folder) / f"{rank}.pt")
    distributed.barrier()  # the first one keeps what the others read
    distributed.destroy_process_group()


def _told(job: _Job, before: list[Trained]) -> Trained | str:
    uncut = torch._dynamo.config.patch(optimize_ddp=False)
    try:
        with warnings.catch_warnings(record=True) as told, sizes_known(), uncut:
            warnings.simplefilter("always")
            found = job.run(before)
    except fxremat.FxrematError as error:
        return f"{type(error).__name__}: {error}"
    over = (w for w in told if issubclass(w.category, fxremat.BudgetWarning))
    found.warned.extend(str(warning.message) for warning in over)
    return found


@dataclass(frozen=True, slots=True)
class _Job:
    """One training in one of several processes."""

    rank: int
    processes: int
    how: str
    case: Case
    model: str

    @property
    def other(self) -> str:
        """What this process has that others have not."""
        return self.case.other if self.rank == self.processes - 1 else ""

    @property
    def subject(self) -> Subject:
        return MODELS["other" if self.other == "graph" else self.model]

    def run(self, before: list[Trained]) -> Trained:
        """Train.

        Args:
            before: how it went as it is.
        """
        torch.manual_seed(0)
        model = self._spread(self.subject.entry.build().train())
        called: Any = model
        if self.other == "late":
            os._exit(1)
        if self.other == "killed":
            patch("fxremat.frontend.captured.measure_line", lambda *_, **_k: os._exit(1)).start()
        if self.case.budget is not None:
            waits = self.case.other in ("late", "killed")  # for nobody; else machines may be slow
            budgets: Any = self.case.budgets
            ranks = fxremat.Ranks(budgets=budgets, timeout=PATIENCE_S if waits else LONGEST)
            sample = fxremat.Sample(*self._batch(0))
            options = dict(self.case.options)
            called = fxremat.compile(model, sample, self._budget(before), ranks=ranks, **options)
        elif self.how not in ("fsdp", "hybrid"):
            called = torch.compile(model, backend="aot_eager")
        peaks, gathers = map(list, zip(*self._steps(called, model), strict=True))
        whole = [_whole(p).detach().clone() for p in model.parameters()]
        plans = called.plans if isinstance(called, fxremat.CompiledModule) else ()
        codes = [_uncommented(plan.forward_code + plan.backward_code) for plan in plans]
        if not plans:
            return Trained(whole, peaks, gathers, None, 0, [], [])
        taken = plans[-1].budget_bytes, max(plan.host_bytes for plan in plans)
        return Trained(whole, peaks, gathers, *taken, codes, [])

    def _spread(self, model: nn.Module) -> nn.Module:
        blocks = model.get_submodule(self.subject.blocks).children() if self.subject.blocks else ()
        if self.how == "ddp_inside":
            return DistributedDataParallel(model)
        if self.how == "ddp_around":
            return model
        shape = (2, self.processes // 2) if self.how == "hybrid" else (self.processes,)
        names = ("replicas", "shards")[-len(shape) :]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        if self.how in ("fsdp", "hybrid"):
            for module in (*(blocks or model.children()), model):
                if any(True for _ in module.parameters()):
                    fully_shard(module, mesh=mesh)
            return model
        for block in blocks:
            if self.how == "tensor_parallel":
                ways: dict[str, Any] = {name: ColwiseParallel() for name in self.subject.across}
                ways |= {name: RowwiseParallel() for name in self.subject.along}
                parallelize_module(block, mesh, ways)
            else:
                for name in (*self.subject.across, *self.subject.along):
                    owner, _, own = name.rpartition(".")
                    layers = block.get_submodule(owner)
                    setattr(layers, own, Gathered.of(getattr(layers, own), mesh))
        return model

    def _budget(self, before: list[Trained]) -> Any:
        budget = self.case.budget
        if self.other == "budget":
            budget += 0.1
        if not (isinstance(budget, float) and before):
            return budget
        most = torch.tensor([max(before[0].peaks_bytes)])
        distributed.all_reduce(most, distributed.ReduceOp.MAX)
        return int(budget * int(most))

    def _batch(self, number: int) -> tuple[Args, Kwargs]:
        """Another one for each process, but where they share each layer's work."""
        own = 0 if self.how == "tensor_parallel" else self.rank
        sample = self.subject.entry.sample(100 * own + number)
        if self.other == "batch":
            sample = tree_map(lambda tensor: tensor[: len(tensor) // 2], sample)
        return sample

    def _steps(self, called: Any, model: nn.Module) -> list[tuple[int, int]]:
        """All of them; peaks and gathers of the last ones."""
        if self.how == "ddp_around":
            called = DistributedDataParallel(called)
        optimizer = torch.optim.AdamW(model.parameters())
        seen = []
        for number in range(STEPS):
            args, kwargs = self._batch(number)
            own = 0 if self.how == "tensor_parallel" else self.rank
            torch.manual_seed(self.processes * number + own)

            def step(args: Args = args, kwargs: Kwargs = kwargs) -> None:
                optimizer.zero_grad()
                self.subject.entry.loss(called(*args, **kwargs)).backward()

            if number < TAUGHT:
                step()
            else:
                seen.append(_seen_of(step, model, optimizer, tree_leaves((args, kwargs))))
            optimizer.step()
        return seen


def _uncommented(code: str) -> str:
    return "\n".join(line.partition("  # ")[0] for line in code.splitlines())


def _whole(parameter: Tensor) -> Tensor:
    gather: Callable[[], Tensor] | None = getattr(parameter, "full_tensor", None)
    return parameter if gather is None else gather()


def _seen_of(
    step: Callable[[], None],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Iterable[Tensor],
) -> tuple[int, int]:
    """Most that this process has allocated in a step, with what was there, and its gathers."""
    optimizer.zero_grad()
    state = [value for own in optimizer.state.values() for value in own.values()]
    there = [*model.parameters(), *model.buffers(), *state, *batch]
    held_bytes = sum(getattr(t, "_local_tensor", t).nbytes for t in there)
    with recording() as memory:
        memory.mark("begin")
        step()
        memory.mark("end")
    peak_bytes, _where = memory.peak("begin", "end", held_bytes=held_bytes)
    gathers = [name for *_, name in memory.spans if name.endswith("::all_gather_into_tensor")]
    return peak_bytes, len(gathers)
