"""Predicted against measured seconds of a step, of models of tiny operations and of a GPT.

With everything kept, with recomputation half way to the least budget, and with transfers alone at
their least budget. Settings of a model are measured in turns; medians count.
Run: python -m benchmarks.predicted [model …] [--rounds N]
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch

import fxremat
from benchmarks.common import Spread, interleave, save, show
from benchmarks.steps import Step, entry_of, make_step
from fxremat.ir import Copy
from tests.models.zoo import ZooModel

NAMES = ("blocks60", "gru48", "gpt12_tiny", "gpt16")


def planned(entry: ZooModel, budget: int | float | str, **options: Any) -> tuple[Step, Any]:
    """A step, and its plan."""
    torch._dynamo.reset()
    model = entry.build()
    args, kwargs = entry.sample(0)
    loss = None if entry.loss_inside else entry.loss
    call = fxremat.compile(model, fxremat.Sample(args, kwargs), budget, loss=loss, **options)
    return make_step(entry, model, call), call.plan


def in_a_row(step: Step) -> float:
    """Median seconds of a few steps, one after the other as in training; the first is left out."""
    seconds = []
    for _ in range(IN_A_ROW + 1):
        step.model.zero_grad(set_to_none=True)
        seconds.append(step.seconds())
    return statistics.median(seconds[1:])


IN_A_ROW = 5


def measure(entry: ZooModel, rounds: int) -> list[dict[str, Any]]:
    """A row for each setting."""
    settings: dict[str, tuple[Step, Any]] = {"kept": planned(entry, 1.0)}
    _step, least = planned(entry, "min")
    half = (least.least_budget_bytes + least.baseline_peak_bytes) // 2
    settings["recomputed"] = planned(entry, half)
    settings["transferred"] = planned(entry, "min", offload="only")
    for step, _plan in settings.values():
        for _ in range(3):
            step.run()
    turns = {what: (lambda step=step: in_a_row(step)) for what, (step, _) in settings.items()}
    values = interleave(turns, rounds=rounds)
    return [
        {
            "model": entry.name,
            "what": what,
            "budget_bytes": plan.budget_bytes,
            "transfers": sum(isinstance(e.op, Copy) for e in plan.timeline.events),
            "calls": sum(not isinstance(e.op, Copy) for e in plan.timeline.events),
            "predicted_s": plan.predicted_s,
            "seconds": values[what],
        }
        for what, (_, plan) in settings.items()
    ]


def line(row: dict[str, Any]) -> list[str]:
    """A line of the table."""
    spread = Spread.of(row["seconds"])
    return [
        f"{row['model']}, {row['what']}",
        str(row["calls"]),
        str(row["transfers"]),
        f"{row['predicted_s'] * 1e3:.2f}",
        spread.text(1e3, 2),
        f"{row['predicted_s'] / spread.median:.3f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=NAMES)
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for name in options.models for row in measure(entry_of(name), options.rounds)]
    columns = ["", "calls", "transfers", "predicted ms", "measured ms", "÷"]
    show("Predicted and measured seconds of a step", columns, [line(row) for row in rows])
    save("predicted", {"rounds": options.rounds, "threads": 1, "rows": rows})


if __name__ == "__main__":
    main()
