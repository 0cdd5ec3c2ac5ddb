"""Models with higher-order operators: step time over ``aot_eager``, peaks within budgets, bits.

Each model has linear layers of width 256, each followed by a function that leads to one kind of
operator. Steps with everything kept are interleaved with those of ``aot_eager``, in one process and
one thread. A budget is a share of the peak with everything kept, or the least one.
Run: OMP_NUM_THREADS=1 python -m benchmarks.higher_order [names …] [--rounds N]

With ``--pieces`` it measures the least budget of a recurrent network of 256 iterations instead, by
the most pieces of a scan: python -m benchmarks.higher_order --pieces 1 4 8
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fxremat
from benchmarks.common import interleave, keep_freed_memory, ratios, save, show
from fxremat.passes.joint import scans
from tests.higher_order import TRAINS, VARIANTS, Layers
from tests.higher_order import WIDTH as RECURRENT_WIDTH
from tests.models.zoo import sum_of_squares
from tests.test_higher_order import Recurrent

FUNCTIONS = {**TRAINS, **VARIANTS}

WIDTH, ROWS, LAYERS = 256, 512, 6

SHARE = 0.6
"""A budget as a share of the peak with everything kept, where that is feasible."""


def build(name: str) -> nn.Module:
    """Return the model of a kind, always with the same parameters."""
    torch.manual_seed(0)
    return Layers(FUNCTIONS[name], LAYERS, WIDTH)


def step_of(model: nn.Module, call: Callable[..., Any], x: torch.Tensor) -> float:
    """Run a step, and return its seconds."""
    for parameter in model.parameters():
        parameter.grad = None
    torch.manual_seed(1)
    begin = time.perf_counter()
    sum_of_squares(call(x)).backward()
    return time.perf_counter() - begin


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Measure one kind."""
    x = torch.randn(ROWS, WIDTH)
    plain = build(name)
    reference = torch.compile(plain, backend="aot_eager")
    ample = build(name)
    calls = {"aot_eager": (plain, reference)}
    calls["fxremat"] = ample, fxremat.compile(ample, x, 1.0, loss=sum_of_squares)
    for own in calls.values():
        for _ in range(5):
            step_of(*own, x)
    steps = {key: functools.partial(step_of, *own, x) for key, own in calls.items()}
    ratio = ratios(interleave(steps, rounds=rounds), "fxremat", "aot_eager")
    gradients = [parameter.grad for parameter in plain.parameters()]
    row: dict[str, Any] = {"kind": name, "ratio": (ratio.median, ratio.low, ratio.high)}
    row["budgets"] = []
    full_bytes = least_bytes = 0
    for budget in ("min", SHARE, 1.0):
        asked = "min" if budget == "min" else max(int(budget * full_bytes), least_bytes)
        torch._dynamo.reset()
        model = build(name)
        call = fxremat.compile(model, x, asked, loss=sum_of_squares, assume="strict")
        plan = call.plan
        full_bytes, least_bytes = plan.baseline_peak_bytes, plan.least_budget_bytes
        step_of(model, call, x)
        peak_bytes = fxremat.measure_step(
            model, functools.partial(step_of, model, call, x)
        ).peak_bytes
        pairs = zip((p.grad for p in model.parameters()), gradients, strict=True)
        row["budgets"].append(
            {
                "budget": str(budget),
                "budget_bytes": plan.budget_bytes,
                "full_bytes": full_bytes,
                "peak_bytes": peak_bytes,
                "within": peak_bytes <= plan.budget_bytes,
                "same_bits": all(torch.equal(a, b) for a, b in pairs),
            }
        )
    torch._dynamo.reset()
    return row


def measure_pieces(count: int) -> dict[str, Any]:
    """Measure the least budget of a recurrent network whose scan is cut into ``count`` pieces."""
    before, scans.MOST_PIECES = scans.MOST_PIECES, count
    torch._dynamo.reset()
    try:
        model, x = Recurrent(), torch.ones(256, 8, RECURRENT_WIDTH)
        call = fxremat.compile(model, x, "min", loss=sum_of_squares, assume="strict")
        step_of(model, call, x)
        run = functools.partial(step_of, model, call, x)
        peak_bytes = fxremat.measure_step(model, run).peak_bytes
    finally:
        scans.MOST_PIECES = before
    return {
        "pieces": count,
        "full_bytes": call.plan.baseline_peak_bytes,
        "least_budget_bytes": call.plan.least_budget_bytes,
        "peak_bytes": peak_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(FUNCTIONS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--pieces", type=int, nargs="+")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.pieces:
        pieces = [measure_pieces(count) for count in options.pieces]
        save("scans", {"rows": pieces})
        show("pieces of a scan", list(pieces[0]), [[str(x) for x in r.values()] for r in pieces])
        return
    keep_freed_memory()
    results = []
    for name in options.names:
        results.append(measure(name, options.rounds))
        save("higher_order", {"rounds": options.rounds, "rows": results})
        least, share, ample = results[-1]["budgets"]
        median, low, high = results[-1]["ratio"]
        row = [name, f"{median:.3f} [{low:.3f} … {high:.3f}]"]
        for own in (ample, share, least):
            used = own["peak_bytes"] / own["full_bytes"]
            row.append(f"{used:.2f}{'' if own['within'] else ' OVER'}")
        row.append("equal" if all(own["same_bits"] for own in (ample, share, least)) else "DIFFER")
        show(name, COLUMNS, [row])


COLUMNS = ["kind", "time ÷ aot_eager", "peak at 1.0", f"at {SHARE}", "at min", "bits"]


if __name__ == "__main__":
    main()
