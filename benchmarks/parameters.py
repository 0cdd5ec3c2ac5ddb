"""Frozen parameters in host memory: least budgets, times and peaks of a Llama with adapters.

A Llama of transformers in float32, with adapters of rank 8 on its queries and values, trained by
AdamW. Each row trains ten steps in a process of its own. Then the peak of a step is measured by the
events of the allocator, and further steps are timed. Trained parameters are compared, bit by bit,
with those of a run with everything on the device.

Run: OMP_NUM_THREADS=1 python -m benchmarks.parameters [--rounds N] [--layers N] [--tokens N]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
import warnings
from typing import Any

import torch
from torch import Tensor, nn

import fxremat
from benchmarks.common import Spread, machine, save, show
from benchmarks.longest import Adapted
from fxremat.costs.measured.measure import peak_of, resident_bytes
from fxremat.runtime.host_parameter import HostParameter
from fxremat.units import format_bytes

STEPS = 10


class Loss(nn.Module):
    """A Llama with adapters that returns its loss."""

    def __init__(self, layers: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=1_024,
            hidden_size=512,
            intermediate_size=1_376,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=8,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config).train()
        self.model.requires_grad_(False)
        for module in list(self.model.modules()):
            for name, inner in list(module.named_children()):
                if name in ("q_proj", "v_proj") and isinstance(inner, nn.Linear):
                    setattr(module, name, Adapted(inner, rank=8))

    def forward(self, ids: Tensor) -> Tensor:
        """Return the loss of predicting each token."""
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss


def row(args: argparse.Namespace) -> dict[str, Any]:
    """Train in this process, and return what was measured."""
    warnings.simplefilter("ignore")
    model = Loss(args.layers)
    ids = torch.randint(1_024, (1, args.tokens), generator=torch.Generator().manual_seed(1))
    trained = [own for own in model.parameters() if own.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    host: Any = fxremat.HostMemory("auto", parameters=True) if args.host else args.offload
    budget: Any = int(args.budget) if args.budget.isdecimal() else args.budget
    compiled = fxremat.compile(
        model, ids, budget, optimizer=optimizer, offload=host, loss="own", dynamic=False
    )
    first = compiled.plan
    for _ in range(STEPS):
        optimizer.zero_grad()
        compiled(ids).backward()
        optimizer.step()
    digest = hashlib.sha256()
    for own in trained:
        digest.update(own.detach().numpy().tobytes())

    def step() -> None:
        compiled(ids).backward()

    optimizer.zero_grad()
    step()
    optimizer.zero_grad()
    peak_bytes = peak_of(step, device=ids.device, resident_bytes=resident_bytes(model, step))
    peak_bytes += sum(t.nbytes for s in optimizer.state.values() for t in s.values())
    seconds = []
    for _ in range(args.rounds):
        optimizer.zero_grad()
        begin_s = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin_s)
    moved = [own for own in model.parameters() if isinstance(own, HostParameter)]
    return {
        "budget_bytes": first.budget_bytes,
        "least_bytes": first.least_budget_bytes,
        "full_bytes": first.baseline_peak_bytes,
        "peak_bytes": peak_bytes,
        "predicted_s": compiled.plan.predicted_s,
        "seconds": seconds,
        "parameters_bytes": sum(own.nbytes for own in model.parameters()),
        "moved_bytes": sum(own.nbytes for own in moved),
        "digest": digest.hexdigest(),
    }


def run_row(args: argparse.Namespace, budget: object, *, host: bool, offload: bool) -> Any:
    """Return the result of :func:`row` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.parameters", "--row", f"--budget={budget}"]
    command += [f"--{name}={getattr(args, name)}" for name in ("rounds", "layers", "tokens")]
    command += ["--host"] * host + ["--moving"] * offload
    environment = {**os.environ, "FXREMAT_CACHE": "0"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Print the table, and write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--row", action="store_true")
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--moving", action="store_true")
    parser.add_argument("--budget", default="min")
    args = parser.parse_args()
    args.offload = "auto" if args.moving else False
    if args.row:
        print(json.dumps(row(args)))
        return
    full = run_row(args, "100%", host=False, offload=False)
    today = run_row(args, "min", host=False, offload=True)
    half = today["least_bytes"] // 2
    rows = {
        "everything on the device": full,
        "least, parameters on the device": today,
        "least, parameters in host memory": run_row(args, "min", host=True, offload=True),
        "half of the least on the device": run_row(args, half, host=True, offload=True),
        "the least on the device": run_row(args, today["least_bytes"], host=True, offload=True),
    }
    full_s = Spread.of(full["seconds"]).median
    table = [
        (
            name,
            format_bytes(own["budget_bytes"]),
            f"{own['budget_bytes'] / today['least_bytes']:.2f}",
            format_bytes(own["peak_bytes"]),
            format_bytes(own["moved_bytes"]),
            Spread.of(own["seconds"]).text(1e3),
            f"{own['predicted_s'] * 1e3:.1f}",
            f"{Spread.of(own['seconds']).median / full_s:.2f}",
            "same" if own["digest"] == full["digest"] else "others",
        )
        for name, own in rows.items()
    ]
    columns = ("plan", "budget", "/ least", "peak", "moved", "ms", "predicted", "/ all", "bits")
    show("Frozen parameters in host memory", columns, table)
    save("parameters", {"machine": machine(), "arguments": vars(args), "rows": rows})


if __name__ == "__main__":
    main()
