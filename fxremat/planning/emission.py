"""From a candidate, or a saved plan, to the functions that AOTAutograd runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fxremat.errors import PlanError, ScheduleError
from fxremat.graph.compiled_plan import CompiledPlan, code_of
from fxremat.graph.graph import Graph
from fxremat.graph.memory_record import decided_in, record_memory
from fxremat.ir import TRACED, Decision, Lane, Move, Origin
from fxremat.ir.schedule import decoded
from fxremat.passes.emit.code import Emitted
from fxremat.passes.emit.early import Early, early_fetches
from fxremat.passes.emit.program import Program
from fxremat.passes.emit.rewrite import BlockModules, Travel, rewrite
from fxremat.passes.fuse.unit import Unit
from fxremat.passes.joint.sizes import Sizes, Values
from fxremat.passes.parts.parts import Parts
from fxremat.passes.stages.block import BlockCache, Mode
from fxremat.passes.stages.linearize import Line
from fxremat.planner.context.step_context import StepContext
from fxremat.planner.decision.candidates import Evaluation
from fxremat.planner.decision.moves import replay
from fxremat.planner.search.evaluator import carried_out
from fxremat.planner.transfers.transfers import HostMemory
from fxremat.planning.choose import Chosen
from fxremat.report.facts import Fused
from fxremat.report.memory import Kind, Outline, StepMemory
from fxremat.report.plan import Plan
from fxremat.runtime.arena import Arena
from fxremat.runtime.slots import assign_slots


@dataclass(frozen=True, slots=True)
class _Written:
    """The forward and backward emitted for a plan, and the host memory that they use."""

    forward: Emitted
    backward: Emitted
    recomputes: bool
    arena: Arena | None
    early: tuple[Early, ...] = ()

    def followed(self, record: Plan, sizes: Sizes) -> CompiledPlan:
        """Return the emitted functions as a plan in use, with its ``record``."""
        return CompiledPlan(record, self.forward, self.backward, sizes, self.recomputes, self.arena)


def _write(
    program: Program,
    peaks_bytes: Sequence[int],
    moves: tuple[Move, ...],
    modules: BlockModules,
    *,
    host: HostMemory | None,
    sizes: Values = (),
) -> _Written:
    """Emit the forward and the backward of a program.

    Args:
        program: the operations of the step.
        peaks_bytes: peak of each of its calls, for comments in the code.
        moves: storages that are moved to host memory and back.
        modules: blocks that were emitted before; new ones are added.
        host: memory to which storages are moved.
        sizes: numbers of the symbols; empty: those of the capture.

    Raises:
        HostMemoryError: the host memory is not available.
    """
    arena, travel = None, None
    if host is not None and moves:
        # All are on the host at the loss point.
        slots, total_bytes = assign_slots([m.nbytes for m in moves])
        if host.link is None:  # else the graphs are never run
            device = program.line.joint.device
            arena = Arena(total_bytes, device=device, host_dir=host.folder, limit=host.limit)
        offsets = dict(zip((m.storage for m in moves), slots, strict=True))
        travel = Travel(moves, offsets, total_bytes, arena.id if arena else 0)
    early = early_fetches(program, peaks_bytes) if host is not None else ()
    forward, backward = rewrite(program, peaks_bytes, modules, travel, early)
    symbols = program.line.joint.sizes
    if sizes != symbols.hints and sizes:
        names = {**symbols.named(sizes), **(travel.names() if travel else {})}
        forward, backward = forward.at(names), backward.at(names)
    blocks = (call.block for call in program.calls)
    recomputes = any(block.mode is Mode.AGAIN or block.again for block in blocks)
    return _Written(forward, backward, recomputes, arena, early)


def emit(graph: Graph, context: StepContext, chosen: Chosen, origin: Origin) -> CompiledPlan:
    """Emit the forward and backward of a chosen candidate; return them with the plan's record.

    The step's memory over time, and a lower bound of the time of any plan, are computed only when
    the record is read.

    Args:
        graph: the captured graph.
        context: the context of the call.
        chosen: the candidate, and what it was chosen from.
        origin: what the plan depends on.

    Raises:
        HostMemoryError: the memory to which storages are moved is not available.
    """
    pool, candidate, traced = chosen.pool, chosen.candidate, chosen.traced
    search, baseline, host = pool.search, traced.baseline, graph.options.host
    held, budget_bytes = pool.held, chosen.budget_bytes
    program = search.evaluator.program(candidate)
    evaluation = search.evaluator.evaluation(candidate)
    written = _write(
        program, evaluation.peaks_bytes, candidate.moves, graph.modules, host=host,
        sizes=context.sizes,
    )  # fmt: skip
    plan = _plan(graph, context, chosen, origin, program, evaluation, written)
    compiled, total_s = written.followed(plan, graph.sizes), plan.predicted_s
    memory = partial(
        record_memory,
        program,
        held,
        search.allocations.footprints,
        candidate.moves,
        roles=graph.roles,
        held_outside={
            Kind.GRADIENTS: sum(
                graph.gradient_bytes(context.sizes, context.existing - context.hosted)
            ),
            Kind.OPTIMIZER: graph.optimizer_bytes + context.state_bytes,
            Kind.RESERVE: graph.caller.reserve_bytes,
        },
        again_s=search.measured.again_s,
    )
    # The bound is one of recomputation only, of the operations as they were traced.
    bound = search.bound(budget_bytes) if pool.form == TRACED and not host else None
    kept = partial(traced.search.evaluator.evaluation, baseline)
    compiled.complete = partial(_completed, record=memory, bound=bound, kept=kept, total_s=total_s)
    return compiled


def _plan(
    graph: Graph,
    context: StepContext,
    chosen: Chosen,
    origin: Origin,
    program: Program,
    evaluation: Evaluation,
    written: _Written,
) -> Plan:
    """Return the record of a chosen candidate, whose ``program`` was emitted as ``written``."""
    pool, candidate, traced = chosen.pool, chosen.candidate, chosen.traced
    search, baseline, held = pool.search, traced.baseline, pool.held
    line, budget_bytes = search.measured.line, chosen.budget_bytes
    decision, taken = search.evaluator.decision(candidate), search.allocated(candidate)
    link = pool.transfers.link if pool.transfers else None
    timeline = replay(evaluation, line, candidate.moves, link, written.early)
    total_s = timeline.makespan_s
    return Plan(
        budget_bytes=budget_bytes,
        least_budget_bytes=chosen.least_bytes,
        predicted_peak_bytes=taken.allocated_bytes,
        predicted_reserved_bytes=taken.reserved_bytes,
        predicted_held_bytes=evaluation.peak_bytes,
        predicted_s=total_s,
        baseline_peak_bytes=chosen.full_bytes,
        baseline_s=baseline.total_s,
        lower_bound_s=min(baseline.total_s, total_s),
        local_search_s=0.0 if graph.options.host else search.gained_s(budget_bytes),
        host_bytes=candidate.host_bytes,
        schedule=decoded(candidate.codes),
        held_bytes=_held_bytes(line, decision),
        timeline=timeline,
        chain=search.chain,
        costs=search.costs,
        frontier=chosen.frontier,
        forward_code=code_of(written.forward),
        backward_code=code_of(written.backward),
        branch_ends=line.segments.ends,
        form=pool.form,
        budget_on=search.allocations.budget_on,
        decision=decision,
        origin=origin,
        also_held=graph.described(context),
        sizes=tuple(zip(line.joint.sizes.names, context.sizes, strict=True)),
        fused=_fused(program, context.sizes),
        waiting_bytes=evaluation.loss_point_bytes - held.given_bytes - held.loss_point_more_bytes,
        measured=pool.costs,
        usual=chosen.usual,
        zeros_budget_bytes=chosen.zeros_budget_bytes,
        forms_left=chosen.forms_left,
        decided=decided_in(line),
        training_state=graph.training_state,
        parameters_in_host=graph.parameters_in_host,
    )


def _completed(
    plan: Plan,
    *,
    record: Callable[[], StepMemory],
    bound: Callable[[], float] | None,
    kept: Callable[[], Evaluation],
    total_s: float,
) -> Plan:
    """Return ``plan`` with the fields that take long to compute.

    Args:
        plan: the record of a plan.
        record: returns the step's memory over time.
        bound: returns a lower bound of the seconds of any plan; ``None``: the plan has it.
        kept: returns the evaluation of the plan that keeps everything.
        total_s: the seconds that the plan's step takes.
    """
    if bound is not None:
        plan = replace(plan, lower_bound_s=min(bound(), total_s))
    own = kept()
    baseline = Outline(own.seconds, own.peaks_bytes, own.loss_point, own.loss_point_bytes)
    return replace(plan, memory=record(), kept=baseline)


def _fused(program: Program, values: Values) -> tuple[Fused, ...]:
    """Return the fused units and runs in parts that a step calls, in order, and how often."""
    targets = (node.target for call in program.calls for node in call.block.nodes)
    count = Counter(target for target in targets if isinstance(target, (Unit, Parts)))
    sizes = program.line.joint.sizes.named(values)

    def parts_of(own: Unit | Parts) -> int:
        return own.count(sizes) if isinstance(own, Parts) else 1

    return tuple(
        Fused(own.__name__, own.operations, calls, parts_of(own)) for own, calls in count.items()
    )


def _held_bytes(line: Line, decision: Decision) -> tuple[int, ...]:
    """Return, for each stage, the bytes of the tensors that it keeps from its first forward on."""
    table, held, nodes = line.joint.storages, dict(decision.held), line.nodes
    each = ([nodes[i] for i in held.get(stage, ())] for stage in range(len(line.stages)))
    return tuple(table.total(table.of(own)) for own in each)


def follow(plan: Plan, graph: Graph, blocks: BlockCache) -> CompiledPlan:
    """Emit the functions of a saved plan, and check that they are those that the plan contains.

    Args:
        plan: the saved plan.
        graph: the captured graph.
        blocks: the blocks of the graph's stages, in the form of the plan.

    Raises:
        PlanError: the functions differ.
        HostMemoryError: the host memory is not available.
    """
    compiled = carry_out(plan, graph, blocks)
    code = compiled.forward_code, compiled.backward_code
    if code != (plan.forward_code, plan.backward_code):
        compiled.close()
        raise _unlike(plan)
    return compiled


def carry_out(plan: Plan, graph: Graph, blocks: BlockCache) -> CompiledPlan:
    """Emit the functions for what a plan decides.

    The plan is of this graph, or of one that differs in its constants only.

    Raises:
        PlanError: the plan is of another graph.
        HostMemoryError: the host memory is not available.
    """
    line, decision = blocks.line, plan.decision
    peaks = [event.peak_bytes for event in plan.timeline.events if event.lane is Lane.COMPUTE]
    try:
        program = carried_out(line, blocks, plan.schedule, decision)
        sizes = tuple(number for _, number in plan.sizes)
        written = _write(
            program, peaks, decision.moves, graph.modules, host=graph.options.host, sizes=sizes
        )
    except (LookupError, ScheduleError) as error:
        raise _unlike(plan) from error
    return written.followed(plan, graph.sizes)


def _unlike(plan: Plan) -> PlanError:
    """Return the error that a plan's code is not what the plan decides."""
    return PlanError(
        f"the plan for {plan.budget_bytes} bytes does not lead to the code that it contains. It "
        "was changed, or written by another version of fxremat. Omit plan= to plan again, and "
        "save the new plan",
        code="FXR603",
    )
