"""Plans well above their lower bound: whether it is the plan or the bound that is too far.

The models and budgets of ``benchmarks.ablation``. For each plan that is more than 3 % above its
bound: the bound over all moments of the backward in place of a few, and the plan after local search
from sixty more schedules of the pool.
Run: python -m benchmarks.gaps [model …]
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks.ablation import BUDGETS, MODELS, MUCH
from benchmarks.ablation_ways import Case
from benchmarks.common import save, show
from fxremat.planner.decision.candidates import Pool
from fxremat.planner.search.bound import Relaxation

CLIMBS = 60
"""Schedules of a pool from which local search sets out."""


def gaps(name: str) -> list[dict[str, Any]]:
    """A row for each budget at which the plan is well above its bound."""
    torch._dynamo.reset()
    whole = Case.of(name).whole
    assert whole.relaxation is not None
    few = whole.relaxation()
    context_bytes, blocks = whole.setting.context_bytes, whole.evaluator.blocks
    every = Relaxation.of(whole.measured, blocks, context_bytes, len(whole.chain) + 1)
    starts = Pool(whole.pool.members[:-1]).thinned(CLIMBS)
    climbed = [found for start in starts for found in whole.evaluator.climb(start, whole.effort)]
    more = Pool.of(whole.baseline, (*whole.pool.members, *climbed))
    low, high = whole.least_bytes, whole.baseline.peak_bytes - 1
    rows = []
    for i in range(BUDGETS):
        budget_bytes = low + (high - low) * i // (BUDGETS - 1)
        plan_s, more_s = (
            next(c for c in reversed(pool.members) if c.peak_bytes <= budget_bytes).total_s
            for pool in (whole.pool, more)
        )
        bound_s, every_s = (
            whole.baseline.total_s + own.least_s(budget_bytes) for own in (few, every)
        )
        if plan_s > MUCH * bound_s:
            times = {"plan": plan_s, "climbed": more_s, "bound": bound_s, "all moments": every_s}
            rows.append({"model": name, "budget": i + 1, **times})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS)
    torch.set_num_threads(1)
    rows = []
    for name in parser.parse_args().models:
        rows += gaps(name)
        save("gaps", {"rows": rows}, quiet=True)
    show(
        "Plans more than 3 % above their bound",
        ["model", "budget", "plan ÷ bound", "÷ bound of all moments", "climbed ÷ plan"],
        [
            [
                row["model"],
                str(row["budget"]),
                f"{row['plan'] / row['bound']:.3f}",
                f"{row['plan'] / row['all moments']:.3f}",
                f"{row['climbed'] / row['plan']:.4f}",
            ]
            for row in rows
        ],
    )


if __name__ == "__main__":
    main()
