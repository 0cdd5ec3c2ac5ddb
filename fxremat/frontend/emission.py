"""From a schedule, or a plan that was kept, to the graphs that AOTAutograd runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import fx

from fxremat import torch_compat
from fxremat.costs.overhead import Rehearsal
from fxremat.costs.synthetic import Synthesizer
from fxremat.errors import PlanError, ScheduleError
from fxremat.frontend.captured import CapturedStep
from fxremat.frontend.record import decided_in, record_memory
from fxremat.frontend.schedules import Schedules
from fxremat.frontend.store import key_of
from fxremat.ir import TRACED, Decision, Lane, Move, Origin
from fxremat.ir.schedule import decoded
from fxremat.passes.emit.code import Emitted
from fxremat.passes.emit.program import Program, shifted
from fxremat.passes.emit.rewrite import BlockModules, Travel, rewrite
from fxremat.passes.fuse.unit import Unit
from fxremat.passes.joint.sizes import Values
from fxremat.passes.split.beside import Beside
from fxremat.passes.split.parts import Parts
from fxremat.passes.stages.block import BlockCache, Mode, tensor_key
from fxremat.passes.stages.linearize import Line
from fxremat.planner.candidates import Candidate, Evaluation
from fxremat.planner.context import StepContext
from fxremat.planner.evaluator import carried_out
from fxremat.planner.overlap import may_overlap, overlap_within
from fxremat.planner.search import Search
from fxremat.planner.transfers import HostMemory
from fxremat.report.facts import Fused
from fxremat.report.frontier import Frontier
from fxremat.report.memory import Kind, Outline, StepMemory
from fxremat.report.plan import Plan
from fxremat.runtime.arena import Arena
from fxremat.runtime.slots import assign_slots


@dataclass(frozen=True, slots=True)
class Graphs:
    """The graphs of a step.

    Attributes:
        recomputes: whether anything is computed twice.
        arena: the host memory that they use, if any.
    """

    forward: Emitted
    backward: Emitted
    recomputes: bool
    arena: Arena | None = None

    @property
    def structure_digest(self) -> str:
        """A digest of what they run, by all but what a rank has of its own."""
        return " ".join(emitted.structure_digest() for emitted in self.both)

    @property
    def forward_code(self) -> str:
        """The forward as Python, with the runs that it computes in parts."""
        return _code_of(self.forward)

    @property
    def backward_code(self) -> str:
        """The backward as Python, with the runs that it computes in parts."""
        return _code_of(self.backward)

    @property
    def both(self) -> tuple[Emitted, Emitted]:
        """The forward and the backward."""
        return self.forward, self.backward


def _code_of(emitted: Emitted) -> str:
    """Its code, and the loop of each run that it calls."""
    stages = [s for s in emitted.body.stages.values() if isinstance(s, fx.GraphModule)]
    nodes = (node for stage in stages for node in stage.graph.nodes)
    targets = dict.fromkeys(node.target for node in nodes)
    runs = dict.fromkeys(
        run
        for target in targets
        for run in ((target.parts, target) if isinstance(target, Beside) else (target,))
        if isinstance(run, (Parts, Beside))
    )
    return "\n".join([emitted.code, *(run.code for run in runs)])


def write_graphs(
    program: Program,
    peaks_bytes: Sequence[int],
    moves: tuple[Move, ...],
    modules: BlockModules,
    *,
    host: HostMemory | None,
    sizes: Values = (),
) -> Graphs:
    """Emit a program; ``peaks_bytes`` of its calls are for people. No ``sizes``: the capture's.

    Raises:
        HostMemoryError: the memory to which ``moves`` lead cannot be had.
    """
    arena, travel = None, None
    if host is not None and moves:
        # All are on the host at the turn.
        slots, total_bytes = assign_slots([m.nbytes for m in moves])
        if host.link is None:  # else the graphs are never run
            device = program.line.joint.device
            arena = Arena(total_bytes, device=device, host_dir=host.folder, limit=host.limit)
        offsets = dict(zip((m.storage for m in moves), slots, strict=True))
        travel = Travel(moves, offsets, total_bytes, arena.id if arena else 0)
    forward, backward = rewrite(program, peaks_bytes, modules, travel)
    known = program.line.joint.sizes
    if sizes != known.hints and sizes:
        names = {**known.named(sizes), **(travel.names() if travel else {})}
        forward, backward = forward.at(names), backward.at(names)
    blocks = (call.block for call in program.calls)
    recomputes = any(block.mode is Mode.AGAIN or block.again for block in blocks)
    return Graphs(forward, backward, recomputes, arena)


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan and its graphs.

    Attributes:
        measure_overhead: finds, and keeps, the seconds that the step takes beside its calls; it
            holds the step's inputs. ``None`` where that is known, or will not be.
        complete: finds what a step holds in memory, and how fast it could be; ``None`` where the
            plan says that.
    """

    plan: Plan
    graphs: Graphs
    measure_overhead: Callable[[Callable[[], object]], float] | None = None
    complete: Callable[[Plan], Plan] | None = None

    def with_overhead(self, seconds: float) -> Planned:
        """This plan, of a step that takes ``seconds`` beside its calls."""
        return replace(self, plan=self.plan.with_overhead(seconds), measure_overhead=None)

    def completed(self) -> Planned:
        """This plan with all that it tells people."""
        if self.complete is None:
            return self
        return replace(self, plan=self.complete(self.plan), complete=None)


def emit(
    step: CapturedStep,
    context: StepContext,
    chosen: tuple[Schedules, Candidate],
    budget_bytes: int,
    modules: BlockModules,
    *,
    least_bytes: int,
    traced: Search,
    frontier: Frontier,
    host: HostMemory | None,
    origin: Origin,
) -> Planned:
    """Write the graphs of a schedule, and the plan that tells of them.

    The step's memory, and how near the plan comes to any other, are found when they are asked for:
    the bound on these is that of the baseline before.

    Args:
        step: what was captured.
        context: what the call found.
        chosen: the schedule, and where it was found.
        budget_bytes: what it keeps to.
        modules: blocks that are compiled already; new ones are added.
        least_bytes: the least feasible budget.
        traced: has the baseline: nothing recomputed, everything computed as it was traced.
        frontier: the least time at every other budget.
        host: memory to which storages travel.
        origin: what the plan holds for.

    Raises:
        HostMemoryError: that memory cannot be had.
    """
    schedules, found = chosen
    search, baseline = schedules.search, traced.baseline
    line, around = search.measured.line, search.setting.context_bytes
    overlapped = overlap_within(
        search,
        found,
        link=schedules.transfers.link if schedules.transfers else None,
        budget_bytes=budget_bytes,
        allowed=may_overlap(around.device),
    )
    program, found, taken = overlapped.program, overlapped.candidate, overlapped.allocated
    evaluation, decision = overlapped.evaluation, search.evaluator.decision(found)
    graphs = write_graphs(
        program, evaluation.peaks_bytes, found.moves, modules, host=host, sizes=context.sizes
    )
    plan = Plan(
        budget_bytes=budget_bytes,
        least_budget_bytes=least_bytes,
        predicted_peak_bytes=taken.allocated_bytes,
        predicted_reserved_bytes=taken.reserved_bytes,
        predicted_held_bytes=evaluation.peak_bytes,
        predicted_s=found.total_s,
        baseline_peak_bytes=traced.counted_bytes(baseline),
        baseline_s=baseline.total_s,
        lower_bound_s=min(baseline.total_s, found.total_s),
        local_search_s=0.0 if host else search.gained_s(budget_bytes),
        host_bytes=found.host_bytes,
        schedule=decoded(found.codes),
        held_bytes=_held_bytes(line, decision),
        timeline=overlapped.timeline,
        chain=search.chain,
        costs=search.costs,
        frontier=frontier,
        forward_code=graphs.forward_code,
        backward_code=graphs.backward_code,
        branch_ends=line.segments.ends,
        form=schedules.form,
        budget_on=search.allocations.budget_on,
        decision=decision,
        origin=origin,
        beside=step.described(context),
        sizes=tuple(zip(line.joint.sizes.names, context.sizes, strict=True)),
        fused=_fused(program, context.sizes),
        waiting_bytes=evaluation.turn_bytes - around.given_bytes - around.loss_point_bytes,
        measured=schedules.costs,
        decided=decided_in(line),
    )
    record = partial(
        record_memory,
        program,
        around,
        search.allocations.footprints,
        found.moves,
        roles=step.roles,
        beside={
            Kind.GRADIENTS: sum(context.gradient_bytes(step.joint)),
            Kind.OPTIMIZER: step.optimizer_bytes + context.state_bytes,
            Kind.RESERVE: step.caller.reserve_bytes,
        },
    )
    # The bound is one of recomputation alone, of the operations as they were traced.
    bound = search.bound(budget_bytes) if schedules.form == TRACED and not host else None
    kept = partial(traced.evaluator.evaluation, baseline)
    complete = partial(_completed, record=record, bound=bound, kept=kept, total_s=found.total_s)
    return Planned(plan, graphs, complete=complete)


def _completed(
    plan: Plan,
    *,
    record: Callable[[], StepMemory],
    bound: Callable[[], float] | None,
    kept: Callable[[], Evaluation],
    total_s: float,
) -> Plan:
    """``plan``, whose calls take ``total_s``, with what takes long to find."""
    if bound is not None:
        plan = replace(plan, lower_bound_s=min(bound(), total_s) + plan.overhead_s)
    found = kept()
    baseline = Outline(found.seconds, found.peaks_bytes, found.turn, found.turn_bytes)
    return replace(plan, memory=record(), kept=baseline)


def _fused(program: Program, values: Values) -> tuple[Fused, ...]:
    """The units, and runs in parts, that a step calls, as it meets them."""
    targets = (node.target for call in program.calls for node in call.block.nodes)
    count = Counter(target for target in targets if isinstance(target, (Unit, Parts)))
    sizes = program.line.joint.sizes.named(values)

    def parts_of(own: Unit | Parts) -> int:
        return own.count(sizes) if isinstance(own, Parts) else 1

    return tuple(
        Fused(own.__name__, own.operations, calls, parts_of(own)) for own, calls in count.items()
    )


def _held_bytes(line: Line, decision: Decision) -> tuple[int, ...]:
    table, held, nodes = line.joint.storages, dict(decision.held), line.nodes
    each = ([nodes[i] for i in held.get(stage, ())] for stage in range(len(line.stages)))
    return tuple(table.total(table.of(own)) for own in each)


def follow(
    plan: Plan, blocks: BlockCache, modules: BlockModules, *, host: HostMemory | None
) -> Planned:
    """A kept plan with the graphs that it leads to, word by word.

    Raises:
        PlanError: what is emitted is not what the plan says.
        HostMemoryError: the host memory cannot be had.
    """
    graphs = carry_out(plan, blocks, modules, host=host)
    if (graphs.forward_code, graphs.backward_code) != (plan.forward_code, plan.backward_code):
        if graphs.arena is not None:
            graphs.arena.close()
        raise _unlike(plan)
    return Planned(plan, graphs)


def carry_out(
    plan: Plan, blocks: BlockCache, modules: BlockModules, *, host: HostMemory | None
) -> Graphs:
    """Emit what a plan decides: of this step, or of one that differs in nothing but its constants.

    Raises:
        PlanError: the plan is of another step.
        HostMemoryError: the host memory cannot be had.
    """
    line, decision = blocks.line, plan.decision
    peaks = [event.peak_bytes for event in plan.timeline.events if event.lane is Lane.COMPUTE]
    try:
        program = carried_out(line, blocks, plan.schedule, decision)
        program = replace(program, calls=shifted(program.calls, line, decision.shifts))
        sizes = tuple(number for _, number in plan.sizes)
        return write_graphs(program, peaks, decision.moves, modules, host=host, sizes=sizes)
    except (LookupError, ScheduleError) as error:
        raise _unlike(plan) from error


def _unlike(plan: Plan) -> PlanError:
    return PlanError(
        f"the plan for {plan.budget_bytes} bytes does not lead to the code that it holds: it was "
        "changed, or written by another fxremat. Leave plan= out to plan again, and save that plan"
    )


def with_overhead(planned: Planned, step: CapturedStep) -> Planned:
    """``planned`` with what the step takes beside its calls, or a way to find that."""
    travels = planned.graphs.arena is not None
    key = key_of(step.variants[0].origin, overhead_of=travels)
    known = step.store.get("overhead", key, float)
    if known is not None:
        return planned.with_overhead(known)
    rehearsal = _rehearsal(planned, step)

    def measure(way_in: Callable[[], object]) -> float:
        seconds = rehearsal.overhead_s(way_in)
        step.store.put("overhead", key, float, seconds)
        return seconds

    return replace(planned, measure_overhead=measure)


def _rehearsal(planned: Planned, step: CapturedStep) -> Rehearsal:
    """How to run the planned step without its caller."""
    joint = step.joint
    with torch_compat.real_execution():
        values = Synthesizer(joint, {joint.primals[i]: t for i, t in step.inputs.items()})
        primals, tangents = values.of(joint.primals), values.of(joint.tangents)
    gradients = sum(isinstance(g, fx.Node) for g in joint.backward_outputs)
    ins = tuple(tensor_key(n.meta["val"]) for n in joint.primals)
    operations = tuple(str(n.target) for n in (*joint.forward, *joint.backward))
    return Rehearsal(
        joint.device,
        (joint.device, ins, operations, gradients, planned.graphs.arena is not None),
        gradients,
        planned.graphs.forward.forward,
        planned.graphs.backward.forward,
        outputs=len(joint.forward_outputs),
        primals=tuple(primals.values()),
        tangents=tuple(tangents.values()),
        calls_s=planned.plan.timeline.makespan_s,
    )
