"""Peak and step time on a GPU: recomputing, offloading and both, beside what others do.

Each network trains by each peer and within budgets from its full peak to the least feasible
one. A network has ``--seconds``: what does not fit in is left out, and the table says so.
The whole script takes less than 8 minutes.
Run: python -m benchmarks.gpu [network …] [--seconds S] [--rounds N]
     python -m benchmarks.gpu --device cpu --tiny    (the same code, where there is no GPU)
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

import fxremat
from benchmarks.common import RESULTS, Spread, interleave, save, show
from benchmarks.gpu_networks import NETWORKS, Network
from benchmarks.gpu_peers import PEERS, Call, NotHereError
from fxremat.errors import BudgetError
from fxremat.ir import Copy
from fxremat.measure import seconds_of
from fxremat.units import format_bytes

Mode = Literal["auto", "only", False]

MODES: dict[Mode, str] = {False: "rotor", "only": "offload only", "auto": "offload auto"}

MIDDLE, QUARTER = 0.5, 0.25
"""Budgets, as shares of the way from the least feasible one of all modes to the full peak."""

PLANS: tuple[tuple[Mode, float | Literal["min"]], ...] = (
    ("auto", "min"), ("auto", MIDDLE), (False, MIDDLE), ("only", MIDDLE),
    (False, "min"), ("only", "min"), ("auto", 1.0),
    ("auto", QUARTER), (False, QUARTER), ("only", QUARTER),
)  # fmt: skip
"""What is planned, the most telling first: time may not suffice for all."""

MEASURING_SHARE = 0.2
"""Of a network's time, kept for measuring what was planned."""

WAITS = re.compile(r"cu(da)?(Stream|Device|Event|Ctx)Synchronize|cudaMemcpy$")
"""Calls by which the host waits for the device."""


@dataclass(slots=True)
class Contender:
    """A way to train a network, and what was found about it.

    Attributes:
        what: for the table.
        step: gradients dropped, forward, backward.
        compiled: the planned module, if it is one.
        row: what goes into the JSON file.
    """

    what: str
    step: Callable[[], None] | None
    compiled: fxremat.CompiledModule | None = None
    row: dict[str, Any] = field(default_factory=dict)


class Bench:
    """One network on one device."""

    def __init__(self, network: Network, device: torch.device, *, limit_s: float) -> None:
        self.network = network
        self.device = device
        self._limit_s = limit_s
        self._begin_s = time.perf_counter()
        self._longest_s = 0.0
        self.model = network.build().to(device, network.dtype).train()
        self.inputs = network.inputs_on(device)
        self.contenders: list[Contender] = []
        self.left_out: list[str] = []

    def run(self, rounds: int) -> list[dict[str, Any]]:
        """Train in every way, measure, and return a row for each."""
        for name, peer in PEERS.items():
            self._try(name, lambda peer=peer: (peer(self.network, self.model, self.inputs), None))
        self._plan_all()
        running = {c.what: c for c in self.contenders if c.step is not None}
        for contender in running.values():
            self._measure_memory(contender)
        seconds = {what: self._timed(c) for what, c in running.items()}
        for what, values in interleave(seconds, rounds=rounds).items():
            running[what].row["seconds"] = values
        for contender in running.values():
            if contender.compiled is not None:
                self._compare_with_plan(contender)
        return [{"network": self.network.name, "what": c.what, **c.row} for c in self.contenders]

    def _plan_all(self) -> None:
        least = full = 0
        for mode, share in PLANS:
            name = f"{MODES[mode]}, {_share_name(share)}"
            if not self._has_time():
                self.left_out.append(name)
                continue
            budget: int | str = "min" if share == "min" else least + int(share * (full - least))
            planned = self._try(name, lambda m=mode, b=budget: self._plan(m, b))
            if planned is None and not full:
                return  # nothing is known about this network
            if planned is not None:
                least = least or planned.plan.least_budget_bytes
                full = full or planned.plan.baseline_peak_bytes

    def _has_time(self) -> bool:
        """Whether one more plan, if it takes as long as the longest so far, leaves enough."""
        used_s = time.perf_counter() - self._begin_s + self._longest_s
        return used_s < (1 - MEASURING_SHARE) * self._limit_s

    def _plan(self, mode: Mode, budget: int | str) -> tuple[Call, fxremat.CompiledModule]:
        begin_s = time.perf_counter()
        try:
            compiled = fxremat.compile(self.model, self.inputs, budget, offload=mode)
        finally:
            self._longest_s = max(self._longest_s, time.perf_counter() - begin_s)
        return compiled, compiled

    def _try(
        self, what: str, make: Callable[[], tuple[Call, fxremat.CompiledModule | None]]
    ) -> fxremat.CompiledModule | None:
        """Add a contender, after two steps, or why there is none."""
        contender = Contender(what, None)
        self.contenders.append(contender)
        try:
            call, compiled = make()
            step = self._step(call)
            step()
            step()
        except NotHereError as reason:
            contender.row["skipped"] = str(reason)
        except BudgetError as error:
            least = format_bytes(error.least_budget_bytes or 0)
            contender.row["skipped"] = f"least feasible budget is {least}"
        except torch.OutOfMemoryError:
            contender.row["skipped"] = "does not fit into the device"
        else:
            contender.step, contender.compiled = step, compiled
        self.model.zero_grad(set_to_none=True)
        return contender.compiled

    def _step(self, call: Call) -> Callable[[], None]:
        model, inputs = self.model, self.inputs

        def step() -> None:
            model.zero_grad(set_to_none=True)
            call(*inputs).backward()

        return step

    def _timed(self, contender: Contender) -> Callable[[], float]:
        step = contender.step
        assert step is not None
        return lambda: seconds_of(step, device=self.device)

    def _measure_memory(self, contender: Contender) -> None:
        step, row = contender.step, contender.row
        assert step is not None
        self.model.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            row["unaccounted_bytes"] = self._unaccounted_bytes()
        row["peak_bytes"] = fxremat.measure_step(self.model, step).peak_bytes
        if self.device.type == "cuda":
            # What was asked for: less than the allocator counts where it did not split a block.
            stats = torch.cuda.memory_stats(self.device)
            row["requested_peak_bytes"] = stats["requested_bytes.all.peak"]
            row["host_waits"] = host_waits(step)

    def _unaccounted_bytes(self) -> int:
        """Allocated between steps, less parameters, buffers and inputs: libraries' workspaces."""
        held: tuple[Tensor, ...] = (
            *self.model.parameters(), *self.model.buffers(), *self.inputs
        )  # fmt: skip
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
        known = sum(-(-nbytes // 512) * 512 for nbytes in storages.values())
        return torch.cuda.memory_allocated(self.device) - known

    def _compare_with_plan(self, contender: Contender) -> None:
        compiled, row = contender.compiled, contender.row
        assert compiled is not None
        assert contender.step is not None
        contender.step()  # its plan is the latest now
        plan = compiled.plan
        row["budget_bytes"] = plan.budget_bytes
        row["predicted_peak_bytes"] = plan.predicted_peak_bytes
        row["host_bytes"] = plan.host_bytes
        row["kept"] = row["peak_bytes"] <= plan.budget_bytes
        row["predicted_s"] = plan.predicted_s
        trace = compiled.trace_step(contender.step)
        row["traced_s"] = trace.measured.makespan_s
        row["transfers"] = sum(isinstance(e.op, Copy) for e in plan.timeline.events)
        if row["transfers"]:
            row["overlap"] = trace.overlap
            row["predicted_overlap"] = replace(trace, measured=trace.predicted).overlap


def host_waits(step: Callable[[], object]) -> dict[str, int]:
    """How often the host waits for the device in a step, by the name of the CUDA call."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    step_range = torch.profiler.record_function("fxremat_step")
    # The profiler itself waits when it starts and stops: only this range counts.
    with torch.profiler.profile(activities=activities) as profile, step_range:
        step()
    events: list[Any] = list(profile.events())
    (span,) = [
        e.time_range
        for e in events
        if e.name == "fxremat_step" and e.device_type == torch.autograd.DeviceType.CPU
    ]
    found: dict[str, int] = {}
    for event in events:
        if WAITS.match(event.name) and span.start <= event.time_range.start <= span.end:
            found[event.name] = found.get(event.name, 0) + 1
    return found


def _share_name(share: float | Literal["min"]) -> str:
    if share == "min":
        return "least budget"
    return "full budget" if share == 1.0 else f"budget at {share:.0%} of the way"


def line(row: dict[str, Any], eager_s: float | None) -> list[str]:
    """A line of the table."""
    if "skipped" in row:
        return [row["what"], *[""] * 7, row["skipped"]]
    spread = Spread.of(row["seconds"])
    against = f"{spread.median / eager_s:.2f}" if eager_s else ""
    budget = format_bytes(row["budget_bytes"]) if "budget_bytes" in row else ""
    peak = format_bytes(row["peak_bytes"]) + ("" if row.get("kept", True) else " OVER")
    predicted = f"{row['predicted_s'] / spread.median:.2f}" if "predicted_s" in row else ""
    overlap = f"{row['overlap']:.0%}" if "overlap" in row else ""
    waits = str(sum(row["host_waits"].values())) if "host_waits" in row else ""
    return [row["what"], budget, peak, spread.text(1e3), against, predicted, overlap, waits, ""]


COLUMNS = ["", "budget", "peak", "step ms", "÷ eager", "predicted ÷", "overlap", "waits", "note"]


def eager_seconds(rows: list[dict[str, Any]]) -> float | None:
    """Median of the network's steps as it is; None if it does not fit."""
    for row in rows:
        if row["what"] == "eager" and "seconds" in row:
            return Spread.of(row["seconds"]).median
    return None


def draw(results: list[list[dict[str, Any]]], path: Path) -> None:
    """Step time over peak, a panel for each network."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no figure: matplotlib is not installed")
        return
    figure = Figure(figsize=(5 * len(results), 4.5), layout="constrained")
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    for axes, rows in zip(panels, results, strict=True):
        for kind, points in _series(rows):
            points.sort()
            style = "o-" if kind in MODES.values() else "s"
            axes.plot([x for x, _ in points], [y for _, y in points], style, label=kind)
        axes.set_xlabel("peak (GiB)")
        axes.set_ylabel("step (ms)")
        axes.set_title(rows[0]["network"], fontsize="small")
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    figure.savefig(path)
    print(f"wrote {path}")


def _series(rows: list[dict[str, Any]]) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if "seconds" in row:
            kind = row["what"].split(",")[0]
            point = (row["peak_bytes"] / 2**30, Spread.of(row["seconds"]).median * 1e3)
            found.setdefault(kind, []).append(point)
    yield from found.items()


def bench(name: str, options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """All rows of one network, shown as well."""
    begin_s = time.perf_counter()
    torch._dynamo.reset()
    try:
        network = NETWORKS[name](tiny=options.tiny)
    except ImportError as error:
        print(f"{name}: left out, {error}")
        return []
    try:
        found = Bench(network, device, limit_s=options.seconds)
        rows = found.run(options.rounds)
    except torch.OutOfMemoryError:
        print(f"{network.name}: left out, it does not fit into the device")
        return []
    eager_s = eager_seconds(rows)
    show(network.name, COLUMNS, [line(row, eager_s) for row in rows])
    if found.left_out:
        print(f"left out after {options.seconds:.0f} s: {'; '.join(found.left_out)}")
    print(f"{name}: {time.perf_counter() - begin_s:.0f} s", flush=True)
    del found
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rows


def describe(device: torch.device) -> dict[str, Any]:
    """What figures depend on beside the machine."""
    if device.type != "cuda":
        return {"device": "cpu", "threads": torch.get_num_threads()}
    allocator = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG")
    return {
        "device": torch.cuda.get_device_name(device),
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory,
        "cuda": torch.version.cuda,
        "settings": {name: os.environ[name] for name in allocator if name in os.environ},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*", metavar="network", help=", ".join(NETWORKS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script")
    parser.add_argument("--seconds", type=float, help="for each network: 85, or 10 if tiny")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--results", type=Path, default=RESULTS, help="where files go")
    options = parser.parse_args()
    options.seconds = options.seconds or (10.0 if options.tiny else 85.0)
    names = options.networks or list(NETWORKS)
    if unknown := set(names) - set(NETWORKS):
        parser.error(f"unknown networks {sorted(unknown)}: there are {', '.join(NETWORKS)}")
    device = torch.device(options.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            print("no CUDA device here: --device cpu --tiny tries the script", file=sys.stderr)
            raise SystemExit(2)
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    results = [rows for name in names if (rows := bench(name, options, device))]
    name = "gpu" if device.type == "cuda" else "gpu-tried-on-cpu"
    save(
        name,
        {**describe(device), "rows": [row for rows in results for row in rows]},
        folder=options.results,
    )
    if results:
        draw(results, options.results / f"{name}.png")
    planned = [row for rows in results for row in rows if "kept" in row]
    over = sum(not row["kept"] for row in planned)
    print(f"{len(planned)} plans, {over} above their budget")
    if over:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
