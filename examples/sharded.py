"""Fine-tune a Llama in two processes with fully_shard (FSDP2), each within a byte budget.

    torchrun --standalone --nproc-per-node 2 -m examples.sharded

``fully_shard`` leaves each process a part of every parameter; a layer's are gathered while it runs.
Its hooks cut the step into regions, which share the budget: what is gathered and what gradients
are reduced through is counted, because the first steps are watched. Nothing else differs from the
training without a budget, which runs first.

The model is small and random, the text is what Python's ``help("topics")`` shows.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from typing import Any

import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard

import fxremat
from examples.long_context import draw, loss_of, make_model

LENGTH = 256


def train(steps: int, budget: str | None) -> tuple[list[float], float]:
    """Losses of this process, and seconds of the last step."""
    torch.manual_seed(0)
    model: Any = make_model()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if budget is not None:
        model = fxremat.compile(model, budget=budget, optimizer=optimizer)
    losses, seconds = [], 0.0
    for step in range(steps):
        began = time.perf_counter()
        loss = loss_of(model(**draw(LENGTH, distributed.get_world_size() * step + _rank())))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        seconds = time.perf_counter() - began
    return losses, seconds


def _rank() -> int:
    return distributed.get_rank()


def main() -> int:
    """The exit status: 1 if a loss of this process differs in any bit, or the budget was passed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=6, help="steps to train (%(default)s)")
    parser.add_argument("--budget", default="24MiB", help="of each process (%(default)s)")
    asked = parser.parse_args()
    distributed.init_process_group("gloo")
    try:
        plain, plain_s = train(asked.steps, None)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            planned, planned_s = train(asked.steps, asked.budget)
        over = [w for w in told if issubclass(w.category, fxremat.BudgetWarning)]
        for w in over:
            print(f"process {_rank()}: {w.message}", flush=True)
        same = "the same to the last bit" if planned == plain else "NOT the same"
        print(
            f"process {_rank()}: losses {same}, the last one {planned[-1]:.9g}; "
            f"{len(over)} steps over {asked.budget}; {plain_s:.3f} s a step, then {planned_s:.3f}",
            flush=True,
        )
        return 0 if planned == plain and not over else 1
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
