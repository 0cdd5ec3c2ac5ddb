"""Step time with nothing to do, and at half the full peak, beside ``aot_eager``.

Interleaved rounds, ratio round by round, median and spread.
Run: python -m benchmarks.step_time [model …] [--rounds N] [--threads N]
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.common import Spread, interleave, ratios, save, show
from benchmarks.steps import entry_of, planned, reference
from fxremat.errors import BudgetError
from fxremat.units import format_bytes

BUDGETS = {"full": 1.0, "half": 0.5}

NAMES = ("gpt16", "llama8", "resnet50", "unet", "vit", "blocks60", "gru48", "qwen8")
"""The last three are of operations of less than 50 µs."""


def measure(name: str, rounds: int) -> dict[str, object]:
    """Seconds of one model's steps and the ratios to the reference."""
    entry = entry_of(name)
    torch._dynamo.reset()
    steps = {"aot_eager": reference(entry)}
    found: dict[str, object] = {"model": name}
    for label, budget in BUDGETS.items():
        try:
            steps[label], compiled = planned(entry, budget)
        except BudgetError as error:
            found[label] = f"infeasible, least {format_bytes(error.least_budget_bytes or 0)}"
            continue
        plan = compiled.plan
        found[f"{label}_predicted_ratio"] = plan.predicted_s / plan.baseline_s
        found[f"{label}_budget_bytes"] = plan.budget_bytes
    for step in steps.values():
        step.run()
        step.run()
    values = interleave({label: step.seconds for label, step in steps.items()}, rounds=rounds)
    found["seconds"] = values
    for label in BUDGETS:
        if label in values:
            spread = ratios(values, label, "aot_eager")
            found[label] = (spread.median, spread.low, spread.high)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=NAMES)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = [measure(name, options.rounds) for name in options.models]
    rows = []
    for found in results:
        row = [str(found["model"]), Spread.of(found["seconds"]["aot_eager"]).text(1e3, 0)]  # type: ignore[index]
        for label in BUDGETS:
            value = found[label]
            row.append(value if isinstance(value, str) else Spread(*value).text(1.0, 3))  # type: ignore[misc]
            predicted = found.get(f"{label}_predicted_ratio")
            row.append(f"{predicted:.3f}" if predicted is not None else "")
        rows.append(row)
    columns = [
        "model",
        "aot_eager ms",
        "full ÷ aot_eager",
        "predicted",
        "half ÷ aot_eager",
        "predicted",
    ]
    show("Step time against aot_eager (median [low … high] of interleaved rounds)", columns, rows)
    save("step_time", {"rounds": options.rounds, "threads": options.threads, "models": results})


if __name__ == "__main__":
    main()
