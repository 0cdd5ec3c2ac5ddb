"""From what was decided to the graphs that AOTAutograd runs, and the decision as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fxremat.errors import PlanError, ScheduleError
from fxremat.ir import Lane, Move
from fxremat.passes.emit.code import ScheduleModule, SizedSchedule
from fxremat.passes.emit.program import Program
from fxremat.passes.emit.rewrite import BlockModules, Travel, rewrite
from fxremat.passes.emit.shifts import shifted
from fxremat.passes.joint.digest import structure_digest
from fxremat.passes.joint.sizes import Values
from fxremat.passes.stages.block import BlockCache, Mode
from fxremat.passes.stages.linearize import Line
from fxremat.planner.evaluator import carried_out
from fxremat.planner.transfers import HostMemory
from fxremat.report.plan import Plan
from fxremat.runtime.arena import Arena
from fxremat.runtime.slots import assign_slots

Emitted = ScheduleModule | SizedSchedule


@dataclass(frozen=True, slots=True)
class Graphs:
    """The graphs of a step, and the host memory that they use, if any.

    Attributes:
        recomputes: whether anything is computed twice.
        host_bytes: of host memory that a step takes.
    """

    forward: Emitted
    backward: Emitted
    recomputes: bool
    arena: Arena | None = None
    host_bytes: int = 0

    @property
    def structure_digest(self) -> str:
        """A digest of what the graphs run: :func:`fxremat.passes.joint.digest.structure_digest`."""
        return structure_digest(self.forward.graphs, self.backward.graphs)

    @property
    def both(self) -> tuple[Emitted, Emitted]:
        """The forward and the backward."""
        return self.forward, self.backward


def write_graphs(
    program: Program,
    peaks_bytes: Sequence[int],
    moves: tuple[Move, ...],
    modules: BlockModules,
    *,
    device: torch.device,
    host: HostMemory | None,
    sizes: Values = (),
) -> Graphs:
    """Emit a program.

    Args:
        program: the calls.
        peaks_bytes: most memory held during each, for people.
        moves: what travels, to ``host``.
        modules: blocks that are compiled already; new ones are added.
        device: of the step.
        host: memory to which storages travel.
        sizes: a number for each symbol of the graph; none: those of its capture.

    Raises:
        HostMemoryError: that memory cannot be had.
    """
    arena, travel = None, None
    if host is not None and moves:
        # All are on the host at the turn.
        slots, total_bytes = assign_slots([m.nbytes for m in moves])
        if host.link is None:  # else the graphs are never run
            arena = Arena(total_bytes, device=device, host_dir=host.folder, limit=host.limit)
        offsets = dict(zip((m.storage for m in moves), slots, strict=True))
        travel = Travel(moves, offsets, total_bytes, arena.id if arena else 0)
    forward: Emitted
    backward: Emitted
    forward, backward = rewrite(program, peaks_bytes, modules, travel)
    known = program.line.joint.sizes
    if sizes != known.hints and sizes:
        names = {**known.named(sizes), **(travel.names() if travel else {})}
        forward, backward = forward.at(names), backward.at(names)
    blocks = (call.block for call in program.calls)
    recomputes = any(block.mode is Mode.AGAIN or block.again for block in blocks)
    return Graphs(forward, backward, recomputes, arena, travel.nbytes if travel else 0)


def follow(
    plan: Plan,
    line: Line,
    blocks: BlockCache,
    modules: BlockModules,
    *,
    device: torch.device,
    host: HostMemory | None,
) -> Graphs:
    """Emit what a kept plan says, word by word.

    Args:
        plan: of this step.
        line: the stages.
        blocks: blocks of ``line``.
        modules: those that are compiled already; new ones are added.
        device: of the step.
        host: memory to which storages may travel.

    Raises:
        PlanError: what is emitted is not what the plan says.
        HostMemoryError: the host memory cannot be had.
    """
    graphs = carry_out(plan, line, blocks, modules, device=device, host=host)
    if (graphs.forward.code, graphs.backward.code) != (plan.forward_code, plan.backward_code):
        if graphs.arena is not None:
            graphs.arena.close()
        raise _unlike(plan)
    return graphs


def carry_out(
    plan: Plan,
    line: Line,
    blocks: BlockCache,
    modules: BlockModules,
    *,
    device: torch.device,
    host: HostMemory | None,
) -> Graphs:
    """Emit what a plan decides, which was made of a step that differs from this one in nothing but
    its constants. Arguments and errors are those of :func:`follow`.
    """
    decision = plan.decision
    peaks = [event.peak_bytes for event in plan.timeline.events if event.lane is Lane.COMPUTE]
    try:
        program = carried_out(line, blocks, plan.schedule, decision)
        calls = shifted(program.calls, line, decision.shifts)
        program, moves = replace(program, calls=calls), decision.moves
        sizes = tuple(number for _, number in plan.sizes)
        return write_graphs(program, peaks, moves, modules, device=device, host=host, sizes=sizes)
    except (LookupError, ScheduleError) as error:
        raise _unlike(plan) from error


def _unlike(plan: Plan) -> PlanError:
    return PlanError(
        f"the plan for {plan.budget_bytes} bytes does not lead to the code that it holds: it was "
        "changed, or written by another fxremat. Leave plan= out to plan again, and save that plan"
    )
