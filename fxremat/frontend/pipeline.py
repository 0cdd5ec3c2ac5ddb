"""From a joint graph and a budget to a plan and the graphs that carry it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.costs.cost import Progress
from fxremat.costs.overhead import Around, Rehearsal
from fxremat.costs.synthetic import Synthesizer
from fxremat.frontend.budget import Budget
from fxremat.passes.emit.code import ScheduleModule
from fxremat.passes.emit.rewrite import BlockModules, rewrite
from fxremat.passes.emit.travel import Move, Travel
from fxremat.passes.joint.build import build_joint_graph
from fxremat.passes.joint.graph import JointGraph
from fxremat.passes.joint.invert import is_inverse
from fxremat.passes.stages.signature import tensor_key
from fxremat.planner.allocations import settings_of
from fxremat.planner.candidate import Candidate
from fxremat.planner.search import Search
from fxremat.planner.surroundings import Caller
from fxremat.planner.transfers import HostMemory, Moved, Transfers
from fxremat.report.frontier import frontier_of
from fxremat.report.plan import Plan
from fxremat.runtime.arena import Arena
from fxremat.runtime.slots import assign_slots
from fxremat.simulate.allocator import AllocatorSettings


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, its graphs, and the host memory that they use, if any.

    Attributes:
        recomputes: whether anything is computed twice.
        rehearsal: tells what the step takes beside its calls; it holds the step's inputs.
    """

    plan: Plan
    forward: ScheduleModule
    backward: ScheduleModule
    recomputes: bool
    arena: Arena | None = None
    rehearsal: Rehearsal | None = None

    def with_overhead(self, seconds: float) -> Planned:
        """The same, of a step that takes ``seconds`` beside its calls."""
        return replace(self, plan=self.plan.with_overhead(seconds), rehearsal=None)


@dataclass(frozen=True, slots=True)
class _Way:
    """Schedules of one graph of the step.

    Attributes:
        search: all of them.
        transfers: those with storages that travel; ``None``: none may.
        exact: the graph computes every value as it was traced.
    """

    search: Search
    transfers: Transfers | None
    exact: bool

    @property
    def least_bytes(self) -> int:
        """The least feasible budget."""
        return (self.transfers or self.search).least_bytes

    def fastest_within(self, budget_bytes: int) -> Moved:
        """The fastest that fits."""
        if self.transfers is not None:
            return self.transfers.fastest_within(budget_bytes)
        return Moved.of(self.search.fastest_within(budget_bytes), (), None)


def plan_step(
    module: fx.GraphModule,
    *,
    forward_output_count: int,
    inputs: Mapping[int, torch.Tensor],
    budget: Budget,
    caller: Caller,
    progress: Progress,
    host: HostMemory | None = None,
    exact: bool = True,
    allocator: AllocatorSettings | None = None,
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
        exact: gradients must be bitwise those without a plan; else inputs of norms may be
            rebuilt from outputs where that is faster, or fits where nothing else does.
        allocator: rules that hold in place of those of the device's allocator.

    Raises:
        BudgetError: no schedule that was found fits the budget.
        HostMemoryError: the host memory cannot be had.
        CaptureError, GraphError, CostError: as the passes raise them.
    """
    ways: list[_Way] = []
    for as_traced in (True,) if exact else (True, False):
        joint = build_joint_graph(
            module,
            forward_output_count=forward_output_count,
            mutated_primals=torch_compat.mutated_primals(module),
            exact=as_traced,
        )
        if not as_traced and not any(map(is_inverse, joint.forward)):
            break
        real = {joint.primals[i]: tensor for i, tensor in inputs.items()}
        rules = allocator or settings_of(joint.device)
        search = Search.of(joint, real=real, caller=caller, progress=progress, allocator=rules)
        transfers = None if host is None else Transfers.of(search, host)
        ways.append(_Way(search, transfers, as_traced))
    full_bytes = ways[0].search.counted_bytes(ways[0].search.baseline)
    least = min(ways, key=lambda way: way.least_bytes)
    resolved = budget.resolve(
        full_bytes=full_bytes,
        least_bytes=least.least_bytes,
        needed_by=(least.transfers or least.search).describe_least(),
    )
    way, found = _fastest(ways, resolved)
    planned = emit(
        way.search,
        found,
        resolved,
        least_bytes=least.least_bytes,
        baseline=ways[0].search.baseline,
        baseline_bytes=full_bytes,
        host=host,
        exact=way.exact,
    )
    joint = way.search.measured.line.joint
    if joint.device.type == "cuda":
        torch.cuda.empty_cache()  # blocks that measuring has left would be handed out whole
    return replace(planned, rehearsal=_rehearsal(planned, joint, inputs))


def _fastest(ways: list[_Way], budget_bytes: int) -> tuple[_Way, Moved]:
    """The fastest within a budget, and the way it goes; the exact one where it is as fast."""
    fitting = [way for way in ways if way.least_bytes <= budget_bytes]
    found = [(way, way.fastest_within(budget_bytes)) for way in fitting]
    first, chosen = found[0]
    if chosen.candidate is first.search.baseline and not chosen.moves:
        return first, chosen  # everything fits
    return min(found, key=lambda pair: pair[1].total_s)


def emit(
    search: Search,
    found: Moved,
    budget_bytes: int,
    *,
    least_bytes: int,
    baseline: Candidate,
    baseline_bytes: int,
    host: HostMemory | None = None,
    exact: bool = True,
) -> Planned:
    """Write the graphs of a schedule, and the plan that tells of them.

    Args:
        search: where the schedule was found.
        found: the schedule, and what travels.
        budget_bytes: what it keeps to.
        least_bytes: the least feasible budget.
        baseline: nothing recomputed, everything computed as it was traced.
        baseline_bytes: its peak, of what the budget is for.
        host: memory to which storages travel.
        exact: ``search`` is of the graph as it was traced.
    """
    chosen = found.candidate
    taken = search.allocations.of(chosen.program, found.sweep, found.moves)
    arena, travel = _lay_out(found.moves, search, host)
    forward, backward = rewrite(chosen.program, found.sweep.peaks_bytes, BlockModules(), travel)
    # The bound is one of recomputation alone, of the operations as they were traced.
    bounded = exact and not host
    bound_s = search.lower_bound_s(budget_bytes) if bounded else baseline.total_s
    plan = Plan(
        budget_bytes=budget_bytes,
        least_budget_bytes=least_bytes,
        predicted_peak_bytes=taken.allocated_bytes,
        predicted_reserved_bytes=taken.reserved_bytes,
        predicted_held_bytes=found.sweep.peak_bytes,
        predicted_s=found.total_s,
        baseline_peak_bytes=baseline_bytes,
        baseline_s=baseline.total_s,
        lower_bound_s=min(bound_s, found.total_s),
        local_search_s=0.0 if host else search.gained_s(budget_bytes),
        host_bytes=travel.nbytes if travel else 0,
        schedule=chosen.schedule,
        held_bytes=_held_bytes(chosen),
        timeline=found.timeline,
        chain=search.chain,
        costs=search.costs,
        frontier=frontier_of(search.points()),
        forward_code=forward.code,
        backward_code=backward.code,
        branch_ends=search.sweeps.line.segments.ends,
        exact=exact,
        budget_on=search.allocations.budget_on,
    )
    return Planned(plan, forward, backward, chosen is not search.baseline, arena)


def _rehearsal(
    planned: Planned, joint: JointGraph, inputs: Mapping[int, torch.Tensor]
) -> Rehearsal:
    """How to run the planned step without its caller."""
    with torch_compat.real_execution():
        values = Synthesizer(joint, {joint.primals[i]: t for i, t in inputs.items()})
        primals, tangents = values.of(joint.primals), values.of(joint.tangents)
    around = Around(
        device=joint.device,
        inputs=tuple(tensor_key(n.meta["val"]) for n in joint.primals),
        operations=tuple(str(n.target) for n in (*joint.forward, *joint.backward)),
        gradients=sum(isinstance(g, fx.Node) for g in joint.backward_outputs),
        travels=planned.arena is not None,
    )
    return Rehearsal(
        around,
        planned.forward.forward,
        planned.backward.forward,
        outputs=len(joint.forward_outputs),
        primals=tuple(primals.values()),
        tangents=tuple(tangents.values()),
        calls_s=planned.plan.timeline.makespan_s,
    )


def _lay_out(
    moves: tuple[Move, ...], search: Search, host: HostMemory | None
) -> tuple[Arena | None, Travel | None]:
    """Host memory for a step, and where in it each storage goes."""
    if host is None or not moves:
        return None, None
    slots = assign_slots([m.nbytes for m in moves])  # all are on the host at the turn
    arena = Arena.create(
        slots.total_bytes,
        device=search.sweeps.surroundings.device,
        host_dir=host.folder,
        limit=host.limit,
    )
    offsets = dict(zip((m.storage for m in moves), slots.offsets, strict=True))
    return arena, Travel(moves, offsets, slots.total_bytes, arena.id)


def _held_bytes(chosen: Candidate) -> tuple[int, ...]:
    line = chosen.program.line
    table = line.joint.storages
    return tuple(table.total(table.of(chosen.held.get(i, ()))) for i in range(len(line.stages)))
