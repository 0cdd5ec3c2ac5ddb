"""Measures contenders of ``benchmarks.gpu_llama``, one after the other, and saves their rows."""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import fxremat
from benchmarks.common import interleave, machine, save
from benchmarks.devices import describe, device_named
from benchmarks.gpu_llama_model import NETWORKS, Trained
from benchmarks.gpu_llama_order import Contender, Peer, Planned, Start, contenders, remaining
from benchmarks.gpu_llama_report import dense_flops, progress, summary
from benchmarks.gpu_llama_steps import (
    CacheFolder,
    Steps,
    call_of,
    device_answers,
    memory_budget,
    messages,
)
from benchmarks.gpu_peers import NotHereError
from benchmarks.rows import Row, Rows, append, failure, run_part
from fxremat.errors import BudgetError

ROUNDS = 5
"""Steps that are timed; as many come before them."""

WATCHED = 2
"""Steps before the timed ones whose reserved bytes are read."""

START_LIMIT_S = 240.0
"""Seconds after which another process that only makes a first step is ended."""

PLANNER = "the planner's loops compiled, once a machine"

_BEGIN_S = time.perf_counter()

_COMPILE_PLANNER = """
import torch, fxremat
blocks = [torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
          for _ in range(6)]
model = torch.nn.Sequential(*blocks)
for offload in (False, "auto"):
    fxremat.plan(model, torch.randn(512, 64), "min", loss=torch.sum, offload=offload)
"""


class DeviceLostError(Exception):
    """The device fails every call: no other row can be made in this process."""


@dataclass(slots=True)
class Saved:
    """The rows of all networks, saved after each.

    Attributes:
        rows: the file in ``--results``.
        copy: the folder of a second file, which a later call reads where the first is gone.
    """

    rows: Rows
    copy: Path

    def add(self, row: Row) -> None:
        """Add a row, in place of an earlier one of that name."""
        old = self.rows.rows
        old[:] = [r for r in old if (r["network"], r["what"]) != (row["network"], row["what"])]
        self.rows.add(row)
        save(self.rows.name, {**self.rows.about, "rows": old}, folder=self.copy, quiet=True)

    def of(self, network: str) -> list[Row]:
        """The rows of a network."""
        return [row for row in self.rows.rows if row["network"] == network]


def earlier_rows(name: str, folders: tuple[Path, ...], device: str | None) -> list[Row]:
    """What the first of these folders that has some rows has of such a device and such a torch.

    Args:
        name: of the file.
        folders: where it may be.
        device: the name of the device; nothing if any will do.
    """
    for folder in folders:
        file = folder / f"{name}.json"
        if not file.exists():
            continue
        saved: dict[str, Any] = json.loads(file.read_text())
        results, rows = saved["results"], list(saved["results"]["rows"])
        other = saved["machine"].get("torch") != machine()["torch"] or results["device"] != device
        if device is not None and other:
            print(f"rows of another device or torch are not kept: {file}")
            continue
        return rows
    return []


@dataclass
class Bench:
    """One network on the device.

    Attributes:
        trained: what trains.
        saved: where rows go.
        options: of the command line.
        planner: a process that compiles the planner's loops, until somebody waits for it.
    """

    trained: Trained
    saved: Saved
    options: argparse.Namespace
    planner: subprocess.Popen[bytes] | None = None
    _live: dict[str, Steps] = field(default_factory=dict)

    def run(self) -> int:
        """Measure what is missing; returns how many rows are left for lack of time.

        Raises:
            DeviceLostError: no other row can be made.
        """
        wanted = contenders(self.trained.name, self.trained.fixed_budget)
        missing = remaining(wanted, self.saved.of(self.trained.name), self.options.only)
        for index, contender in enumerate(missing):
            if _elapsed_s() > self.options.seconds:
                return len(missing) - index
            self._wait_for_planner(contender)
            self._say(f"{contender.name} …")
            row = self._row(contender)
            self.saved.add(row)
            self._say(progress(row))
            if "failed" in row and not device_answers():
                raise DeviceLostError(row["failed"])
            self._free()
        return 0

    def first_step(self, contender: Contender, budget_bytes: int | None) -> Row:
        """The first step of a contender, in a process that does nothing else."""
        row: Row = {}
        with messages(row):
            self._first_step(contender, row, budget_bytes)
        return row

    def _row(self, contender: Contender) -> Row:
        row: Row = {"network": self.trained.name, "what": contender.name}
        begin_s = time.perf_counter()
        try:
            with messages(row):
                if isinstance(contender, Start):
                    self._start(contender, row)
                else:
                    self._measure(contender, row)
        except NotHereError as reason:
            row["skipped"] = str(reason)
        except BudgetError as error:
            row["refused"] = " ".join(str(error).split())[:300]
            row["least_budget_bytes"] = error.least_budget_bytes
        except Exception as error:  # one contender's failure is a row, whatever it is
            row |= failure(error)
        row["row_s"] = time.perf_counter() - begin_s
        return row

    def _measure(self, contender: Peer | Planned, row: Row) -> None:
        budget_bytes = self._budget_bytes(contender, row)
        if "waits" in row:
            return
        row["before_bytes"] = torch.cuda.memory_allocated()
        steps, compiled = self._first_step(contender, row, budget_bytes)
        self._warm_up(steps)
        self._time(contender, steps, row)
        row |= {
            "peak_bytes": max(steps.peak_bytes),
            "promised_peak_bytes": max(steps.promised_peak_bytes),
            "reserved_peak_bytes": max(steps.reserved_peak_bytes),
            "seconds": list(steps.seconds),
            "update_s": list(steps.update_s),
            "items": self.trained.items,
            "flops": self.trained.flops,
            "most_flops": dense_flops(torch.cuda.get_device_name()),
        }
        if compiled is not None:
            plan: Any = compiled.plan
            row |= {
                "budget_bytes": plan.budget_bytes,
                "least_budget_bytes": plan.least_budget_bytes,
                "predicted_peak_bytes": plan.predicted_peak_bytes,
                "predicted_reserved_bytes": plan.predicted_reserved_bytes,
                "predicted_s": plan.predicted_s,
                "lower_bound_s": plan.lower_bound_s,
                "host_bytes": plan.host_bytes,
                "held": row["promised_peak_bytes"] <= plan.budget_bytes,
            }
        if isinstance(contender, Peer):
            self._live[contender.name] = steps

    def _budget_bytes(self, contender: Contender, row: Row) -> int | None:
        """Bytes of a budget that is a share of another's peak."""
        if not isinstance(contender, Planned) or isinstance(contender.budget, str):
            return None
        peak = self._of(contender.reference).get("peak_bytes")
        if peak is None:
            row["skipped"] = f"the peak of {contender.reference} is not there"
            row["waits"] = True
            return None
        return int(contender.budget * peak)

    def _first_step(
        self, contender: Contender, row: Row, budget_bytes: int | None
    ) -> tuple[Steps, fxremat.CompiledModule | None]:
        """Make a contender and run its first step; ``row`` gets the seconds."""
        caches = CacheFolder(_cache_variable(contender))
        compiled = None
        begin_s = time.perf_counter()
        if isinstance(contender, Planned):
            compiled = fxremat.compile(
                self.trained.model,
                self.trained.inputs,
                contender.budget if budget_bytes is None else budget_bytes,
                loss="own",
                optimizer=self.trained.optimizer,
                executor=contender.executor,
                offload="auto" if contender.offload else False,
            )
            steps = Steps(self.trained, compiled)
        else:
            assert isinstance(contender, Peer)
            steps = Steps(self.trained, call_of(contender, self.trained))
        row["made_s"] = time.perf_counter() - begin_s
        with memory_budget(contender.memory_budget if isinstance(contender, Peer) else None):
            steps.run()
        torch.cuda.synchronize()
        row["first_step_s"] = time.perf_counter() - begin_s
        row["cache"] = caches.state()
        return steps, compiled

    def _warm_up(self, steps: Steps) -> None:
        """The steps after the first one and before those that are timed."""
        for _ in range(ROUNDS - WATCHED - 1):
            steps.run()
        self._free()  # what is reserved then belongs to this contender
        for _ in range(WATCHED):
            steps.watch_reserved()

    def _time(self, contender: Peer | Planned, steps: Steps, row: Row) -> None:
        """Timed steps, in turns with those of the reference."""
        runs = {contender.name: steps.timed}
        reference = contender.reference if isinstance(contender, Planned) else None
        other = None if reference is None else self._reference(reference, row)
        if reference is not None and other is not None:
            steps.run()
            other.run()
            runs[reference] = other.timed
        found = interleave(runs, rounds=ROUNDS)
        if reference is not None and other is not None:
            row["reference"] = reference
            row["reference_seconds"] = found[reference]

    def _reference(self, name: str, row: Row) -> Steps | None:
        """The steps of a peer that has a row; they are made again where an earlier call made it."""
        if name not in self._live and "seconds" in self._of(name):
            wanted = contenders(self.trained.name, self.trained.fixed_budget)
            peer = next(each for each in wanted if each.name == name)
            again: Row = {}
            try:
                self._live[name], _ = self._first_step(peer, again, None)
                self._warm_up(self._live[name])
            except Exception as error:  # the row lacks a ratio then
                self._live.pop(name, None)
                row["reference_failed"] = failure(error)["failed"]
            row["reference_made_again"] = again
        return self._live.get(name)

    def _start(self, contender: Start, row: Row) -> None:
        """The first step in another process."""
        earlier = self._of(contender.of)
        if "seconds" not in earlier:
            row |= {"skipped": f"{contender.of} has no figures", "waits": True}
            return
        options = self.options
        found: list[Row] = []
        arguments = ["-m", "benchmarks.gpu_llama", "--network", self.trained.name]
        arguments += ["--inside", contender.of, "--cache", str(options.cache)]
        arguments += ["--device", options.device, *(["--small"] if options.small else [])]
        if "budget_bytes" in earlier:
            arguments += ["--budget", str(earlier["budget_bytes"])]
        self._free()
        for _ in range(2):  # what is new in such a process is in the caches the second time
            why = run_part(arguments, settings={}, seconds=START_LIMIT_S, add=found.append)
            if why is not None:
                raise RuntimeError(why)
            if "failed" in found[-1] or found[-1]["cache"] == "warm":
                break
        row |= {**found[-1], "earlier_starts": found[:-1]}

    def _of(self, name: str) -> Row:
        rows = {row["what"]: row for row in self.saved.of(self.trained.name)}
        return rows.get(name, {})

    def _wait_for_planner(self, contender: Contender) -> None:
        if self.planner is None or not isinstance(contender, Planned):
            return
        self._say(f"{PLANNER} …")
        code = self.planner.wait()
        self.planner = None
        row: Row = {"network": "", "what": PLANNER, "row_s": _elapsed_s()}
        self.saved.add(row if code == 0 else {**row, "failed": f"ended with status {code}"})

    def _free(self) -> None:
        """Give back what nobody holds any more; compiled references stay."""
        self.trained.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if device_answers():
            torch.cuda.empty_cache()

    def _say(self, text: str) -> None:
        print(f"[{_elapsed_s():6.1f} s] {self.trained.name}: {text}", flush=True)


def _cache_variable(contender: Contender) -> str | None:
    """The variable that names the cache folder of what a contender compiles."""
    if isinstance(contender, Planned):
        return "FXREMAT_CACHE"
    compiles = isinstance(contender, Peer) and contender.compiled
    return "TORCHINDUCTOR_CACHE_DIR" if compiles else None


def _elapsed_s() -> float:
    return time.perf_counter() - _BEGIN_S


def _start_planner() -> subprocess.Popen[bytes]:
    """Compile the planner's loops while the device is busy with others: numba keeps them."""
    settings = {**os.environ, "FXREMAT_CACHE": "0", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen([sys.executable, "-c", _COMPILE_PLANNER], env=settings)


def run(options: argparse.Namespace) -> None:
    """All that the command line asks for."""
    name = "gpu_llama-small" if options.small else "gpu_llama"
    folders = (options.results, options.cache)
    if options.summary:
        print(summary(earlier_rows(name, folders, None)))
        return
    device = device_named(options.device, remedy="tests/cuda_stand_in/README.md")
    if options.inside:
        _inside(options, device)
        return
    about = describe(device)
    keeps = options.skip_done or options.only
    rows = earlier_rows(name, folders, about["device"]) if keeps else []
    saved = Saved(Rows(name, about, folder=options.results, rows=rows), options.cache)
    planner: subprocess.Popen[bytes] | None = _start_planner()
    left = 0
    names = list(NETWORKS) if options.network == "all" else [options.network]
    try:
        for network in names:
            bench = Bench(NETWORKS[network](device, small=options.small), saved, options, planner)
            left += bench.run()
            planner = bench.planner
            del bench
            gc.collect()
            torch.cuda.empty_cache()
    except DeviceLostError as error:
        print(f"the device fails: {error}; call again with --skip-done")
    finally:
        if planner is not None:
            planner.kill()
            planner.wait()
    text = summary(saved.rows.rows)
    (options.results / f"{name}.md").write_text(text)
    print(text)
    print(f"{_elapsed_s():.0f} s; {left} rows are left, for a call with --skip-done", flush=True)


def _inside(options: argparse.Namespace, device: torch.device) -> None:
    """The first step of one contender, as a row for the process that waits for it.

    The process ends without Python's exit handlers: Inductor's waits for its compilers, which hang
    on torch 2.11 where a process that has found all kernels in the cache ends as they start.
    """
    trained = NETWORKS[options.network](device, small=options.small)
    (contender,) = (
        each
        for each in contenders(trained.name, trained.fixed_budget)
        if each.name == options.inside
    )
    saved = Saved(Rows("", {}), options.cache)
    try:
        append(options.rows, Bench(trained, saved, options).first_step(contender, options.budget))
    except Exception as error:
        append(options.rows, failure(error))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
