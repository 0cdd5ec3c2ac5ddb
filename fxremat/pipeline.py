"""From a joint graph and a budget to a plan and the graphs that carry it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.budget import Budget
from fxremat.passes.candidate import Candidate
from fxremat.passes.cost import Progress
from fxremat.passes.emit import ScheduleModule
from fxremat.passes.joint import build_joint_graph
from fxremat.passes.moves import Move
from fxremat.passes.rewrite import BlockModules, Travel, rewrite
from fxremat.passes.surroundings import Caller
from fxremat.report.frontier import frontier_of
from fxremat.report.plan import Plan
from fxremat.runtime.arena import Arena
from fxremat.runtime.slots import Life, assign_slots
from fxremat.search import Search
from fxremat.transfers import HostMemory, Moved, Transfers


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, its graphs, and the host memory that they use, if any."""

    plan: Plan
    forward: ScheduleModule
    backward: ScheduleModule
    arena: Arena | None = None


def plan_step(
    module: fx.GraphModule,
    *,
    forward_output_count: int,
    inputs: Mapping[int, torch.Tensor],
    budget: Budget,
    caller: Caller,
    progress: Progress,
    host: HostMemory | None = None,
) -> Planned:
    """Plan one captured step.

    Args:
        module: AOTAutograd's joint graph.
        forward_output_count: how many of its outputs are the forward's.
        inputs: real values of primals, by index.
        budget: what the peak may reach.
        caller: what is needed beside the step.
        progress: told how far measuring and solving have come.
        host: memory to which storages may travel; ``None``: none may.

    Raises:
        BudgetError: no schedule that was found fits the budget.
        HostMemoryError: the host memory cannot be had.
        CaptureError, GraphError, CostError: as the passes raise them.
    """
    joint = build_joint_graph(
        module,
        forward_output_count=forward_output_count,
        mutated_primals=torch_compat.mutated_primals(module),
    )
    real = {joint.primals[i]: tensor for i, tensor in inputs.items()}
    search = Search.of(joint, real=real, caller=caller, progress=progress)
    if host is None:
        resolved = budget.resolve(
            full_bytes=search.baseline.peak_bytes,
            least_bytes=search.least.peak_bytes,
            needed_by=search.describe_peak(search.least),
        )
        found = Moved.of(search.fastest_within(resolved), (), None)
        return emit(search, found, resolved, least_bytes=search.least.peak_bytes)
    transfers = Transfers.of(search, host)
    resolved = budget.resolve(
        full_bytes=search.baseline.peak_bytes,
        least_bytes=transfers.least_bytes,
        needed_by=transfers.describe_least(),
    )
    found = transfers.fastest_within(resolved)
    return emit(search, found, resolved, least_bytes=transfers.least_bytes, host=host)


def emit(
    search: Search,
    found: Moved,
    budget_bytes: int,
    *,
    least_bytes: int,
    host: HostMemory | None = None,
) -> Planned:
    """Write the graphs of a schedule, and the plan that tells of them."""
    chosen = found.candidate
    arena, travel = _lay_out(found.moves, search, host)
    forward, backward = rewrite(chosen.program, found.sweep, BlockModules(), travel)
    bound_s = search.baseline.total_s if host else search.lower_bound_s(budget_bytes)
    plan = Plan(
        budget_bytes=budget_bytes,
        least_budget_bytes=least_bytes,
        predicted_peak_bytes=found.sweep.peak_bytes,
        predicted_s=found.total_s,
        baseline_peak_bytes=search.baseline.peak_bytes,
        baseline_s=search.baseline.total_s,
        lower_bound_s=min(bound_s, found.total_s),
        local_search_s=0.0 if host else search.gained_s(budget_bytes),
        host_bytes=travel.nbytes if travel else 0,
        schedule=chosen.schedule,
        held_bytes=_held_bytes(chosen),
        timeline=found.timeline,
        chain=search.chain,
        costs=search.costs,
        frontier=frontier_of([(c.peak_bytes, c.total_s) for c in search.frontier]),
        forward_code=forward.code,
        backward_code=backward.code,
        branch_ends=search.sweeps.line.branch_ends,
    )
    return Planned(plan, forward, backward, arena)


def _lay_out(
    moves: tuple[Move, ...], search: Search, host: HostMemory | None
) -> tuple[Arena | None, Travel | None]:
    """Host memory for a step, and where in it each storage goes."""
    if host is None or not moves:
        return None, None
    slots = assign_slots([Life(m.nbytes, m.offload, m.wait + 1) for m in moves])
    arena = Arena.create(
        slots.total_bytes,
        device=search.sweeps.surroundings.device,
        host_dir=host.folder,
        host_limit_bytes=host.limit_bytes,
    )
    offsets = dict(zip((m.storage for m in moves), slots.offsets, strict=True))
    return arena, Travel(moves, offsets, slots.total_bytes, arena.id)


def _held_bytes(chosen: Candidate) -> tuple[int, ...]:
    line = chosen.program.line
    table = line.joint.storages
    return tuple(table.total(table.of(chosen.held.get(i, ()))) for i in range(len(line.stages)))
