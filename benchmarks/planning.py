"""How long planning and importing take.

Run: python -m benchmarks.planning [model …]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

from benchmarks.common import save, show
from benchmarks.steps import entry_of, planned
from fxremat.costs.cache import COSTS
from fxremat.frontend import capture


def import_seconds() -> float:
    """Seconds that ``import fxremat.api`` adds to ``import torch``: median of five processes."""
    code = (
        "import time, torch; t = time.perf_counter(); import fxremat; fxremat.compile; "
        "print(time.perf_counter() - t)"
    )
    runs = [
        float(
            subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=True
            ).stdout
        )
        for _ in range(5)
    ]
    return statistics.median(runs)


def planning_seconds(name: str) -> dict[str, Any]:
    """Seconds from the captured graph to the emitted ones, with nothing measured before."""
    entry = entry_of(name)
    torch._dynamo.reset()
    COSTS.clear()
    taken: list[float] = []
    plan_step = capture.plan_step

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        result = plan_step(*args, **kwargs)
        taken.append(time.perf_counter() - begin)
        return result

    capture.plan_step = timed
    begin = time.perf_counter()
    try:
        _, compiled = planned(entry, 0.5)
    finally:
        capture.plan_step = plan_step
    total = time.perf_counter() - begin
    return {
        "model": name,
        "planning_s": taken[0],
        "total_s": total,
        "stages": len(compiled.plan.chain),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["gpt16", "llama8", "densenet121"])
    options = parser.parse_args()
    planned(entry_of("tied"), 1.0)  # the solver's kernels are loaded
    results = [planning_seconds(name) for name in options.models]
    seconds = import_seconds()
    show(
        "Planning time",
        ["model", "stages", "planning s", "with capture s"],
        [
            [r["model"], str(r["stages"]), f"{r['planning_s']:.2f}", f"{r['total_s']:.2f}"]
            for r in results
        ],
    )
    print(f"importing fxremat beyond torch: {seconds:.3f} s")
    save("planning", {"models": results, "import_s": seconds})


if __name__ == "__main__":
    main()
