"""The promise on a GPU: bytes and bits of three networks at four budgets, by each allocator.

GPT (blocks of GPT-2 medium, dropout), Llama 1B of Hugging Face and ResNet-50, at their full
peak, at 0.6 and 0.4 of it, and at the least feasible budget. Each row has what was predicted
and what was measured: most bytes allocated, most bytes reserved, and whether loss, gradients
and buffers of a step have the bits of the plan that keeps everything. That plan runs twice: a
kernel that gives other bits by itself is told apart. Attention is the flash kernel where it
fits. Torch is asked for deterministic kernels, and strictly: merely warned of others, flash
attention's backward is not deterministic. So step times here are not those of ``benchmarks.gpu``.

Each setting of the allocator has a process of its own; rows are saved as they come.
Run: python -m benchmarks.gpu_promise [network …] [--allocator default expandable]
     python -m benchmarks.gpu_promise --executor inductor     (its kernels at all budgets)
     python -m benchmarks.gpu_promise --device cpu --tiny     (where there is no GPU)
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import fxremat
from benchmarks.common import RESULTS, budgeted, show
from benchmarks.devices import (
    ALLOCATORS,
    describe,
    deterministic_kernels,
    device_named,
    forget,
)
from benchmarks.gpu_networks import PROMISED, Network
from benchmarks.rows import Row, Rows, append, failure, run_part
from fxremat.costs.measured.measure import seconds_of
from fxremat.errors import BudgetError
from fxremat.units import format_bytes
from tests.models.bits import first_difference

Budget = float | Literal["min"]

BUDGETS: tuple[Budget, ...] = (1.0, 0.6, 0.4, "min")
"""The first keeps everything: the others are compared with it."""

SECONDS = 210.0
"""For each setting of the allocator."""

Bits = tuple[Tensor, ...]


class Promise:
    """One network on one device, at all budgets."""

    def __init__(
        self, network: Network, device: torch.device, kind: str, how: dict[str, Any]
    ) -> None:
        self._device = device
        self._counted, self._how = kind, how
        with torch.device(device):
            self._model = network.build().to(network.dtype).train()
        self._inputs = network.inputs_on(device)
        self._buffers = [b.detach().clone() for b in self._model.buffers()]
        self._expected: Bits | None = None

    @property
    def _counts_reserved(self) -> bool:
        """Whether the budget is for what the allocator takes; a CPU's takes nothing beside."""
        return self._counted == "reserved" and self._device.type == "cuda"

    def row(self, budget: Budget) -> Row:
        """Plan, run and measure.

        Ensures: what was planned is freed, whatever happens.
        """
        try:
            with deterministic_kernels():
                return self._measured(budget)
        except BudgetError as error:
            least = error.least_budget_bytes or 0
            return {"skipped": f"least: {format_bytes(least)}", "least_budget_bytes": least}
        except Exception as error:  # a row, too: the others are still to come
            return failure(error)
        finally:
            self._model.zero_grad(set_to_none=True)
            forget(self._device)

    def _measured(self, budget: Budget) -> Row:
        begin_s = time.perf_counter()
        call = fxremat.compile(
            self._model, self._inputs, budgeted(budget, self._counted), **self._how
        )
        plan = call.plan
        row: Row = {
            "planned_s": time.perf_counter() - begin_s,
            "budget_bytes": plan.budget_bytes,
            "predicted_bytes": plan.predicted_peak_bytes,
            "predicted_reserved_bytes": plan.predicted_reserved_bytes,
            "predicted_s": plan.predicted_s,
            "host_bytes": plan.host_bytes,
        }
        step = self._step(call)
        step()  # libraries allocate what they keep when they are first used
        row |= self._bytes(step)
        counted = "measured_reserved_bytes" if self._counts_reserved else "measured_bytes"
        row["kept"] = row[counted] <= plan.budget_bytes
        row["seconds"] = min(seconds_of(step, device=self._device) for _ in range(3))
        return row | self._compared(call, budget)

    def _bytes(self, step: Callable[[], None]) -> Row:
        self._model.zero_grad(set_to_none=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()  # what is reserved is predicted for a fresh cache
        row: Row = {"measured_bytes": fxremat.measure_step(self._model, step).peak_bytes}
        if self._device.type == "cuda":
            stats = torch.cuda.memory_stats(self._device)
            row["measured_reserved_bytes"] = stats["reserved_bytes.all.peak"]
            row["requested_bytes"] = stats["requested_bytes.all.peak"]
        return row

    def _compared(self, call: nn.Module, budget: Budget) -> Row:
        found = self._bits(call)
        if budget == 1.0:
            self._expected = found
            found = self._bits(call)
        if self._expected is None:
            return {"bits": None, "difference": "the plan that keeps everything has failed"}
        difference = first_difference(self._expected, found)
        return {"bits": difference is None, "difference": difference}

    def _bits(self, call: nn.Module) -> Bits:
        """Loss, gradients and buffers of a step from the same state, on the CPU."""
        for buffer, value in zip(self._model.buffers(), self._buffers, strict=True):
            buffer.data.copy_(value)
        self._model.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        loss = call(*self._inputs)
        loss.backward()
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        found = (loss.detach(), *gradients, *self._model.buffers())
        return tuple(t.detach().to("cpu", copy=True) for t in found)

    def _step(self, call: nn.Module) -> Callable[[], None]:
        model, inputs = self._model, self._inputs

        def step() -> None:
            model.zero_grad(set_to_none=True)
            call(*inputs).backward()

        return step


def measure(options: argparse.Namespace, device: torch.device) -> None:
    """All rows of one allocator's settings, in this process."""
    if device.type == "cuda":
        # Of the fused kernels only the one whose bits are the same each time.
        cuda: Any = torch.backends.cuda
        cuda.enable_mem_efficient_sdp(False)
        cuda.enable_cudnn_sdp(False)
    torch.manual_seed(0)
    how = {
        "offload": "auto" if options.offload else False,
        "executor": options.executor,
    }
    for name in options.networks:
        about: Row = {"network": name, "allocator": options.inside}
        try:
            promise = Promise(PROMISED[name](tiny=options.tiny), device, options.budget_on, how)
        except Exception as error:  # the other networks are still to come
            append(options.rows, {**about, "budget": "", **failure(error)})
            continue
        for budget in BUDGETS:
            append(options.rows, {**about, "budget": str(budget), **promise.row(budget)})
        del promise
        forget(device)


COLUMNS = (
    "network", "allocator", "budget", "bytes", "predicted", "measured", "kept",
    "reserved: predicted", "measured", "same bits", "ms", "planned s",
)  # fmt: skip


def line(row: Row) -> list[str]:
    """A line of the table."""
    names = [row["network"], row["allocator"], row["budget"]]
    for why in ("skipped", "failed"):
        if why in row:
            return [*names, row[why][:30], *[""] * 8]
    sizes = [
        format_bytes(row[key]) if row.get(key) else ""
        for key in ("predicted_reserved_bytes", "measured_reserved_bytes")
    ]
    return [
        *names,
        *(format_bytes(row[f"{key}_bytes"]) for key in ("budget", "predicted", "measured")),
        "yes" if row["kept"] else "OVER",
        *sizes,
        "yes" if row["bits"] else "NO",
        f"{row['seconds'] * 1e3:.1f}",
        f"{row['planned_s']:.1f}",
    ]


def run(options: argparse.Namespace, device: torch.device) -> Sequence[Row]:
    """A process for each of the allocator's settings; returns all rows."""
    name = "gpu_promise" if device.type == "cuda" else "gpu_promise-tried-on-cpu"
    if options.budget_on != "allocated":
        name += f"-{options.budget_on}"
    if options.executor != "eager":
        name += f"-{options.executor}"
    how = {
        "offload": options.offload,
        "budget_on": options.budget_on,
        "executor": options.executor,
    }
    results = Rows(name, {**describe(device), **how}, folder=options.results)
    passed_on = ["--device", str(device), "--budget-on", options.budget_on]
    passed_on += ["--executor", options.executor]
    passed_on += [f"--{flag}" for flag in ("tiny", "offload") if getattr(options, flag)]
    allocators = options.allocator if device.type == "cuda" else ["default"]
    for allocator in allocators:
        why = run_part(
            ["-m", "benchmarks.gpu_promise", *options.networks, "--inside", allocator, *passed_on],
            settings={**ALLOCATORS[allocator], "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
            seconds=options.seconds,
            add=results.add,
        )
        if why is not None:
            results.add({"network": "", "allocator": allocator, "budget": "", "failed": why})
    results.save()
    return results.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*", metavar="network", help=", ".join(PROMISED))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script")
    parser.add_argument("--offload", action="store_true", help="with storages that travel, too")
    parser.add_argument("--budget-on", choices=("allocated", "reserved"), default="allocated")
    parser.add_argument("--executor", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--allocator", nargs="+", choices=ALLOCATORS, default=list(ALLOCATORS))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each allocator")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the file goes")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.networks) - set(PROMISED):
        parser.error(f"unknown networks {sorted(unknown)}: there are {', '.join(PROMISED)}")
    options.networks = options.networks or list(PROMISED)
    device = device_named(options.device, remedy="--device cpu --tiny tries the script")
    if options.inside:
        measure(options, device)
        return
    rows = run(options, device)
    show("The promise", COLUMNS, [line(row) for row in rows])
    broken = [row for row in rows if not holds(row)]
    print(f"{len(rows)} rows, {len(broken)} of them failed, above their budget or with other bits")
    if broken:
        raise SystemExit(1)


def holds(row: Row) -> bool:
    """Whether bytes and bits are as promised; an infeasible budget promises nothing."""
    return "skipped" in row or bool(row.get("kept") and row.get("bits"))


if __name__ == "__main__":
    main()
