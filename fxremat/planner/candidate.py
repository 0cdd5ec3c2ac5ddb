"""A schedule with the graphs that carry it out, swept exactly."""

from __future__ import annotations

from dataclasses import dataclass, field

from fxremat.costs.options import Kept, Options
from fxremat.ir import Costs, Schedule
from fxremat.passes.emit.program import Call, Program, build_program
from fxremat.passes.joint.invert import is_inverse
from fxremat.passes.stages.block import Mode
from fxremat.passes.stages.blocks import BlockCache
from fxremat.passes.stages.linearize import Line
from fxremat.planner.decision import Held
from fxremat.planner.sweep import Surroundings, Sweep, Sweeper


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule with the exact peak of its graphs and its time.

    Attributes:
        schedule: the operations; what its save options keep is in ``kept``.
        kept: what each stage keeps, of those that do not keep everything.
        held: tensors that a stage keeps from its first forward on, whatever the schedule.
        program: the calls that carry it out.
        sweep: their memory.
        seconds: of each call.
        total_s: of the step.
    """

    schedule: Schedule
    kept: Kept
    held: Held
    program: Program
    sweep: Sweep
    seconds: tuple[float, ...]
    total_s: float

    @property
    def peak_bytes(self) -> int:
        """The exact peak."""
        return self.sweep.peak_bytes


@dataclass(frozen=True, slots=True)
class Sweeps:
    """Makes candidates of one measured line; remembers the seconds of each block."""

    line: Line
    blocks: BlockCache
    options: Options
    costs: Costs
    sweeper: Sweeper
    surroundings: Surroundings
    known_s: dict[tuple[int, bool], float] = field(default_factory=dict)

    def candidate(
        self, schedule: Schedule, kept: Kept | None = None, held: Held | None = None
    ) -> Candidate:
        """``schedule``, with ``kept`` in place of what its options keep if given."""
        if kept is None:
            kept = self.options.kept_by(schedule)
        held = held or {}
        missing = self.options.missing(kept)
        program = build_program(self.line, schedule, self.blocks, missing, held)
        sweep = self.sweeper.sweep(program, self.surroundings)
        seconds = tuple(map(self._seconds, program.calls))
        return Candidate(schedule, kept, held, program, sweep, seconds, sum(seconds))

    def _seconds(self, call: Call) -> float:
        key = (id(call.block), call.rebuilds)  # ``blocks`` keeps it alive
        seconds = self.known_s.get(key)
        if seconds is None:
            seconds = self.known_s[key] = self._seconds_of(call)
        return seconds

    def _seconds_of(self, call: Call) -> float:
        index, block = call.op.stage, call.block
        stage = self.costs.stages[index]
        charges = self.options.parts[index].charges
        if block.mode is Mode.FIRST:
            # Measured with all that a backward may read; a norm's input is rebuilt later.
            left_out = (n for n in self.line.stages[index].forward if is_inverse(n))
            return stage.forward_s - sum(
                charges.once_s(n, rebuilds=False) for n in left_out if n not in block.nodes
            )
        if block.mode is Mode.AGAIN:
            return charges.again_s(block, rebuilds=call.rebuilds)
        return stage.backward_s + sum(charges.once_s(n, rebuilds=True) for n in block.again)
