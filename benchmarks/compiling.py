"""Seconds to a first step with Inductor's kernels: fxremat beside ``torch.compile``.

Each run is a process of its own, first with an empty Inductor cache, then with what that left.
fxremat's seconds include measuring and planning; its own cache is off.
Run: python -m benchmarks.compiling [model …]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

from benchmarks.common import save, show
from benchmarks.steps import entry_of, fused, planned

MODELS = ("gpt16", "llama16", "vit", "resnet50", "densenet121", "unet", "convnext")
TOOLS = ("torch.compile", "fxremat")


def first_step(name: str, tool: str) -> dict[str, Any]:
    """Seconds until a step has run, and how many units there are."""
    torch.set_num_threads(1)
    entry = entry_of(name)
    begin = time.perf_counter()
    if tool == "fxremat":
        step, compiled = planned(entry, 1.0, executor="inductor")
        units = len(compiled.plan.fused)
    else:
        step, units = fused(entry), 0
    step.run()
    return {"seconds": time.perf_counter() - begin, "units": units}


def in_a_process(name: str, tool: str, cache: str) -> dict[str, Any]:
    """The same in a new process."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "FXREMAT_CACHE": "0"}
    command = [sys.executable, "-W", "ignore", "-m", __spec__.name, "--one", tool, name]  # type: ignore[name-defined]
    ran = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--one", choices=TOOLS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(first_step(options.models[0], options.one)))
        return
    found: dict[str, Any] = {}
    rows = []
    for name in options.models:
        own = found[name] = {}
        for tool in TOOLS:
            with tempfile.TemporaryDirectory() as cache:
                own[tool] = [in_a_process(name, tool, cache) for _ in range(2)]
        save("compiling", found, quiet=True)
        theirs, ours = ([run["seconds"] for run in own[tool]] for tool in TOOLS)
        rows.append(
            [
                name,
                *(f"{s:.1f}" for s in (*theirs, *ours)),
                f"{ours[0] / theirs[0]:.2f}",
                f"{ours[1] / theirs[0]:.2f}",
                str(own["fxremat"][0]["units"]),
            ]
        )
    show(
        "seconds to the first step",
        ["model", *("torch.compile", "again"), *("fxremat", "again"), "÷", "again ÷ cold", "units"],
        rows,
    )


if __name__ == "__main__":
    main()
