"""The first steps of a loop whose loss was not declared: peaks, the budget, and the warnings.

Peaks are counted below torch, see ``benchmarks.allocated``; nothing of fxremat takes part.
Run: python -m benchmarks.pictures.first_steps
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fxremat
from benchmarks.allocated import Allocated, built
from benchmarks.pictures.style import GRAY, OURS, THEIRS, new_picture, write

MIB, STEPS, BUDGET = 2**20, 6, "72 MiB"


def wide_loss(y: Tensor, scales: Tensor) -> Tensor:
    """Compare an output with several scaled copies of itself, which takes much memory."""
    return (y.unsqueeze(-1) * scales).tanh().square().mean()


def train() -> dict[str, Any]:
    """Train in this process, which has the counter preloaded."""
    counter = Allocated()
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(8)
    ]
    x, scales = torch.randn(1024, 256), torch.linspace(0.5, 1, 6)
    model = fxremat.compile(nn.Sequential(*blocks), x, BUDGET)
    found: dict[str, Any] = {"budget": model.plan.budget_bytes, "peaks": [], "warned": []}
    for _ in range(STEPS):
        counter.mark()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wide_loss(model(x), scales).backward()
        model.zero_grad()
        found["peaks"].append(counter.most_bytes)
        found["warned"].append([str(w.message) for w in caught])
    return found


def draw(found: dict[str, Any]) -> None:
    """Draw the peaks of the steps as bars, and the budget as a line."""
    budget = found["budget"]
    figure, axes = new_picture(2.8)
    steps = range(1, STEPS + 1)
    colors = [THEIRS if peak > budget else OURS for peak in found["peaks"]]
    axes.bar(steps, [peak / MIB for peak in found["peaks"]], width=0.6, color=colors)
    axes.axhline(budget / MIB, color="black", linewidth=1.2)
    axes.text(STEPS + 0.4, budget / MIB + 1.5, "budget", ha="right", weight="bold")
    for step, peak, warned in zip(steps, found["peaks"], found["warned"], strict=True):
        if warned:
            axes.text(step + 0.35, peak / MIB, "BudgetWarning", color=GRAY, va="top")
    axes.set_xlabel("step of the training loop")
    axes.set_ylabel("peak (MiB)")
    write(figure, "first-steps")


def main() -> None:
    if "--train" in sys.argv:
        print(json.dumps(train()))
        return
    with tempfile.TemporaryDirectory() as folder:
        changed = {"LD_PRELOAD": str(built(Path(folder))), "FXREMAT_CACHE": "0"}
        command = [sys.executable, "-m", "benchmarks.pictures.first_steps", "--train"]
        done = subprocess.run(
            command, env=os.environ | changed, check=True, capture_output=True, text=True
        )
    found = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(found, indent=1))
    draw(found)


if __name__ == "__main__":
    main()
