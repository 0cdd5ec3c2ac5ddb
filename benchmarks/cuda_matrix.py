"""The promise on CUDA, cell by cell: bytes at every step, bits, host memory.

A cell is a network, a budget, how memory is saved, a setting of torch's allocator, and whether the
budget is for what is allocated or for what is reserved. Each is planned, then trained for six
steps in every order of streams that the stand-in for CUDA has (tests/cuda_stand_in; a GPU has
one order). Told is the most that was allocated or reserved at any step, whose peaks are reset
before, whether loss, gradients and buffers of each step have the bits of
``torch.compile(backend="aot_eager")``, and the most host memory that was locked. Where a share is
below the least, the cell is run at the least that the error tells.

The executors are ``eager``, ``inductor``, whose Triton kernels compute nothing on the stand-in, so
that bytes and races are checked and bits are not, and ``interpreted``: Inductor's kernels, run by
Triton's interpreter in small networks. Their bits must be those of the fused step with everything
kept.

Each setting of the allocator, and the interpreter, has a process of its own; rows are saved as they
come. Also told is
what the least budget on reserved costs beside that on allocated.
Run: tests/cuda_stand_in/run.sh .venv-cuda python -m benchmarks.cuda_matrix [network …]
``--executor inductor interpreted`` writes ``fused_matrix.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import fxremat
from benchmarks.common import RESULTS, budgeted, show
from benchmarks.devices import ALLOCATORS, describe, deterministic_kernels, forget
from benchmarks.rows import Row, Rows, append, failure, run_part
from fxremat.errors import BudgetError
from fxremat.units import format_bytes
from tests.efforts import QUICK
from tests.models.bits import first_difference
from tests.models.gpt import GPTConfig, gpt_entry
from tests.models.hf import llama
from tests.models.images import image_entry
from tests.models.reference import compile_reference, move
from tests.models.resnet import ResNet
from tests.models.zoo import Args, Kwargs, ZooModel, drawn_once, seeded, sum_of_squares

CUDA = torch.device("cuda", 0)
STEPS = 6
ORDERS = ("eager", "late", "early", "random:1", "random:2", "random:3")

Executor = Literal["eager", "inductor", "interpreted"]
EXECUTORS: tuple[Executor, ...] = ("eager", "inductor", "interpreted")
Budget = float | Literal["min"]
BUDGETS: tuple[Budget, ...] = (1.0, 0.6, 0.4, "min")
OFFLOADS: dict[str, Any] = {"no": False, "auto": "auto", "only": "only"}
COUNTED = ("allocated", "reserved")

SECONDS = 7200.0
"""For each setting of the allocator."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What is planned for.

    Attributes:
        network: by its name.
        counted: what the budget is for.
        offload: a name of ``OFFLOADS``.
        budget: a share of the peak with everything kept, or the least.
        executor: whose kernels, and who computes them.
    """

    network: str
    counted: str
    offload: str
    budget: Budget
    executor: Executor = "eager"


def _mlp(*, width: int, blocks: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        return nn.Sequential(
            *(
                nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
                for _ in range(blocks)
            )
        )

    return drawn_once(build)


def _mlp_entry(name: str, *, rows: int, width: int, blocks: int) -> ZooModel:
    def sample(seed: int) -> tuple[Args, Kwargs]:
        with seeded(seed):
            return (torch.randn(rows, width),), {}

    return ZooModel(name, _mlp(width=width, blocks=blocks), sample, sum_of_squares)


_GPT = gpt_entry(
    "gpt",
    GPTConfig(vocabulary=128, context=64, width=64, heads=4, blocks=3, dropout=0.1),
    batch=16,
    length=64,
)
NETWORKS: dict[str, ZooModel] = {
    # Activations in the allocator's large pool.
    "mlp": _mlp_entry("mlp", rows=1536, width=128, blocks=6),
    "gpt": _GPT,
    "llama": llama(
        "llama", vocabulary=256, width=128, inner=256, layers=3, batch=16, length=64,
        heads=4, key_value_heads=2,
    ),
    # Sizes that are no multiples of what the allocator rounds up to.
    "resnet": image_entry(
        "resnet", drawn_once(lambda: ResNet(width=4, classes=10)), batch=6, size=61, classes=10
    ),
    # Hardly anything but what the allocator rounds up.
    "small": _mlp_entry("small", rows=24, width=24, blocks=5),
    "gpt_bf16": replace(_GPT, name="gpt_bf16", autocast=torch.bfloat16),
}  # fmt: skip

TINY: dict[str, ZooModel] = {
    "tiny_mlp": _mlp_entry("tiny_mlp", rows=48, width=32, blocks=3),
    "tiny_gpt": gpt_entry(
        "tiny_gpt",
        GPTConfig(vocabulary=16, context=8, width=16, heads=2, blocks=2, dropout=0.1),
        batch=2,
        length=8,
    ),
    "tiny_resnet": image_entry(
        "tiny_resnet",
        drawn_once(lambda: ResNet(depths=(1, 1, 1, 1), width=2, classes=4)),
        batch=2,
        size=21,
        classes=4,
    ),
}
"""Small enough for kernels in Python."""

ALL = NETWORKS | TINY


def cells(networks: Sequence[str], executor: Executor = "eager") -> list[Cell]:
    """All of the matrix."""
    return [Cell(*of, executor) for of in itertools.product(networks, COUNTED, OFFLOADS, BUDGETS)]


@dataclass(frozen=True, slots=True)
class Steps:
    """What some steps took and left.

    Attributes:
        allocated_bytes, reserved_bytes: the most of each step.
        left: loss, gradients and buffers after each step, on the CPU.
    """

    allocated_bytes: list[int]
    reserved_bytes: list[int]
    left: list[Any]


def train(entry: ZooModel, model: nn.Module, call: Callable[..., Any]) -> Steps:
    """Steps with other data and other random numbers each time, from the buffers as built."""
    first = dict(entry.build().named_buffers())
    for name, buffer in model.named_buffers():
        buffer.copy_(first[name])
    found = Steps([], [], [])
    for seed in range(STEPS):
        model.zero_grad(set_to_none=True)
        args, kwargs = move(entry.sample(seed), CUDA)
        torch.manual_seed(seed)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        with entry.context("cuda"):
            loss = entry.loss(call(*args, **kwargs))
        loss.backward()
        torch.cuda.synchronize()
        found.allocated_bytes.append(torch.cuda.max_memory_allocated())
        found.reserved_bytes.append(torch.cuda.max_memory_reserved())
        found.left.append(_left_by(model, loss))
    model.zero_grad(set_to_none=True)
    return found


def _left_by(model: nn.Module, loss: Tensor) -> list[Tensor | None]:
    gradients = (p.grad for p in model.parameters())
    return [_on_the_cpu(x) for x in (loss.detach(), *gradients, *model.buffers())]


def _on_the_cpu(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().to("cpu", copy=True)


@cache
def reference(name: str) -> Steps:
    """The same steps through ``aot_eager``."""
    entry = ALL[name]
    order("eager")
    forget(CUDA)
    model = entry.build().to(CUDA)
    found = train(entry, model, compile_reference(entry, model))
    del model
    forget(CUDA)
    return found


@cache
def fused_reference(name: str, effort: fxremat.Effort) -> Steps:
    """The same steps by Inductor's kernels with everything kept."""
    entry = ALL[name]
    order("eager")
    forget(CUDA)
    model = entry.build().to(CUDA)
    cell = Cell(name, "allocated", "no", 1.0, "interpreted")
    found = train(entry, model, _compiled(entry, model, cell, 1.0, None, effort))
    del model
    forget(CUDA)
    return found


def measure(cell: Cell, orders: Sequence[str], effort: fxremat.Effort) -> Row:
    """Plan and train a cell; return its row.

    Ensures: what was planned is freed, whatever happens.
    """
    begin_s = time.perf_counter()
    try:
        # Of the step as well: a plan is for the kernels that it was measured with.
        with deterministic_kernels(), host_memory() as told:
            name = cell.network
            expected = fused_reference(name, effort) if interpreted(cell) else reference(name)
            row, call = _measured(cell, expected, orders, effort)
            if (locked := told()) is not None:
                row |= {"locked_bytes": locked.now_bytes, "most_locked_bytes": locked.most_bytes}
            del call  # its host memory was still there
        return row | {"seconds": time.perf_counter() - begin_s}
    except Exception as error:  # a row, too: the others are still to come
        return failure(error)
    finally:
        order("eager")
        forget(CUDA)


def _measured(
    cell: Cell, expected: Steps, orders: Sequence[str], effort: fxremat.Effort
) -> tuple[Row, nn.Module]:
    """The row so far, and what was compiled.

    Raises:
        FxrematError: it cannot be, although the budget is one that an error told.
    """
    # Half of what a step takes with everything kept: it binds for some, and not for others.
    host_limit = None if cell.offload == "no" else max(expected.allocated_bytes) // 2
    entry = ALL[cell.network]
    model = entry.build().to(CUDA)
    row: Row = {"host_limit_bytes": host_limit}
    try:
        call = _compiled(entry, model, cell, cell.budget, host_limit, effort)
    except BudgetError as error:
        row["told_least_bytes"] = error.least_budget_bytes
    if "told_least_bytes" in row:
        gc.collect()  # the error's frames hold its sample
        call = _compiled(entry, model, cell, row["told_least_bytes"], host_limit, effort)
    plan = call.plan
    row |= {
        "budget_bytes": plan.budget_bytes,
        "least_bytes": plan.least_budget_bytes,
        "full_bytes": plan.baseline_peak_bytes,
        "predicted_bytes": plan.predicted_peak_bytes,
        "predicted_reserved_bytes": plan.predicted_reserved_bytes,
        "host_bytes": plan.host_bytes,
        "over": [],
        "other_bits": [],
        "faults": faults(),
    }
    # A few small tensors that nobody told of: what they take lies in segments with all else.
    beside = [torch.ones(1024, device=CUDA) for _ in range(2 * (cell.counted == "reserved"))]
    worst = {"allocated": 0, "reserved": 0}
    for name in orders:
        order(name)
        found = train(entry, model, call)
        taken = {"allocated": found.allocated_bytes, "reserved": found.reserved_bytes}
        for counted, each in taken.items():
            worst[counted] = max(worst[counted], *each)
        row["over"] += [
            f"{name}, step {i}: {nbytes - plan.budget_bytes}"
            for i, nbytes in enumerate(taken[cell.counted])
            if nbytes > plan.budget_bytes
        ]
        difference = first_difference(expected.left, found.left)
        if difference is not None and cell.executor != "inductor":
            row["other_bits"].append(f"{name}: {difference}")
        row["faults"] += faults()
    if cell.executor == "inductor" and stand_in() is not None:
        row |= {"races": races_of(lambda: train(entry, model, call)), "units": len(plan.fused)}
    row["host_bytes"] = call.plan.host_bytes  # later steps may have another plan
    del beside
    return row | {f"measured_{counted}_bytes": most for counted, most in worst.items()}, call


def interpreted(cell: Cell) -> bool:
    """Whether Python computes the kernels."""
    return cell.executor == "interpreted"


def races_of(steps: Callable[[], object]) -> list[str]:
    """The accesses of some steps that nothing orders, in words."""
    from tests.on_cuda.happens_before import checked

    order("eager")
    with checked() as found:
        steps()
    return found.races


def _compiled(
    entry: ZooModel,
    model: nn.Module,
    cell: Cell,
    budget: int | Budget,
    host_limit: int | None,
    effort: fxremat.Effort,
) -> Any:
    args, kwargs = move(entry.sample(0), CUDA)
    offload = OFFLOADS[cell.offload]
    how: dict[str, Any] = {
        "offload": offload and fxremat.HostMemory(offload, limit=host_limit),
        "executor": "eager" if cell.executor == "eager" else "inductor",
        "effort": effort,
    }
    sample, written = fxremat.Sample(args, kwargs), budgeted(budget, cell.counted)
    with entry.context("cuda"):
        return fxremat.compile(model, sample, written, loss=entry.loss, **how)


def order(name: str) -> None:
    """From now on streams run in that order; a GPU knows of none."""
    if stand_in() is not None:
        kind, _, seed = name.partition(":")
        stand_in().mode(kind, int(seed or 0))


def faults() -> list[str]:
    """What the stand-in saw go wrong since it was asked last."""
    return [] if stand_in() is None else stand_in().faults()


@cache
def stand_in() -> Any:
    """Its module; ``None`` on a GPU."""
    if not os.environ.get("STAND_IN_LIB"):
        return None
    return __import__("cuda_stand_in")


@dataclass(frozen=True, slots=True)
class Locked:
    """Host memory that is locked, of the process.

    Attributes:
        now_bytes: at the end.
        most_bytes: at once.
    """

    now_bytes: int
    most_bytes: int

    @staticmethod
    def of(lines: Sequence[str]) -> Locked:
        """By a log of the stand-in."""
        now, most = 0, 0
        held: dict[int, int] = {}
        for line in lines:
            if '"cudaHost' in line:
                call = json.loads(line)
                if call["call"] == "cudaHostUnregister":
                    now -= held.pop(call["at"], 0)
                else:
                    held[call["at"]] = call["bytes"]
                    now += call["bytes"]
                    most = max(most, now)
        return Locked(now, most)


@contextlib.contextmanager
def host_memory() -> Iterator[Callable[[], Locked | None]]:
    """Tells what was locked since; ``None`` on a GPU."""
    if stand_in() is None:
        yield lambda: None
        return
    with tempfile.TemporaryDirectory(prefix="fxremat-log-") as folder:
        log = Path(folder) / "log"
        stand_in().log_to(str(log))

        def told() -> Locked:
            stand_in().log_to("")
            return Locked.of(log.read_text().splitlines())

        try:
            yield told
        finally:
            stand_in().log_to("")


def holds(row: Row) -> bool:
    """Whether bytes, bits and host memory are as promised: the plan's, and no more meanwhile."""
    if "failed" in row:
        return False
    least = row.get("told_least_bytes")
    return (
        not (row["over"] or row["other_bits"] or row["faults"] or row.get("races"))
        and (least is None or row["budget_bytes"] == least)
        and row.get("locked_bytes", row["host_bytes"]) == row["host_bytes"]
        and row.get("most_locked_bytes", 0) <= (row["host_limit_bytes"] or 0)
    )


def run(
    chosen: Sequence[Cell],
    allocator: str,
    *,
    add: Callable[[Row], None],
    orders: Sequence[str] = ORDERS,
    quick: bool = False,
    seconds: float = SECONDS,
) -> str | None:
    """Measure cells in a process with a setting of the allocator; return why it ended too early.

    Cells that are interpreted are measured in another process. With ``quick``, schedules are
    searched less long.
    """
    stopped = []
    for by_python, its_own in itertools.groupby(sorted(chosen, key=interpreted), key=interpreted):
        told = json.dumps([list(asdict(cell).values()) for cell in its_own])
        why = run_part(
            [
                "-m",
                "benchmarks.cuda_matrix",
                "--inside",
                told,
                "--orders",
                *orders,
                *["--quick"] * quick,
            ],
            settings={**ALLOCATORS[allocator], **({"TRITON_INTERPRET": "1"} if by_python else {})},
            seconds=seconds,
            add=lambda row: add({"allocator": allocator, **row}),
        )
        stopped += [] if why is None else [why]
    return "; ".join(stopped) or None


COLUMNS = (
    "network", "executor", "allocator", "budget on", "offload", "budget", "bytes", "least",
    "predicted", "measured", "host", "locked", "promise",
)  # fmt: skip


def line(row: Row) -> list[str]:
    """A line of the table."""
    names = [row[k] for k in ("network", "executor", "allocator", "counted", "offload", "budget")]
    if "failed" in row:
        return [*names, row["failed"][:30], *[""] * (len(COLUMNS) - len(names) - 1)]
    reserved = row["counted"] == "reserved"
    sizes = (
        row["budget_bytes"],
        row["least_bytes"],
        row["predicted_reserved_bytes" if reserved else "predicted_bytes"],
        row[f"measured_{row['counted']}_bytes"],
        row["host_bytes"],
        row.get("most_locked_bytes", 0),
    )
    return [*names, *map(format_bytes, sizes), "kept" if holds(row) else "BROKEN"]


def prices(rows: Sequence[Row]) -> list[list[str]]:
    """What the least budget on reserved is beside that on allocated, of each network."""
    least = {
        (r["network"], r["allocator"], r["offload"], r["counted"]): r["least_bytes"]
        for r in rows
        if r["budget"] == "min" and "failed" not in r
    }
    return [
        [*key[:3], format_bytes(least[key]), format_bytes(nbytes), f"{nbytes / least[key]:.2f}"]
        for *of, counted in least
        if counted == "reserved"
        for key, nbytes in [((*of, "allocated"), least[(*of, counted)])]
        if key in least
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*", metavar="network", help=", ".join(ALL))
    parser.add_argument("--executor", nargs="+", choices=EXECUTORS, default=["eager"])
    parser.add_argument("--allocator", nargs="+", choices=ALLOCATORS, default=list(ALLOCATORS))
    parser.add_argument("--counted", nargs="+", choices=COUNTED, default=COUNTED)
    parser.add_argument("--offload", nargs="+", choices=OFFLOADS, default=list(OFFLOADS))
    parser.add_argument("--budgets", nargs="+", choices=[str(b) for b in BUDGETS])
    parser.add_argument("--orders", nargs="+", default=ORDERS)
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the file goes")
    parser.add_argument("--quick", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        torch.set_num_threads(1)
        effort = fxremat.Effort(**QUICK) if options.quick else fxremat.Effort()
        for of in json.loads(options.inside):
            cell = Cell(*of)
            append(options.rows, {**asdict(cell), **measure(cell, options.orders, effort)})
        return
    if unknown := set(options.networks) - set(ALL):
        parser.error(f"unknown networks {sorted(unknown)}: there are {', '.join(ALL)}")
    name = "cuda_matrix" if options.executor == ["eager"] else "fused_matrix"
    results = Rows(name, describe(CUDA), folder=options.results)

    def add(row: Row) -> None:
        results.add(row)
        print(*(f"{x:>12}" for x in line({**row, "budget": str(row["budget"])})), flush=True)

    chosen = [
        cell
        for executor in options.executor
        for cell in cells(
            options.networks or list(TINY if executor == "interpreted" else NETWORKS), executor
        )
        if cell.counted in options.counted
        and cell.offload in options.offload
        and (options.budgets is None or str(cell.budget) in options.budgets)
    ]
    stopped = []
    for allocator in options.allocator:
        why = run(chosen, allocator, add=add, orders=options.orders)
        stopped += [] if why is None else [f"{allocator}: {why}"]
    rows = results.rows
    show("Least budgets", ("network", "allocator", "offload", *COUNTED, "ratio"), prices(rows))
    broken = [row for row in rows if not holds(row)]
    print(f"{len(rows)} cells, {len(broken)} of them broken", *stopped)
    if broken or stopped:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
