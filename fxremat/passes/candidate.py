"""A schedule with the graphs that carry it out, swept exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fxremat.ir import Backward, Costs, Schedule
from fxremat.passes.linearize import Line
from fxremat.passes.options import Kept, Options
from fxremat.passes.program import BlockCache, Program, build_program
from fxremat.passes.sweep import Surroundings, Sweep, Sweeper


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule with the exact peak of its graphs and its time.

    Attributes:
        schedule: the operations; what its save options keep is in ``kept``.
        kept: what each stage keeps, of those that do not keep everything.
        program: the calls that carry it out.
        sweep: their memory.
        seconds: of each call.
        total_s: of the step.
    """

    schedule: Schedule
    kept: Kept
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
    """Makes candidates of one measured line."""

    line: Line
    blocks: BlockCache
    options: Options
    costs: Costs
    sweeper: Sweeper
    surroundings: Surroundings

    def candidate(self, schedule: Schedule, kept: Kept | None = None) -> Candidate:
        """``schedule``, with ``kept`` in place of what its options keep if given."""
        if kept is None:
            kept = self.options.kept_by(schedule)
        missing = self.options.missing(kept)
        program = build_program(self.line, schedule, self.blocks, missing)
        sweep = self.sweeper.sweep(program, self.surroundings)
        seconds = _seconds(program, self.costs, self.options.recompute_s(kept))
        return Candidate(schedule, kept, program, sweep, seconds, sum(seconds))


def _seconds(program: Program, costs: Costs, recompute_s: Mapping[int, float]) -> tuple[float, ...]:
    seconds = []
    for call in program.calls:
        stage = costs.stages[call.op.stage]
        if isinstance(call.op, Backward):
            seconds.append(stage.backward_s + recompute_s.get(call.op.stage, 0.0))
        else:
            seconds.append(stage.rebuild_s if call.rebuilds else stage.forward_s)
    return tuple(seconds)
