"""Training with gradients and optimizer state in host memory: least budgets, times and peaks.

A Llama of transformers whose parameters, gradients and state take about nine tenths of its step,
with AdamW, in float32. Each row trains ten steps with clipped gradients in a process of its own,
which counts below torch what its allocator holds. Further steps, without clipping, are timed.
Parameters are compared, bit by bit, with those of a run with everything on the device.

Run: OMP_NUM_THREADS=1 python -m benchmarks.host_training [--rounds N] [--layers N] [--tokens N]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fxremat
from benchmarks.allocated import Allocated, built
from benchmarks.common import Spread, machine, save, show
from fxremat.units import format_bytes

STEPS = 10


class Loss(nn.Module):
    """A Llama that returns its loss."""

    def __init__(self, layers: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=1_024,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config).train()

    def forward(self, ids: Tensor) -> Tensor:
        """Return the loss of predicting each token."""
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss


def row(args: argparse.Namespace) -> dict[str, Any]:
    """Train in this process, and return what was measured."""
    counter = Allocated()
    model = Loss(args.layers)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1_024, (1, args.tokens), generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    host = fxremat.HostMemory("auto", state=True) if args.host else False
    budget: Any = int(args.budget) if args.budget.isdecimal() else args.budget
    caught: list[warnings.WarningMessage]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = fxremat.compile(
            model, ids, budget, optimizer=optimizer, offload=host, loss="own", dynamic=False
        )
        plan = compiled.plan
        peaks, seconds = [], []
        for number in range(STEPS + args.rounds):
            counter.mark()
            begin_s = time.perf_counter()
            compiled(ids).backward()
            trained = counter.most_bytes
            if number < STEPS:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if number >= STEPS:
                seconds.append(time.perf_counter() - begin_s)
            peaks.append((trained, counter.most_bytes))
        placed = compiled.plan.training_state
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return {
        "least_bytes": plan.least_budget_bytes,
        "budget_bytes": compiled._training.loop.budget.nbytes,
        "planned_bytes": compiled.plan.counted_bytes,
        "trained_bytes": max(own for own, _ in peaks),
        "stepped_bytes": max(own for _, own in peaks),
        "seconds": sorted(seconds),
        "predicted_s": placed and plan.predicted_s + placed.backward_s + placed.optimizer_s,
        "state_bytes": placed.state_bytes if placed else 0,
        "gradient_bytes": placed.gradient_bytes if placed else 0,
        "digest": digest.hexdigest(),
        "warnings": [str(own.message) for own in caught if "fxremat" in str(type(own.message))],
    }


def in_process(args: argparse.Namespace, budget: str, *, host: bool, library: Path) -> Any:
    """Return :func:`row` of a new process."""
    command = [sys.executable, "-m", "benchmarks.host_training", "--row", "--budget", budget]
    command += [f"--layers={args.layers}", f"--tokens={args.tokens}", f"--rounds={args.rounds}"]
    command += ["--host"] * host
    preload = {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
    made = subprocess.run(command, env=preload, capture_output=True, text=True, check=False)
    if made.returncode:
        raise RuntimeError(made.stderr[-3000:])
    return json.loads(made.stdout.splitlines()[-1])


def main() -> None:
    """Print the table and save it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", default="1.0")
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--row", action="store_true")
    args = parser.parse_args()
    if args.row:
        print(json.dumps(row(args)))
        return
    with tempfile.TemporaryDirectory() as folder:
        library = built(Path(folder))
        today = in_process(args, "min", host=False, library=library)
        least = in_process(args, "min", host=True, library=library)
        budgets = {"full": ("1.0", False), "today's least": ("min", False)}
        for share in (0.75, 0.5):
            nbytes = int(share * today["budget_bytes"])
            budgets[f"{share} of it"] = str(nbytes), True
        budgets["least"] = "min", True
        rows = {}
        for name, (budget, host) in budgets.items():
            rows[name] = in_process(args, budget, host=host, library=library)
    full = rows["full"]
    full_s = Spread.of(full["seconds"]).median
    shown = []
    for name, own in rows.items():
        median_s = Spread.of(own["seconds"]).median
        predicted_s = own["predicted_s"]
        shown.append(
            [
                name,
                format_bytes(own["budget_bytes"]),
                f"{own['budget_bytes'] / today['budget_bytes']:.3f}",
                f"{own['trained_bytes'] / own['budget_bytes']:.3f}",
                f"{own['stepped_bytes'] / own['budget_bytes']:.3f}",
                f"{median_s / full_s:.3f}",
                f"{predicted_s / median_s:.3f}" if predicted_s is not None else "",
                format_bytes(own["state_bytes"]),
                format_bytes(own["gradient_bytes"]),
                "same" if own["digest"] == full["digest"] else "OTHER",
                str(len(own["warnings"])),
            ]
        )
    columns = ["budget", "bytes", "÷ today's least", "peak ÷ budget", "with the step"]
    columns += ["time ÷ full", "predicted ÷ measured", "state", "gradients", "bits", "warnings"]
    show("Gradients and state in host memory", columns, shown)
    print(f"least ÷ today's: {least['budget_bytes'] / today['budget_bytes']:.3f}")
    save("host_training", {"machine": machine(), "args": vars(args), "rows": rows})


if __name__ == "__main__":
    main()
