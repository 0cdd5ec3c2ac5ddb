"""The promise in bytes: measured peak against budget, for every zoo model at six budgets.

Also the least feasible activation memory (peak less parameters, buffers and parameter
gradients) as a share of that with everything kept.
Run: python -m benchmarks.promise [model …]
"""

from __future__ import annotations

import argparse
import statistics

import torch

from benchmarks.common import save, show
from benchmarks.steps import entry_of, planned, static_bytes
from fxremat.units import format_bytes
from tests.models import ZOO

SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Of the way from the least feasible budget to the full peak."""


def measure(name: str) -> list[dict[str, object]]:
    """One row a budget."""
    entry = entry_of(name)
    torch._dynamo.reset()
    _, first = planned(entry, "min")
    least, full = first.plan.least_budget_bytes, first.plan.baseline_peak_bytes
    static = static_bytes(first)
    rows: list[dict[str, object]] = []
    for share in SHARES:
        torch._dynamo.reset()
        budget = least + int(share * (full - least))
        step, compiled = planned(entry, budget)
        step.run()
        peak = step.peak_bytes()
        plan = compiled.plan
        rows.append(
            {
                "model": name,
                "share": share,
                "budget_bytes": budget,
                "measured_bytes": peak,
                "predicted_bytes": plan.predicted_peak_bytes,
                "kept": peak <= budget,
                "used": peak / budget,
                "predicted_ratio": plan.predicted_s / plan.baseline_s,
                "least_activation_share": (least - static) / (full - static),
                "stages": len(plan.chain),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=[*ZOO, "gpt16", "llama8"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in options.models:
        rows.extend(measure(name))
        print(name, "done", flush=True)
    columns = [
        "model",
        "stages",
        "budget",
        "measured",
        "used",
        "kept",
        "predicted time",
        "least act.",
    ]
    show(
        "Measured peak against budget",
        columns,
        [
            [
                str(r["model"]),
                str(r["stages"]),
                format_bytes(int(str(r["budget_bytes"]))),
                format_bytes(int(str(r["measured_bytes"]))),
                f"{r['used']:.3f}",
                "yes" if r["kept"] else "NO",
                f"{r['predicted_ratio']:.3f}",
                f"{r['least_activation_share']:.3f}",
            ]
            for r in rows
        ],
    )
    used = [float(str(r["used"])) for r in rows if r["share"] != 1.0]
    broken = [r for r in rows if not r["kept"]]
    print(f"{len(rows)} plans, {len(broken)} above their budget")
    print(f"median of measured peak / budget where the budget binds: {statistics.median(used):.3f}")
    save("promise", rows)
    if broken:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
