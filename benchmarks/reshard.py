"""Parameters that are sharded and gathered in the graph: kept from forward to backward, or not.

A GPT in two processes, whose MLPs gather their parameters where they read them, at shares of the
peak with everything kept: what is gathered again in the backward, and what a step takes. Medians of
interleaved rounds.
Run: python -m benchmarks.reshard [--rounds N]
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import distributed, multiprocessing
from torch.distributed.device_mesh import init_device_mesh

import fxremat
from benchmarks.common import Spread, interleave, save, show
from benchmarks.steps import Step, make_step
from fxremat.units import format_bytes
from tests.loops.memory import recording
from tests.models.gpt import GPTConfig, gpt_entry
from tests.rank_training import Gathered, beginning, sharded

ENTRY = gpt_entry("gpt", GPTConfig(width=256, blocks=8, context=128), batch=4, length=128)

BUDGETS = (1.0, 0.9, 0.8, 0.7, "min")

TAUGHT = 5
"""Steps until what a step takes was seen."""


def stepping(budget: Any) -> tuple[Step, fxremat.CompiledModule]:
    """The model, its MLPs sharded, taught."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = ENTRY.build()
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in model.blocks:
        for place in (0, 2):
            sharded(block.mlp[place], mesh, Gathered())
    args, kwargs = ENTRY.sample(0)
    compiled = fxremat.compile(model, fxremat.Sample(args, kwargs), budget, loss=ENTRY.loss)
    step = make_step(ENTRY, model, compiled)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(TAUGHT):
            step.run()
    return step, compiled


def gathers(step: Step) -> int:
    """How often a step gathers something."""
    with recording() as seen:
        step.run()
    return sum(name.endswith("::all_gather_into_tensor") for *_, name in seen.spans)


def measure(rank: int, where: str, rounds: int, folder: str) -> None:
    """Measure all budgets in one of two processes."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    full_bytes = stepping(1.0)[1].plan.baseline_peak_bytes
    runs, found = {}, []
    for budget in BUDGETS:
        step, compiled = stepping(budget if budget == "min" else int(budget * full_bytes))
        plan = compiled.plan
        found.append(
            {
                "budget": budget,
                "budget_bytes": plan.budget_bytes,
                "predicted_peak_bytes": plan.predicted_peak_bytes,
                "gathers": gathers(step),
            }
        )

        def seconds(step: Step = step) -> float:
            distributed.barrier()
            began = perf_counter()
            step.run()
            return perf_counter() - began

        runs[str(budget)] = seconds
    times = interleave(runs, rounds=rounds)
    for own in found:
        own["seconds"] = times[str(own["budget"])]
    torch.save(found, Path(folder) / f"{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


def main() -> None:
    """Measure, in two processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        arguments = beginning(), rounds, folder
        multiprocessing.spawn(measure, arguments, nprocs=2)  # type: ignore[no-untyped-call]
        found, _ = (torch.load(Path(folder) / f"{rank}.pt") for rank in range(2))
    save("reshard", found, quiet=True)
    rows = [
        [
            str(own["budget"]),
            format_bytes(own["budget_bytes"]),
            str(own["gathers"]),
            Spread.of(own["seconds"]).text(1e3),
        ]
        for own in found
    ]
    show("a GPT whose MLPs gather", ["budget", "bytes", "gathers a step", "ms a step"], rows)


if __name__ == "__main__":
    main()
