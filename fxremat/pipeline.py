"""From a joint graph and a budget to a plan and the graphs that carry it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.budget import Budget
from fxremat.ir import Event, Timeline
from fxremat.passes.candidate import Candidate
from fxremat.passes.cost import Progress
from fxremat.passes.emit import ScheduleModule
from fxremat.passes.joint import build_joint_graph
from fxremat.passes.rewrite import BlockModules, rewrite
from fxremat.passes.surroundings import Caller
from fxremat.report.frontier import frontier_of
from fxremat.report.plan import Plan
from fxremat.search import Search


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan and its graphs."""

    plan: Plan
    forward: ScheduleModule
    backward: ScheduleModule


def plan_step(
    module: fx.GraphModule,
    *,
    forward_output_count: int,
    inputs: Mapping[int, torch.Tensor],
    budget: Budget,
    caller: Caller,
    progress: Progress,
) -> Planned:
    """Plan one captured step.

    Args:
        module: AOTAutograd's joint graph.
        forward_output_count: how many of its outputs are the forward's.
        inputs: real values of primals, by index.
        budget: what the peak may reach.
        caller: what is needed beside the step.
        progress: told how far measuring and solving have come.

    Raises:
        BudgetError: no schedule that was found fits the budget.
        CaptureError, GraphError, CostError: as the passes raise them.
    """
    joint = build_joint_graph(
        module,
        forward_output_count=forward_output_count,
        mutated_primals=torch_compat.mutated_primals(module),
    )
    real = {joint.primals[i]: tensor for i, tensor in inputs.items()}
    search = Search.of(joint, real=real, caller=caller, progress=progress)
    resolved = budget.resolve(
        full_bytes=search.baseline.peak_bytes,
        least_bytes=search.least.peak_bytes,
        needed_by=search.describe_peak(search.least),
    )
    return emit(search, resolved)


def emit(search: Search, budget_bytes: int) -> Planned:
    """Write the graphs of the best schedule within a budget, and the plan that tells of them."""
    chosen = search.fastest_within(budget_bytes)
    forward, backward = rewrite(chosen.program, chosen.sweep, BlockModules())
    plan = Plan(
        budget_bytes=budget_bytes,
        least_budget_bytes=search.least.peak_bytes,
        predicted_peak_bytes=chosen.peak_bytes,
        predicted_s=chosen.total_s,
        baseline_peak_bytes=search.baseline.peak_bytes,
        baseline_s=search.baseline.total_s,
        lower_bound_s=min(search.lower_bound_s(budget_bytes), chosen.total_s),
        local_search_s=search.gained_s(budget_bytes),
        schedule=chosen.schedule,
        held_bytes=_held_bytes(chosen),
        timeline=_timeline(chosen),
        chain=search.chain,
        costs=search.costs,
        frontier=frontier_of([(c.peak_bytes, c.total_s) for c in search.frontier]),
        forward_code=forward.code,
        backward_code=backward.code,
        branch_ends=search.sweeps.line.branch_ends,
    )
    return Planned(plan, forward, backward)


def _held_bytes(chosen: Candidate) -> tuple[int, ...]:
    line = chosen.program.line
    table = line.joint.storages
    return tuple(table.total(table.of(chosen.held.get(i, ()))) for i in range(len(line.stages)))


def _timeline(chosen: Candidate) -> Timeline:
    events, now = [], 0.0
    for call, seconds, peak, held in zip(
        chosen.program.calls,
        chosen.seconds,
        chosen.sweep.peaks_bytes,
        chosen.sweep.held_bytes,
        strict=True,
    ):
        events.append(Event(call.op, now, now + seconds, peak, held))
        now += seconds
    return Timeline(tuple(events))
