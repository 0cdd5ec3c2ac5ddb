"""Pictures of docs/explanation, drawn from real plans of a GPT of eight blocks and from results.

The plans are made here, with costs measured on this machine, so that seconds in the pictures
differ a little from run to run. Bytes do not.
Run: python -m benchmarks.pictures.explanation [picture …]
"""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections.abc import Callable
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

import fxremat
from benchmarks.common import RESULTS
from benchmarks.pictures.style import GRAY, OTHER, OURS, THEIRS, new_picture, write
from benchmarks.steps import planned
from fxremat.ir import Backward, Forward, Lane
from fxremat.report.memory import Kind, StepMemory
from tests.models.gpt import GPTConfig, gpt_entry

MIB = 2**20
BLOCKS = gpt_entry("eight blocks", GPTConfig(blocks=8), batch=4, length=512)
LIGHT, BROWN = "#8cc4d4", "#b98d5f"

BANDS = (
    ("parameters, inputs", "#8f96a2", (Kind.PARAMETERS, Kind.BUFFERS, Kind.INPUTS, Kind.OTHER)),
    ("gradients of parameters", OTHER, (Kind.GRADIENTS,)),
    ("activations", OURS, (Kind.ACTIVATIONS,)),
    ("passing gradients, workspaces", BROWN, (Kind.PASSING, Kind.WORKSPACES, Kind.LOSS)),
)
"""What a step holds, from below: the name, the color and the kinds of memory of each band."""


@functools.cache
def plan_of(budget: Any, offload: Any = False) -> fxremat.Plan:
    """Return the plan of the GPT at a budget, without parts."""
    effort = fxremat.Effort(forms=())
    _step, compiled = planned(BLOCKS, budget, offload=offload, effort=effort)
    return compiled.plan


def memory_of_a_step() -> None:
    """Draw the memory of a step with everything kept, and of a plan at half of that peak."""
    figure, rows = new_picture(5.2, 2, sharex=True, sharey=True)
    for axes, budget, title in zip(rows, (1.0, 0.5), ("everything kept", "half"), strict=True):
        plan = plan_of(budget)
        times = plan.memory.times(plan.timeline)
        bands = [_held_mib(plan.memory, kinds) for _, _, kinds in BANDS]
        axes.stackplot(times, bands, colors=[color for _, color, _ in BANDS], step="post")
        axes.axvline(times[plan.memory.loss_point], color="black", linewidth=0.8, linestyle=":")
        axes.set_ylabel("MiB held")
        axes.set_title(title, loc="left", fontsize=11, weight="bold")
        if budget < 1:
            axes.axhline(plan.budget_bytes / MIB, color=THEIRS, linewidth=1.5)
            axes.text(0, plan.budget_bytes / MIB + 3, "budget", color=THEIRS, weight="bold")
            axes.set_xlabel("seconds since the step began")
        else:
            axes.text(times[plan.memory.loss_point], 157, " loss point", fontsize=10, va="top")
    _name_bands(rows[0])
    write(figure, "step-memory")


def _held_mib(memory: StepMemory, kinds: tuple[Kind, ...]) -> list[float]:
    lives = tuple(x for x in memory.lives if memory.tensors[x.tensor].kind in kinds)
    return [nbytes / MIB for nbytes in memory.held_bytes(lives)]


def _name_bands(axes: Any) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=color, label=name) for name, color, _ in reversed(BANDS)]
    axes.figure.legend(
        handles=patches, loc="outside lower center", ncols=2, fontsize=10, frameon=False
    )


def cuts_of_a_forward() -> None:
    """Draw the bytes that cross each position of a forward, and where it is cut."""
    from fxremat import Effort
    from fxremat.passes.stages import linearize
    from tests.harness import capture

    entry = gpt_entry("three blocks", GPTConfig(blocks=3), batch=4, length=512)
    args, _ = entry.sample(0)
    joint = capture(entry.build(), args).joint
    found: list[Any] = []
    real = linearize.cut_segments

    def watched(crossing: Any, ends: Any, most_stages: int) -> list[int]:
        cuts = real(crossing, ends, most_stages)
        found.append((crossing, cuts))
        return cuts

    with patch.object(linearize, "cut_segments", watched):
        linearize.linearize(joint, Effort())
    ((crossing, cuts),) = found
    weights = [weight / MIB for weight in crossing.weights]
    figure, axes = new_picture(3.2)
    axes.fill_between(range(len(weights)), weights, step="mid", color=LIGHT, linewidth=0)
    for cut in cuts:
        axes.axvline(cut, color=THEIRS, linewidth=1.2)
    axes.set_ylim(0, max(weights) * 1.05)
    axes.set_xlim(0, len(weights) - 1)
    axes.set_title("cuts, where a stage ends", loc="left", color=THEIRS, fontsize=11,
                   weight="bold")  # fmt: skip
    axes.set_xlabel("operations of the forward, in the order of the model")
    axes.set_ylabel("MiB that cross (weighted)")
    write(figure, "cuts")


def schedule_as_lanes() -> None:
    """Draw a schedule: each stage is a line, and each operation a bar."""
    plan = plan_of(0.24)
    figure, axes = new_picture(4.2)
    seen: set[int] = set()
    for event in plan.timeline.events:
        op = event.op
        if not isinstance(op, Forward | Backward):
            continue
        again = isinstance(op, Forward) and op.stage in seen
        color = THEIRS if again else OTHER if isinstance(op, Backward) else OURS
        axes.barh(op.stage, event.end_s - event.start_s, left=event.start_s, height=1, color=color)
        seen.add(op.stage)
    axes.invert_yaxis()
    axes.set_ylabel("stage of the model")
    axes.set_xlabel("seconds since the step began")
    place = axes.transAxes
    axes.text(0.02, 0.04, "forward", color=OURS, weight="bold", transform=place)
    axes.text(0.42, 0.04, "recomputed", color=THEIRS, weight="bold", transform=place)
    axes.text(0.80, 0.04, "backward", color=OTHER, weight="bold", transform=place)
    write(figure, "schedule")


def frontier_and_bound() -> None:
    """Draw the frontier of the GPT, and the lower bound at some budgets."""
    from fxremat.errors import BudgetError

    whole = plan_of(1.0)
    points = whole.frontier.points
    least, most = points[0].peak_bytes, points[-1].peak_bytes
    bounds = []
    for i in range(7):
        try:
            plan = plan_of(least + (most - least) * i // 6)
        except BudgetError:
            continue
        bounds.append((plan.budget_bytes / MIB, plan.lower_bound_s / plan.baseline_s))
    base_s = points[-1].predicted_s
    figure, axes = new_picture(3.2)
    line = [(p.peak_bytes / MIB, p.predicted_s / base_s) for p in points]
    axes.step(*zip(*line, strict=True), where="post", color=OURS, linewidth=2.2)
    axes.plot(*zip(*bounds, strict=True), "--", color=THEIRS, marker="o", markersize=4)
    axes.text(34, 1.22, "plans", color=OURS, weight="bold", fontsize=12)
    axes.text(40, 1.025, "lower bound", color=THEIRS, weight="bold")
    axes.set_ylim(0.94, None)
    axes.set_xlabel("budget (MiB)")
    axes.set_ylabel("time ÷ everything kept")
    write(figure, "frontier-and-bound")


def ablation() -> None:
    """Draw what each way to plan reaches, from the recorded results of ``benchmarks.ablation``."""
    rows = json.loads((RESULTS / "ablation.json").read_text())["results"]["rows"]
    figure, axes = new_picture(3.4)
    for place, key in enumerate(WAYS.values()):
        ratios = []
        for row in rows:
            seconds = row["ways"][key]["seconds"][: len(row["bound_s"])]
            pairs = zip(seconds, row["bound_s"], strict=True)
            ratios += [math.inf if s is None else s / bound_s for s, bound_s in pairs]
        served = sum(ratio < math.inf for ratio in ratios)
        axes.barh(place, served, height=0.65, color=OURS if place > 2 else GRAY)
        axes.text(served - 2, place, f"{median(ratios):.3f} × bound", color="white", ha="right",
                  va="center", weight="bold", fontsize=10)  # fmt: skip
    axes.set_yticks(range(len(WAYS)), list(WAYS))
    axes.invert_yaxis()
    axes.set_xlabel(f"budgets at which it has a plan, of {len(ratios)}")
    write(figure, "ablation")


def copies() -> None:
    """Draw the three lanes of a plan that offloads."""
    plan = plan_of(0.5, "only")
    lanes = {Lane.COMPUTE: 0, Lane.D2H: 1, Lane.H2D: 2}
    figure, axes = new_picture(2.4)
    seen: set[int] = set()
    for event in plan.timeline.events:
        if event.end_s <= event.start_s:
            continue
        op = event.op
        again = isinstance(op, Forward) and op.stage in seen
        color = THEIRS if again else OTHER if isinstance(op, Backward) else OURS
        if event.lane is not Lane.COMPUTE:
            color = BROWN
        elif isinstance(op, Forward):
            seen.add(op.stage)
        axes.barh(lanes[event.lane], event.end_s - event.start_s, left=event.start_s, height=0.7,
                  color=color)  # fmt: skip
    for share, name in ((0.02, "forward"), (0.5, "backward")):
        axes.text(share * plan.predicted_s, 0, name, color="white", va="center", weight="bold")
    axes.set_yticks([0, 1, 2], ["compute", "to the host", "from the host"])
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the step began")
    write(figure, "copies")


WAYS = {
    "uniform": "uniform",
    "greedy": "greedy",
    "torch's knapsack": "torch's knapsack, ilp",
    "rotor": "rotor",
    "+ save options": "+ save options",
    "+ local search": "+ climbing",
    "+ joins": "+ joins: the whole planner",
}
"""Ways to plan by their names in the picture."""

PICTURES: dict[str, Callable[[], None]] = {
    "step-memory": memory_of_a_step,
    "cuts": cuts_of_a_forward,
    "schedule": schedule_as_lanes,
    "frontier-and-bound": frontier_and_bound,
    "ablation": ablation,
    "copies": copies,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pictures", nargs="*", help=", ".join(PICTURES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.pictures or PICTURES:
        PICTURES[name]()


if __name__ == "__main__":
    main()
