"""How long a plan takes that a training loop waits for: beside gradients, or at another size.

Each model is compiled once at a batch of 8, batch and length as symbols. Then, with nothing run,
plans are made for calls that find gradients, and for calls at other sizes: milliseconds of CPU of
one thread until the graphs can be called, what Python's collector finds to do meanwhile among them.
Run: python -m benchmarks.contexts [model …]
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

import fxremat
from benchmarks.common import Spread, save, show
from benchmarks.many_sizes import batch_of
from benchmarks.steps import entry_of
from fxremat.planner.context.step_context import StepContext
from fxremat.planning.planner import later_plan

MODELS = ("gpt16", "llama16", "gpt48_narrow", "gpt96_narrow")

BATCH = 8
"""Of the sample."""

SHARE = 0.6
"""The budget, of the sample's peak with everything kept."""


def contexts_of(first: StepContext, gradients: list[int]) -> Iterator[tuple[str, StepContext]]:
    """Calls that find what no call before them did."""
    for count in range(len(gradients), len(gradients) - 5, -1):
        yield "gradients", replace(first, existing=frozenset(gradients[:count]))
    for rows in (7, 5, 6, 4, 3):
        sizes = tuple(rows if size == BATCH else size for size in first.sizes)
        yield "sizes", replace(first, sizes=sizes)


def planning_ms(name: str) -> dict[str, Any]:
    """One row."""
    torch._dynamo.reset()
    entry = entry_of(name)
    args, kwargs = batch_of(entry, BATCH, 1.0)
    sample = fxremat.Sample(args, kwargs)
    call = fxremat.compile(entry.build(), sample, SHARE, loss=entry.loss, dynamic=True)
    (graph,) = call._training.graphs
    (first,) = graph.calls.plans
    found: dict[str, list[float]] = {"gradients": [], "sizes": []}
    gc.collect()
    for what, context in contexts_of(first, sorted(graph.signature.gradients)):
        begin = time.process_time()
        later_plan(graph, context, call._training.loop.budget)
        found[what].append(1e3 * (time.process_time() - begin))
    joint = graph.joint
    operations = len(joint.forward) + len(joint.backward)
    return {"model": name, "operations": operations, "ms": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS)
    torch.set_num_threads(1)
    rows = [planning_ms(name) for name in parser.parse_args().models]
    show(
        "Plans in a loop, milliseconds of CPU",
        ["model", "operations", "beside gradients", "at another size"],
        [
            [
                row["model"],
                str(row["operations"]),
                *(Spread.of(row["ms"][what]).text(1, 0) for what in ("gradients", "sizes")),
            ]
            for row in rows
        ],
    )
    save("contexts", {"rows": rows})


if __name__ == "__main__":
    main()
