"""Time spent on recomputation at half and a quarter of the activation memory.

Activation memory is what the peak holds beside parameters, buffers and gradients. Measured:
the planned step over the same graphs with nothing recomputed, interleaved, round by round.
Run: python -m benchmarks.recompute [model …] [--rounds N] [--threads N]
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks.common import Spread, interleave, ratios, save, show
from benchmarks.steps import entry_of, planned, static_bytes

SHARES = (0.75, 0.5, 0.25)


def measure(name: str, rounds: int) -> list[dict[str, Any]]:
    """One model at each share."""
    entry = entry_of(name)
    full, compiled = planned(entry, 1.0)
    fixed = static_bytes(full.model)
    activation_bytes = compiled.plan.baseline_peak_bytes - fixed
    steps, plans = {"full": full}, {}
    for share in SHARES:
        steps[str(share)], compiled = planned(entry, fixed + int(share * activation_bytes))
        plans[share] = compiled.plan
    for step in steps.values():
        step.run()
    values = interleave({key: step.seconds for key, step in steps.items()}, rounds=rounds)
    found = []
    for share, plan in plans.items():
        spread = ratios(values, str(share), "full")
        found.append(
            {
                "model": name,
                "share": share,
                "budget_bytes": plan.budget_bytes,
                "peak_bytes": steps[str(share)].peak_bytes(),
                "predicted": plan.predicted_s / plan.baseline_s,
                "bound": plan.lower_bound_s / plan.baseline_s,
                "measured": (spread.median, spread.low, spread.high),
                "seconds": values[str(share)],
                "full_seconds": values["full"],
            }
        )
    return found


def row(found: dict[str, Any]) -> list[str]:
    """A line of the table, recomputation in percent of the step without it."""
    predicted, measured = found["predicted"], Spread(*found["measured"])
    return [
        found["model"],
        f"{found['share']:.0%}",
        f"{found['peak_bytes'] / found['budget_bytes']:.3f}",
        f"{100 * (predicted - 1):.1f}",
        f"{100 * (found['bound'] - 1):.1f}",
        Spread(measured.median - 1, measured.low - 1, measured.high - 1).text(100),
        f"{100 * (measured.median - predicted):+.1f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["gpt16", "llama16"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = [point for name in options.models for point in measure(name, options.rounds)]
    save("recompute", {"threads": options.threads, "points": found})
    show(
        "recomputation, % of the step without it",
        ["model", "of activations", "peak / budget", "predicted", "bound", "measured", "off by"],
        [row(point) for point in found],
    )


if __name__ == "__main__":
    main()
