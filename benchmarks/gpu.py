"""Peak and step time on a GPU: recomputing, offloading and both, beside what others do.

Each network trains by each peer and within budgets from its full peak to the least feasible
one, one contender after the other: each is planned, measured and freed, with its host memory,
before the next, so that pinned memory is that of one plan. Its steps are timed in turns with
those of the network as it is (or checkpointed, where that does not fit), which needs no host
memory. A contender that fails is a row with the reason; rows are saved as they come.

A network has ``--seconds``: what does not fit in is left out, and a row says so. The whole
script takes less than 8 minutes.
Run: python -m benchmarks.gpu [network …] [--seconds S] [--rounds N]
     python -m benchmarks.gpu --device cpu --tiny    (the same code, where there is no GPU)
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

import fxremat
from benchmarks.common import RESULTS, interleave, show
from benchmarks.devices import describe, device_named, forget, host_waits
from benchmarks.gpu_networks import NETWORKS, Network
from benchmarks.gpu_peers import PEERS, Call, NotHereError
from benchmarks.gpu_report import COLUMNS, draw, line
from benchmarks.rows import Row, Rows, failure
from fxremat.costs.measured.measure import seconds_of
from fxremat.errors import BudgetError, HostMemoryError
from fxremat.ir import Copy
from fxremat.units import format_bytes

Mode = Literal["auto", "only", False]
Made = tuple[Call, fxremat.CompiledModule | None]

MODES: dict[Mode, str] = {False: "rotor", "only": "offload only", "auto": "offload auto"}

MIDDLE, QUARTER = 0.5, 0.25
"""Budgets, as shares of the way from the least feasible one of all modes to the full peak."""

Share = float | Literal["min", "checkpoint per block"]
"""Of the way from the least feasible budget to the full peak; or one of the two ends of what is
compared: the least, or the peak of ``torch.utils.checkpoint``."""

CHECKPOINTED: Share = "checkpoint per block"

PLANS: tuple[tuple[Mode, Share], ...] = (
    ("auto", "min"), (False, CHECKPOINTED), ("auto", MIDDLE), (False, MIDDLE),
    ("auto", CHECKPOINTED), (False, "min"), ("only", MIDDLE), ("auto", 1.0),
    (False, QUARTER), ("auto", QUARTER), ("only", "min"), ("only", QUARTER),
)  # fmt: skip
"""What is planned, the most telling first: time may not suffice for all."""

BASES = ("eager", "checkpoint per block")
"""With whose steps all others are timed in turns: the first of these that runs."""

LEAST_ROUNDS, TIMING_SHARE = 3, 0.05
"""Of a network's time, what timing one contender may take beyond three rounds."""


class Bench:
    """One network on one device.

    Args:
        network: what trains.
        device: where.
        limit_s: nothing is begun that would not end within this, if it took as long as the
            contender before it.
        rounds: most steps of each contender that are timed.
        add: called with each row.
    """

    def __init__(
        self,
        network: Network,
        device: torch.device,
        *,
        limit_s: float,
        rounds: int,
        add: Callable[[Row], None],
    ) -> None:
        self.network = network
        self.device = device
        self._limit_s = limit_s
        self._rounds = rounds
        self._add = add
        self._begin_s = time.perf_counter()
        self._latest_s = 0.0
        self._base: tuple[str, Callable[[], None]] | None = None
        self._known: tuple[int, int] | None = None
        self._peer_bytes: dict[str, int] = {}
        self.model = network.build().to(device, network.dtype).train()
        self.inputs = network.inputs_on(device)

    def run(self) -> None:
        """Train in every way, one after the other."""
        for name, peer in PEERS.items():
            self._row(name, lambda peer=peer: (peer(self.network, self.model, self.inputs), None))
        for mode, share in PLANS:
            name = f"{MODES[mode]}, {_share_name(share)}"
            self._row(name, lambda m=mode, s=share: self._plan(m, s))

    def _row(self, what: str, make: Callable[[], Made]) -> None:
        """Measure a contender, or note why there are no figures of it; then free it."""
        row: Row = {"network": self.network.name, "what": what}
        begin_s = time.perf_counter()
        if begin_s - self._begin_s + self._latest_s > self._limit_s:
            row["skipped"] = f"left out after {self._limit_s:.0f} s"
        else:
            row |= self._tried(what, make)
            self._latest_s = time.perf_counter() - begin_s
        self._add(row)
        self.model.zero_grad(set_to_none=True)
        # Nothing holds the contender any more but a base, which has no host memory.
        forget(self.device)

    def _tried(self, what: str, make: Callable[[], Made]) -> Row:
        try:
            return self._measured(what, make)
        except NotHereError as reason:
            return {"skipped": str(reason)}
        except BudgetError as error:
            least = format_bytes(error.least_budget_bytes or 0)
            return {"skipped": f"least feasible budget is {least}", **_causes(error)}
        except (HostMemoryError, torch.OutOfMemoryError) as error:
            return {"skipped": f"does not fit: {failure(error)['failed']}", **_causes(error)}
        except Exception as error:  # one contender's failure is a row, whatever it is
            if any("OutOfMemoryError" in cause for cause in failure(error)["causes"]):
                return {"skipped": f"does not fit: {failure(error)['failed']}", **_causes(error)}
            return failure(error)

    def _plan(self, mode: Mode, share: Share) -> Made:
        """Through fxremat.

        Raises:
            NotHereError: the budget is a share of a way whose ends are not known, or a peer's peak
                that is not known.
        """
        budget: int | float | str = share
        if share == CHECKPOINTED:
            if share not in self._peer_bytes:
                raise NotHereError(f"the peak of {share} is not known")
            budget = self._peer_bytes[share]
        if isinstance(share, float) and share < 1.0:
            if self._known is None:
                raise NotHereError("the least feasible budget is not known")
            least, full = self._known
            budget = least + int(share * (full - least))
        compiled = fxremat.compile(self.model, self.inputs, budget, offload=mode)
        if self._known is None:
            plan = compiled.plan
            self._known = plan.least_budget_bytes, plan.baseline_peak_bytes
        return compiled, compiled

    def _measured(self, what: str, make: Callable[[], Made]) -> Row:
        begin_s = time.perf_counter()
        call, compiled = make()
        row: Row = {"made_s": time.perf_counter() - begin_s}
        step = self._step(call)
        step()
        step_s = seconds_of(step, device=self.device)
        row |= self._memory(step)
        row |= self._timed(what, step, step_s)
        if compiled is None:
            self._peer_bytes[what] = row["peak_bytes"]
        if compiled is not None:
            row |= _plan_figures(compiled, step, peak_bytes=row["peak_bytes"])
        if self._base is None and what in BASES:
            self._base = what, step
        return row

    def _step(self, call: Call) -> Callable[[], None]:
        model, inputs = self.model, self.inputs

        def step() -> None:
            model.zero_grad(set_to_none=True)
            call(*inputs).backward()

        return step

    def _timed(self, what: str, step: Callable[[], None], step_s: float) -> Row:
        """Seconds of some steps, in turns with those of the base."""
        fitting = int(TIMING_SHARE * self._limit_s / max(step_s, 1e-9))
        rounds = min(self._rounds, max(LEAST_ROUNDS, fitting))
        steps = {what: step}
        if self._base is not None:
            steps[self._base[0]] = self._base[1]
        runs = {name: (lambda s=s: seconds_of(s, device=self.device)) for name, s in steps.items()}
        found = interleave(runs, rounds=rounds)
        row: Row = {"seconds": found[what]}
        if self._base is not None:
            row |= {"base": self._base[0], "base_seconds": found[self._base[0]]}
        return row

    def _memory(self, step: Callable[[], None]) -> Row:
        row: Row = {}
        self.model.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            row["unaccounted_bytes"] = self._unaccounted_bytes()
        row["peak_bytes"] = fxremat.measure_step(self.model, step).peak_bytes
        if self.device.type == "cuda":
            # What was asked for: less than the allocator counts where it did not split a block.
            stats = torch.cuda.memory_stats(self.device)
            row["requested_peak_bytes"] = stats["requested_bytes.all.peak"]
            row["reserved_peak_bytes"] = stats["reserved_bytes.all.peak"]
            row["host_waits"] = host_waits(step)
        return row

    def _unaccounted_bytes(self) -> int:
        """Allocated between steps, less parameters, buffers and inputs: libraries' workspaces."""
        held: tuple[Tensor, ...] = (
            *self.model.parameters(), *self.model.buffers(), *self.inputs
        )  # fmt: skip
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
        known = sum(-(-nbytes // 512) * 512 for nbytes in storages.values())
        return torch.cuda.memory_allocated(self.device) - known


def _plan_figures(
    compiled: fxremat.CompiledModule, step: Callable[[], None], *, peak_bytes: int
) -> Row:
    step()  # its plan is the latest now
    plan = compiled.plan
    row: Row = {
        "budget_bytes": plan.budget_bytes,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "predicted_reserved_bytes": plan.predicted_reserved_bytes,
        "host_bytes": plan.host_bytes,
        "kept": peak_bytes <= plan.budget_bytes,
        "predicted_s": plan.predicted_s,
        "transfers": sum(isinstance(e.op, Copy) for e in plan.timeline.events),
    }
    trace = compiled.trace_step(step)
    row["traced_s"] = trace.measured.makespan_s
    if row["transfers"]:
        row["overlap"] = trace.overlap
        row["predicted_overlap"] = replace(trace, measured=trace.predicted).overlap
    return row


def _causes(error: Exception) -> Row:
    return {"reason": failure(error)["failed"], "causes": failure(error)["causes"]}


def _share_name(share: Share) -> str:
    if isinstance(share, str):
        return "least budget" if share == "min" else f"peak of {share}"
    return "full budget" if share == 1.0 else f"budget at {share:.0%} of the way"


def bench(name: str, options: argparse.Namespace, device: torch.device, results: Rows) -> None:
    """All rows of one network, shown as well."""
    begin_s, before = time.perf_counter(), len(results.rows)
    forget(device)
    try:
        network = NETWORKS[name](tiny=options.tiny)
        found = Bench(
            network, device, limit_s=options.seconds, rounds=options.rounds, add=results.add
        )
        found.run()
    except Exception as error:  # no network is the end of the others
        missing = isinstance(error, ImportError | torch.OutOfMemoryError)
        reason = failure(error)["failed"]
        results.add({"network": name, "what": "", "skipped" if missing else "failed": reason})
    show(name, COLUMNS, [line(row) for row in results.rows[before:]])
    print(f"{name}: {time.perf_counter() - begin_s:.0f} s", flush=True)


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
    device = device_named(options.device, remedy="--device cpu --tiny tries the script")
    name = "gpu" if device.type == "cuda" else "gpu-tried-on-cpu"
    results = Rows(name, describe(device), folder=options.results)
    for network in names:
        bench(network, options, device, results)
    results.save()
    draw(results.rows, options.results / f"{name}.png")
    planned = [row for row in results.rows if "kept" in row]
    over = sum(not row["kept"] for row in planned)
    failed = sum("failed" in row for row in results.rows)
    print(f"{len(planned)} plans, {over} above their budget; {failed} contenders failed")
    if over or failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
