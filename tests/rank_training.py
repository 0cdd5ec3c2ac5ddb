"""Training in several processes on one machine: what each of them sees."""

from __future__ import annotations

import os
import socket
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import gelu
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import register_parametrization
from torch.utils._pytree import tree_leaves, tree_map

import fxremat
from tests.loops.memory import recording, sizes_known
from tests.loops.subjects import SUBJECTS
from tests.models.images import image_entry
from tests.models.resnet import ResNet
from tests.models.zoo import Args, Kwargs, ZooModel, drawn_once, seeded, sum_of_squares

ROWS, WIDTH = 512, 64

TAUGHT, STEPS = 5, 7
"""Steps before those whose peak is measured, and all of them."""

LONGEST = timedelta(seconds=120)
"""That a process waits for another."""

PATIENCE_S = 15.0
"""That fxremat lets one wait for a process that does not come."""


def gathered(shards: Any) -> Tensor:
    """All of them; the gradient of each is the mean of the processes'."""
    whole: Tensor = shards.redistribute(placements=[Replicate()]).to_local(
        grad_placements=[Partial("avg")]
    )
    return whole


class Gathered(nn.Module):
    """A parametrization: parameters are sharded, and gathered where they are read."""

    def forward(self, shards: Tensor) -> Tensor:
        return gathered(shards)


class Own(nn.Module):
    """A parametrization: parameters are sharded, and each process reads its own shard."""

    def forward(self, shard: Any) -> Tensor:
        own: Tensor = shard.to_local()
        return own


def sharded(layer: nn.Module, mesh: DeviceMesh, read: nn.Module) -> None:
    """Let a layer have shards of its parameters.

    Args:
        layer: it has parameters of its own.
        mesh: of one dimension.
        read: a parametrization, that makes of a shard what the layer computes with.
    """
    for name, own in list(layer.named_parameters(recurse=False)):
        shard = nn.Parameter(distribute_tensor(own.data, mesh, [Shard(0)]))
        layer.register_parameter(name, shard)
        register_parametrization(layer, name, read, unsafe=True)


class Channels(ParallelStyle):
    """Each process computes channels of its own, of which all are gathered.

    ``ColwiseParallel`` spreads no convolutions, and no rule of ``DTensor`` does by channels.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def given(_module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
            whole = DTensor.from_local(inputs[0], device_mesh, [Replicate()], run_check=False)
            found: Tensor = whole.to_local(grad_placements=[Partial()])
            return found

        def made(_module: nn.Module, _inputs: object, outputs: Tensor) -> Tensor:
            return gathered(DTensor.from_local(outputs, device_mesh, [Shard(1)], run_check=False))

        sharded(module, device_mesh, Own())
        module.register_forward_pre_hook(given)
        module.register_forward_hook(made)
        return module


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
        blocks: where its blocks are; none: its children are.
        spread: how layers of blocks are spread over processes, by patterns of their names.
        ends: how the embedding, and what makes the outputs, are.
    """

    entry: ZooModel
    blocks: str
    spread: Mapping[str, ParallelStyle]
    ends: Mapping[str, ParallelStyle] = field(default_factory=dict)


def _pairs(across: Iterable[str], along: Iterable[str]) -> dict[str, ParallelStyle]:
    """Layers that are spread by their outputs, and those that read these, by their inputs."""
    return {name: ColwiseParallel() for name in across} | {
        name: RowwiseParallel() for name in along
    }


def _ends(tokens: str, head: str) -> dict[str, ParallelStyle]:
    """An embedding that is spread by its rows, and what makes the outputs, by these."""
    return {
        tokens: RowwiseParallel(input_layouts=Replicate()),
        head: ColwiseParallel(output_layouts=Replicate()),
    }


_resnet = drawn_once(lambda: ResNet(width=8, classes=12))
"""All of its layers have outputs for four processes alike."""

_MLP = _pairs(["blocks.*.up"], ["blocks.*.down"])

MODELS = {
    "mlp": Subject(_entry(gelu), "blocks", _MLP),
    "other": Subject(_entry(torch.tanh), "blocks", _MLP),
    "gpt": Subject(
        SUBJECTS["gpt"],
        "blocks",
        _pairs(["blocks.*.mlp.0"], ["blocks.*.mlp.2"]),
        _ends("tokens", "head"),
    ),
    "llama": Subject(
        SUBJECTS["llama"],
        "model.layers",
        _pairs(
            ["model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj"],
            ["model.layers.*.mlp.down_proj"],
        ),
        _ends("model.embed_tokens", "lm_head"),
    ),
    "resnet": Subject(
        image_entry("resnet", _resnet, batch=16, size=64, classes=12),
        "",
        {"groups.*.*.[rse]*.0": Channels(), "head": Channels()},
    ),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One training.

    Attributes:
        budget: ``None``: as it is; a share: of the most that any process took so before; what
            else ``fxremat.compile`` takes.
        other: what the last process has: another ``batch``, ``graph`` or ``budget``, another batch
            in a ``later`` step, or an ``argument`` that is refused; it is ``late`` by all of its
            life, or ``killed`` while it measures. All of them may have ``shorter`` batches in a
            later step.
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
        first_code: what the first step's plan emits, without comments, which have peaks of this
            process; empty where steps of several graphs are planned at their first call.
        codes: the same of each plan after the last step.
        schedules: in which order each plan computes what, and what is kept.
        warned: what fxremat has said.
    """

    parameters: list[Tensor]
    peaks_bytes: list[int]
    gathers: list[int]
    budget_bytes: int | None
    host_bytes: int
    first_code: str
    codes: list[str]
    schedules: list[str]
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
            the processes; ``tensor_parallel``: layers of the blocks are spread; ``vocabulary``:
            the embedding and the head, too; ``broken``: in front of the second block something
            breaks the graph; ``both``: layers are spread over two, and each block and the model is
            sharded among the others; ``gathered``: they are sharded, and gathered in the graph.
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
    def spreads(self) -> bool:
        """Whether processes share each layer's work."""
        return self.how in ("tensor_parallel", "vocabulary", "broken", "both")

    @property
    def shards(self) -> bool:
        """Whether hooks gather parameters."""
        return self.how in ("fsdp", "hybrid", "both")

    @property
    def batches(self) -> int:
        """Which batches this process has: its own, but where they share each layer's work."""
        if self.how == "both":
            return self.rank // 2
        return 0 if self.spreads else self.rank

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
            patch("fxremat.graph.graph.measure_line", lambda *_, **_k: os._exit(1)).start()
        if self.case.budget is not None:
            waits = self.case.other in ("late", "killed")  # for nobody; else machines may be slow
            budgets: Any = self.case.budgets
            ranks: Any = fxremat.Ranks(budgets=budgets, timeout=PATIENCE_S if waits else LONGEST)
            if self.other == "argument":
                ranks = "all"
            sample = fxremat.Sample(*self._batch(0))
            options = dict(self.case.options)
            called = fxremat.compile(model, sample, self._budget(before), ranks=ranks, **options)
        elif not self.shards:
            called = torch.compile(model, backend="aot_eager")
        first_code = "".join(map(_code, _plans(called)))
        peaks, gathers = map(list, zip(*self._steps(called, model), strict=True))
        whole = [_whole(p).detach().clone() for p in model.parameters()]
        plans = _plans(called)
        codes = [_code(plan) for plan in plans]
        schedules = [f"{plan.schedule} {plan.decision}" for plan in plans]
        if not plans:
            return Trained(whole, peaks, gathers, None, 0, "", [], [], [])
        taken = plans[-1].budget_bytes, max(plan.host_bytes for plan in plans)
        return Trained(whole, peaks, gathers, *taken, first_code, codes, schedules, [])

    def _spread(self, model: nn.Module) -> nn.Module:
        if self.how == "ddp_inside":
            return DistributedDataParallel(model)
        if self.how == "ddp_around":
            return model
        shape = {
            "hybrid": (2, self.processes // 2),
            "both": (self.processes // 2, 2),
        }.get(self.how, (self.processes,))
        names = ("replicas", "shards")[-len(shape) :]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        spread = self.subject.spread
        if self.spreads:
            parallelize_module(model, mesh["shards"], dict(spread))
        if self.how == "vocabulary":
            parallelize_module(model, mesh, dict(self.subject.ends))
        if self.how == "gathered":
            for name, layer in list(model.named_modules()):
                if any(fnmatch(name, pattern) for pattern in spread):
                    sharded(layer, mesh, Gathered())
        blocks = list(model.get_submodule(self.subject.blocks).children())
        if self.how == "broken":
            blocks[1].register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
        if self.shards:
            over = mesh["replicas"] if self.how == "both" else mesh
            for module in (*blocks, model):
                if any(True for _ in module.parameters()):
                    fully_shard(module, mesh=over)
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
        sample = self.subject.entry.sample(100 * self.batches + number)
        later = self.other == "later" or self.case.other == "shorter"
        if self.other == "batch" or (later and number == TAUGHT - 1):
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
            torch.manual_seed(self.processes * number + self.batches)

            def step(args: Args = args, kwargs: Kwargs = kwargs) -> None:
                optimizer.zero_grad()
                self.subject.entry.loss(called(*args, **kwargs)).backward()

            if number < TAUGHT:
                step()
            else:
                seen.append(_seen_of(step, model, optimizer, tree_leaves((args, kwargs))))
            optimizer.step()
        return seen


def _plans(called: Any) -> Sequence[fxremat.Plan]:
    return called.plans if isinstance(called, fxremat.CompiledModule) else ()


def _code(plan: fxremat.Plan) -> str:
    """What a plan emits, without comments."""
    lines = (plan.forward_code + plan.backward_code).splitlines()
    return "\n".join(line.partition("  # ")[0] for line in lines)


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
