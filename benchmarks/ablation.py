"""What each part of the planner gains: 20 models × 6 budgets, one evaluator, the same costs.

Each model is captured and measured once. Each way to plan then chooses for six budgets, evenly
from the least that the whole planner can do with to just below keeping everything, and the
evaluator says what its choice takes: seconds of a step, over the lower bound of the same budget.
Planning takes seconds of CPU of one thread, for all budgets of a model together, measuring aside.

* "uniform": all segments of so many stages are recomputed alike, or all stages keep the same share
  of what their backwards read, each in the best way; the best length, or share, that fits.
* "greedy": what takes most bytes for a second of its own recomputation goes first, until it fits.
* torch's knapsacks (``torch._functorch._activation_checkpointing``) choose what is kept, of shares
  of the bytes that cross the loss point, as for ``activation_memory_budget``: the best share that
  fits.
  What these and "greedy" drop is computed again from the nearest boundary that is held, or from
  the input of its stage, which is kept then: whichever is faster.
* "rotor": the solver, on the chain of whole stages; then one part after the other is added.
* "without …": the whole planner, one part left out: what is lost is what that part is worth.
* Transfers go over a link of ``LINK_BYTES_PER_S`` in each direction that slows nothing down, and
  are asked for three more budgets, below the least without them. The lower bound knows of none:
  they may be below it.
* CP-SAT proves the best schedule of the chain where it has few enough stages.

The ILP needs scipy, CP-SAT and the bound need ortools: what is missing is said.
Run: python -m benchmarks.ablation [model …] [--report]
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.ablation_ways import (
    ADDED,
    LINK,
    MOVED,
    WHOLE,
    WITHOUT,
    Case,
    Chosen,
)
from benchmarks.common import rows_but, save, show
from benchmarks.steps import entry_of, planned
from fxremat.planner.transfers.transfers import HostMemory, Transfers

MODELS = (
    "gpt16",
    "gpt48_narrow",
    "llama8",
    "qwen8",
    "vit",
    "convnext",
    "resnet50",
    "densenet121",
    "unet",
    "inception",
    "wavenet",
    "gru48",
    "hf_t5",
    "outputs",
    "lora",
    "encoder_twice",
    "bench_coca",
    "bench_clip",
    "bench_image_recipe",
    "bench_siamese_resnet",
)

BUDGETS = 6

BELOW = 3
"""Budgets more, from the least with transfers to the least without."""

WITHOUT_ = "without "
"""Begins the name of the whole planner but for one part."""

MUCH = 1.03
"""Times the lower bound: plans above that are listed."""


def ablated(name: str) -> dict[str, Any]:
    """All ways to plan one model."""
    torch._dynamo.reset()
    case = Case.of(name)
    whole = case.whole
    low, high = whole.least_bytes, whole.baseline.peak_bytes - 1
    budgets = [low + (high - low) * i // (BUDGETS - 1) for i in range(BUDGETS)]
    least = min(low, Transfers.of(whole, HostMemory(link=LINK)).least_bytes)
    below = [least + (low - least) * i // BELOW for i in range(BELOW)] if least < low else []
    assert whole.relaxation is not None
    relaxation = whole.relaxation()
    ways = {**ADDED, **{WITHOUT_ + part: way for part, way in WITHOUT.items()}}
    return {
        "model": name,
        "stages": len(whole.chain),
        "is_join": bool(whole.measured.line.branch_ends),
        "has_loss_point": whole.measured.line.ends_at_loss_point,
        "baseline_s": whole.baseline.total_s,
        "baseline_bytes": whole.baseline.peak_bytes,
        "budgets": budgets,
        "budgets_below": below,
        "bound_s": [whole.baseline.total_s + relaxation.least_s(b) for b in budgets],
        "ways": {label: _planned(way, case, [*budgets, *below]) for label, way in ways.items()},
    }


def _planned(way: Callable[[Case], Chosen], case: Case, budgets: list[int]) -> dict[str, Any]:
    """What one way chooses, and how long that takes."""
    begin = time.process_time()
    try:
        chosen = way(case)
        seconds = [chosen(budget) for budget in budgets[:BUDGETS]]
    except (NotImplementedError, RuntimeError) as error:
        return {"why_not": str(error), "seconds": [None] * len(budgets)}
    planning_s = time.process_time() - begin
    seconds += [chosen(budget) for budget in budgets[BUDGETS:]]
    return {"planning_s": planning_s, "seconds": seconds}


# What it comes to


def of_way(rows: list[dict[str, Any]], way: str) -> list[str]:
    """A line of the table; a budget at which the way finds no plan counts as the slowest."""
    own = [row["ways"][way] for row in rows]
    tried = [found for found in own if "why_not" not in found]
    took = [found["planning_s"] for found in tried]
    times, against = [], []
    for row in rows:
        if "why_not" in row["ways"][way]:
            continue
        whole = row["ways"][WHOLE]["seconds"]
        for i, bound in enumerate(row["bound_s"]):
            seconds = row["ways"][way]["seconds"][i]
            times.append(seconds / bound if seconds else math.inf)
            against += [seconds / whole[i]] if seconds else []
    why = "; ".join(sorted({found["why_not"] for found in own if "why_not" in found}))
    if not against:
        return [way, "0", *[""] * 5, why]
    times.sort()
    return [
        way,
        f"{len(against)} of {len(times)}",
        *(_text(t) for t in (statistics.median(times), times[-(-9 * len(times) // 10) - 1])),
        *(_text(t) for t in (statistics.median(against), max(against))),
        f"{statistics.median(took):.2f}",
        f"{max(took):.1f}",
    ]


def _text(ratio: float) -> str:
    return f"{ratio:.4f}" if ratio < math.inf else "no plan"


def of_part(rows: list[dict[str, Any]], part: str) -> list[str]:
    """What a part is worth: seconds without it over those with it.

    It applies to models where it changes a plan. Over all budgets, those of the models that it
    applies to, and the tightest of each model that is no lower than the least without transfers.
    """
    base = MOVED if part.endswith("for transfers") else WHOLE
    every: list[float] = []
    applied: list[float] = []
    tightest: list[float] = []
    only = models = 0
    for row in rows:
        pairs = zip(
            row["ways"][WITHOUT_ + part]["seconds"], row["ways"][base]["seconds"], strict=True
        )
        gains = [without / s - 1 if without else math.inf for without, s in pairs if s]
        every += gains
        only += gains.count(math.inf)
        tightest.append(gains[0])
        if any(gains):
            models += 1
            applied += gains
    return [
        part,
        *(_share(statistics.median(gains or [0.0])) for gains in (every, applied, tightest)),
        _share(max(gain for gain in every if gain < math.inf)),
        str(only),
        f"{models}",
    ]


def _share(gain: float) -> str:
    return f"{100 * gain:.2f} %" if gain < math.inf else "no plan"


def far_from_bound(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Plans of the whole planner that are ``MUCH`` above the lower bound."""
    return [
        [row["model"], f"{i + 1} of {BUDGETS}", str(budget), f"{seconds / bound:.4f}"]
        for row in rows
        for i, (budget, seconds, bound) in enumerate(
            zip(row["budgets"], row["ways"][WHOLE]["seconds"], row["bound_s"], strict=False)
        )
        if seconds > MUCH * bound
    ]


def report(rows: list[dict[str, Any]]) -> None:
    """Print all tables, of what was planned at the time."""
    ways = list(rows[0]["ways"])
    columns = ["", "plans", "median", "nine of ten", "÷ whole", "worst", "planning s", "most"]
    show(
        f"Seconds over the lower bound, and over those of the whole planner: {len(rows)} models",
        columns,
        [of_way(rows, way) for way in ways if not way.startswith(WITHOUT_)],
    )
    show(
        "What is lost without a part",
        ["", "median", "where it applies", "tightest", "most", "only it fits", "models"],
        [of_part(rows, w.removeprefix(WITHOUT_)) for w in ways if w.startswith(WITHOUT_)],
    )
    columns = ["model", "budget", "bytes", "seconds ÷ bound"]
    show(f"Plans above {MUCH} × the lower bound", columns, far_from_bound(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="all of them unless some are named")
    parser.add_argument("--report", action="store_true", help="print what was found before")
    options = parser.parse_args()
    torch.set_num_threads(1)
    models = () if options.report else options.models or MODELS
    results = rows_but("ablation", lambda row: row["model"] in models)
    for name in ("tied", "inception") if models else ():  # kernels are loaded, or compiled
        planned(entry_of(name), "min")
    for name in models:
        begin = time.process_time()
        try:
            results.append(ablated(name))
        except ImportError as missing:
            print(f"{name} is left out: {missing}")
            continue
        print(f"{name}: {time.process_time() - begin:.0f} s of CPU", flush=True)
        results.sort(key=lambda row: MODELS.index(row["model"]) if row["model"] in MODELS else 99)
        save("ablation", {"rows": results}, quiet=True)
    report(results)


if __name__ == "__main__":
    main()
