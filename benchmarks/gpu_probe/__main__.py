"""What the project assumes about GPUs, measured beside the assumption.

* ``memory``: what the allocator hands out and takes from the device, single requests and random
  sequences beside the simulator; what libraries keep once they have run, in each thread.
* ``operations``: device, strides and bits of attention, products, convolutions and BatchNorm,
  beside their traces, here and in autograd's thread.
* ``pinning``: seconds to have host memory, and bandwidth each way and both.
* ``stress``: steps with late copies, other streams and dropped forwards, bits compared.

Each part has a process of its own, with its own settings of the allocator: a part that crashes
or takes too long leaves its rows. docs/on-a-gpu.md says what each figure decides.
Run: python -m benchmarks.gpu_probe [--section SECTION …] [--seconds S]
     python -m benchmarks.gpu_probe --device cpu --tiny    (what applies where there is no GPU)
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.common import RESULTS, show
from benchmarks.devices import ALLOCATORS, describe, device_named
from benchmarks.gpu_probe.operations import operations
from benchmarks.gpu_probe.pinning import pinning
from benchmarks.gpu_probe.probe import Probe
from benchmarks.gpu_probe.rounding import rounding
from benchmarks.gpu_probe.stress import stress
from benchmarks.gpu_probe.workspaces import workspaces
from benchmarks.rows import Row, Rows, run_part

SECONDS = 120.0
"""For each section."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one process asks.

    Attributes:
        section: of which it is.
        run: asks the questions.
        allocator: the allocator's settings.
        on_cuda_only: nothing of it applies to a CPU.
    """

    section: str
    run: Callable[[Probe], None]
    allocator: str = "default"
    on_cuda_only: bool = False


PARTS = {
    "memory": Part("memory", rounding),
    "memory, expandable": Part("memory", rounding, "expandable", on_cuda_only=True),
    "workspaces": Part("memory", workspaces),
    "workspaces, warmed": Part("memory", workspaces, on_cuda_only=True),
    "operations": Part("operations", operations),
    "pinning": Part("pinning", pinning),
    "stress": Part("stress", stress),
    "stress, expandable": Part("stress", stress, "expandable", on_cuda_only=True),
}

SECTIONS = list(dict.fromkeys(part.section for part in PARTS.values()))

COLUMNS = ("what", "found", "assumed", "holds")


def line(row: Row) -> list[str]:
    """A line of the table."""
    for why in ("skipped", "failed"):
        if why in row:
            return [row["what"], row[why][:60], "", "" if why == "skipped" else "FAILED"]
    holds = {True: "yes", False: "NO", None: ""}[row["holds"]]
    return [row["what"], row["found"][:60], row["assumed"][:30], holds]


def run_all(options: argparse.Namespace, device: torch.device) -> Sequence[Row]:
    """Each part in its process; returns all rows."""
    name = "gpu_probe" if device.type == "cuda" else "gpu_probe-tried-on-cpu"
    results = Rows(name, describe(device), folder=options.results)
    passed_on = ["--device", str(device), *(["--tiny"] if options.tiny else [])]
    for section in options.section:
        end_s = time.monotonic() + options.seconds
        for part_name, part in PARTS.items():
            if part.section != section or (part.on_cuda_only and device.type != "cuda"):
                continue
            before, left_s = len(results.rows), max(end_s - time.monotonic(), 10.0)
            inside = ("--inside", part_name, "--seconds")
            why = run_part(
                ["-m", "benchmarks.gpu_probe", *passed_on, *inside, str(left_s)],
                settings=ALLOCATORS[part.allocator],
                seconds=left_s + 20,  # what is asked last may end after its time
                add=results.add,
            )
            if why is not None:
                results.add({"part": part_name, "what": "the rest", "failed": why})
            show(part_name, COLUMNS, [line(row) for row in results.rows[before:]])
    results.save()
    return results.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--section", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each section")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the file goes")
    parser.add_argument("--inside", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = device_named(options.device, remedy="--device cpu --tiny asks what applies")
    if options.inside:
        end_s = time.monotonic() + options.seconds
        probe = Probe(options.inside, device, options.tiny, end_s, options.rows)
        PARTS[options.inside].run(probe)
        return
    rows = run_all(options, device)
    wrong = sum(row.get("holds") is False for row in rows)
    failed = sum("failed" in row for row in rows)
    print(f"{len(rows)} answers: {wrong} assumptions do not hold, {failed} questions failed")


if __name__ == "__main__":
    main()
