"""Planning time of loops over time that are unrolled.

Two LSTM cells over 10, 20 and 100 steps at the least budget: seconds of CPU until the first
training step has run, of fxremat and of aot_eager, and the longest of the later steps beyond what
such a step takes: gradients are there, then cleared. A scan, as in RWKV, at the least budget:
seconds of CPU that ``fxremat.compile`` takes without parts and with parts of the same bits, and the
least budget over the peak with everything kept.
Run: OMP_NUM_THREADS=1 FXREMAT_CACHE=0 python -m benchmarks.unrolled [--cells N …] [--scans N …]
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import fxremat
from benchmarks.common import SPLITS, save, show

LATER = 8
"""Steps after the first; gradients are cleared before the second half of them."""


class Cells(nn.Module):
    """Two LSTM cells and a linear layer, over the moments of a sequence."""

    def __init__(self, width: int = 51) -> None:
        super().__init__()
        self.first, self.second = nn.LSTMCell(1, width), nn.LSTMCell(width, width)
        self.out, self.width = nn.Linear(width, 1), width

    def forward(self, x: Tensor) -> Tensor:
        """Of a sequence a row, one number a moment."""
        h, c, h2, c2 = (torch.zeros(x.size(0), self.width) for _ in range(4))
        found = []
        for moment in x.split(1, dim=1):
            h, c = self.first(moment, (h, c))
            h2, c2 = self.second(h, (h2, c2))
            found.append(self.out(h2))
        return torch.cat(found, 1)


class Scan(nn.Module):
    """A weighted mean of all moments before, each of which counts for less."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.key, self.value, self.gate = (nn.Linear(width, width) for _ in range(3))
        self.decay, self.bonus = (nn.Parameter(torch.zeros(width)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Of a batch of sequences."""
        keys, values, found = self.key(x), self.value(x), []
        above = below = torch.zeros_like(x[:, 0])
        top = above - 1e38
        for t in range(x.shape[1]):
            key, value = keys[:, t], values[:, t]
            most = torch.maximum(top, key + self.bonus)
            old, new = torch.exp(top - most), torch.exp(key + self.bonus - most)
            found.append((old * above + new * value) / (old * below + new))
            most = torch.maximum(top + self.decay, key)
            old, new = torch.exp(top + self.decay - most), torch.exp(key - most)
            above, below, top = old * above + new * value, old * below + new, most
        return x + torch.sigmoid(self.gate(x)) * torch.stack(found, 1)


T = TypeVar("T")


def timed(run: Callable[[], T]) -> tuple[T, float]:
    """What it returns, and seconds of CPU that the process takes for it."""
    begun = time.process_time()
    found = run()
    return found, time.process_time() - begun


def step(model: Any, x: Tensor) -> Any:
    """One training step without an optimizer; returns the model."""
    nn.functional.mse_loss(model(x), x).backward()
    return model


def first_step(model: nn.Module, x: Tensor, mode: str) -> Any:
    """Compile, and run a step."""
    if mode == "aot_eager":
        return step(torch.compile(model, backend="aot_eager"), x)
    return step(fxremat.compile(model, x, "min", loss=fxremat.Loss(nn.MSELoss(), target=x)), x)


def cells(steps: int) -> dict[str, Any]:
    """The row of so many steps of cells."""
    x = torch.randn(60, steps)
    row: dict[str, Any] = {"kind": "cells", "steps": steps}
    for mode in ("aot_eager", "fxremat"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Cells()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        compiled, row[f"{mode}_first_s"] = timed(partial(first_step, model, x, mode))
        later = []
        for number in range(LATER):
            if number >= LATER // 2:
                optimizer.zero_grad()
            later.append(timed(partial(step, compiled, x))[1])
            optimizer.step()
        usual = statistics.median(later)
        row[f"{mode}_step_s"], row[f"{mode}_stall_s"] = usual, max(later) - usual
    return row


def scan(steps: int) -> dict[str, Any]:
    """The row of so many steps of the scan."""
    row: dict[str, Any] = {"kind": "scan", "steps": steps}
    for name, split in (("whole", "as traced"), ("parts", "same bits")):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = Scan(), torch.randn(4, steps, 64)
        options: dict[str, Any] = {"loss": torch.sum, **SPLITS[split]}
        made, row[f"{name}_s"] = timed(partial(fxremat.compile, model, x, "min", **options))
        plan: Any = made.plan
        row[f"{name}_least"] = plan.least_budget_bytes / plan.baseline_peak_bytes
        row[f"{name}_forms_left"] = plan.forms_left
    return row


def main() -> None:
    """Measure, print two tables, and write ``unrolled.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", nargs="*", type=int, default=[10, 20, 100])
    parser.add_argument("--scans", nargs="*", type=int, default=[6, 9, 12, 24, 48])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    scan(3)  # what is loaded, or compiled by numba, once in a process
    rows = [*map(cells, asked.cells), *map(scan, asked.scans)]
    show(
        "two LSTM cells, unrolled, at the least budget: seconds of CPU",
        ("steps", "aot_eager, first", "first", "÷", "its step", "step", "longest stall"),
        [
            (
                str(r["steps"]),
                f"{r['aot_eager_first_s']:.1f}",
                f"{r['fxremat_first_s']:.1f}",
                f"{r['fxremat_first_s'] / r['aot_eager_first_s']:.2f}",
                f"{r['aot_eager_step_s']:.3f}",
                f"{r['fxremat_step_s']:.3f}",
                f"{r['fxremat_stall_s']:.2f}",
            )
            for r in rows
            if r["kind"] == "cells"
        ],
    )
    show(
        "a scan, unrolled, at the least budget: seconds of CPU of compile",
        ("steps", "as traced", "same bits", "÷", "least, whole", "least, parts", "left"),
        [
            (
                str(r["steps"]),
                f"{r['whole_s']:.1f}",
                f"{r['parts_s']:.1f}",
                f"{r['parts_s'] / r['whole_s']:.2f}",
                f"{r['whole_least']:.2f}",
                f"{r['parts_least']:.2f}",
                str(r["parts_forms_left"]),
            )
            for r in rows
            if r["kind"] == "scan"
        ],
    )
    save("unrolled", {"rows": rows})


if __name__ == "__main__":
    main()
