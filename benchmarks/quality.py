"""Plans of recorded costs against those that an earlier planner made of the same costs.

Six models at ten budgets each, evenly from the least to just below keeping everything. Costs and
the earlier plans (peak and seconds) are in ``results/quality``, one file a model: nothing is
measured, so that any machine finds the same. Files are of one version of torch; the graph of
another may differ, and its file is left out then.
Run: python -m benchmarks.quality [model …] [--record NAME]
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, save, show
from benchmarks.least import unlabelled
from benchmarks.steps import entry_of
from fxremat.costs.measured.cost import Measured
from fxremat.ir import RecordedCosts
from fxremat.passes.joint.digest import digest
from fxremat.planner.context.context_bytes import Caller, context_bytes_of
from fxremat.planner.search.search import Search
from fxremat.progress import silent
from fxremat.report.codec import decode, encode
from tests.harness import Captured, capture
from tests.models.zoo import ZooModel

FOLDER = RESULTS / "quality"
BUDGETS = 10
OUTSIDE = "_outside"
"""Ends the name of a model whose loss is taken outside."""


def entry(name: str) -> ZooModel:
    """A model by name."""
    if name.endswith(OUTSIDE):
        return unlabelled(entry_of(name.removesuffix(OUTSIDE)))
    return entry_of(name)


def captured(name: str) -> Captured:
    """The step of a model."""
    found = entry(name)
    args, kwargs = found.sample(0)
    return capture(found.build(), args, kwargs)


def digest_of(step: Captured) -> str:
    """Tells graphs apart."""
    traced = digest(
        step.traced, forward_output_count=step.output_count, mutated_primals=step.mutated
    )
    return traced.code


def searched(step: Captured, costs: RecordedCosts) -> Search:
    """All schedules of a step that costs this."""
    real = {step.joint.primals[i]: tensor for i, tensor in step.real.items()}
    measured = Measured.of(step.line, costs)
    context_bytes = context_bytes_of(measured.line.joint, real, Caller())
    return Search.over(measured, step.blocks, context_bytes, progress=silent)


def read(path: Path) -> dict[str, Any]:
    """A recorded file."""
    found: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return found


def write(name: str, step: Captured, costs: RecordedCosts, plans: dict[str, Any]) -> None:
    """Record a model."""
    FOLDER.mkdir(exist_ok=True)
    data = {"graph": digest_of(step), "costs": encode(RecordedCosts, costs), **plans}
    text = json.dumps(data, separators=(",", ":"))
    (FOLDER / f"{name}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def record(name: str) -> None:
    """Measure a model, plan it, and keep both."""
    step = captured(name)
    costs = step.measured.costs
    search = searched(step, costs)
    low, high = search.least_bytes, search.baseline.peak_bytes - 1
    budgets = [low + (high - low) * i // (BUDGETS - 1) for i in range(BUDGETS)]
    plans = {"budgets": budgets, "seconds": [search.fastest_within(b).total_s for b in budgets]}
    write(name, step, costs, plans)


def compare(path: Path) -> dict[str, Any] | None:
    """One row; ``None`` if the file is of another graph."""
    name, before = path.name.removesuffix(".json.gz"), read(path)
    step = captured(name)
    if digest_of(step) != before["graph"]:
        print(f"{name}: recorded with another version of torch, left out")
        return None
    search = searched(step, decode(RecordedCosts, before["costs"]))
    ratios = [
        search.fastest_within(budget).total_s / seconds
        for budget, seconds in zip(before["budgets"], before["seconds"], strict=True)
        if budget >= search.least_bytes
    ]
    return {
        "model": name,
        "stages": len(search.chain),
        "least_bytes": search.least_bytes,
        "least_before_bytes": before["budgets"][0],
        "worst": max(ratios),
        "median": statistics.median(ratios),
        "best": min(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--record", action="append", default=[])
    options = parser.parse_args()
    for name in options.record:
        record(name)
    paths = sorted(FOLDER.glob("*.json.gz"))
    wanted = [p for p in paths if not options.models or p.name.split(".")[0] in options.models]
    rows = [row for row in map(compare, wanted) if row is not None]
    show(
        "Seconds over those of the earlier planner, of the same costs",
        ["model", "stages", "least bytes", "before", "worst", "median", "best"],
        [
            [
                r["model"],
                str(r["stages"]),
                str(r["least_bytes"]),
                str(r["least_before_bytes"]),
                *(f"{100 * (r[k] - 1):+.4f} %" for k in ("worst", "median", "best")),
            ]
            for r in rows
        ],
    )
    save("quality", rows)


if __name__ == "__main__":
    main()
