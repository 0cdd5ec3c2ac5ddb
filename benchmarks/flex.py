"""FlexAttention on a GPU, or on the stand-in for one: peaks of ``aot_eager`` and within budgets.

On the stand-in bytes are real, and times mean nothing.
Run: python -m benchmarks.flex [--length N] [--layers N]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

import fxremat
from benchmarks.common import save, show
from tests.cuda import CUDA, forget
from tests.models.zoo import sum_of_squares
from tests.on_cuda.test_cuda_flex import Attention, sample

STEPS = 5


def measure(call: Any, model: torch.nn.Module, args: tuple[Any, ...]) -> tuple[int, float]:
    """Return the peak of the last of a few steps, and the seconds of the fastest."""
    seconds = []
    for _ in range(STEPS):
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        sum_of_squares(call(*args)).backward()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return torch.cuda.max_memory_allocated(), min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    args = sample(options.length)
    for executor, budget in [
        ("aot_eager", None),
        *((executor, budget) for executor in ("eager", "inductor") for budget in (1.0, 0.6, "min")),
    ]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Attention(options.layers).to(CUDA)
        call: Any = None
        row: dict[str, Any] = {"executor": executor, "budget": str(budget)}
        try:
            if budget is None:
                call = torch.compile(model, backend="aot_eager")
            else:
                call = fxremat.compile(model, args, budget, executor=executor, loss=sum_of_squares)
                row["budget_bytes"] = call.plan.budget_bytes
            row["peak_bytes"], row["seconds"] = measure(call, model, args)
        except fxremat.BudgetError as error:
            row["least_budget_bytes"] = error.least_budget_bytes
        rows.append(row)
        del model, call
        forget(CUDA)
    save("flex", {"length": options.length, "layers": options.layers, "rows": rows})
    table = [[str(row.get(name, "")) for name in COLUMNS] for row in rows]
    show("FlexAttention", list(COLUMNS), table)


COLUMNS = ("executor", "budget", "budget_bytes", "peak_bytes", "least_budget_bytes")


if __name__ == "__main__":
    main()
