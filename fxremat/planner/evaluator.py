"""Evaluates decisions of one measured line, exactly as their graphs would run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import fx

from fxremat.costs.cost import Measured
from fxremat.costs.options import Options
from fxremat.errors import CostError, ScheduleError
from fxremat.ir import Decision, Tensors
from fxremat.ir.schedule import Codes, coded, decoded
from fxremat.passes.emit.program import Program, build_program, keep_all
from fxremat.passes.stages.block import BlockCache, Mode
from fxremat.passes.stages.linearize import Line
from fxremat.planner.context_bytes import ContextBytes
from fxremat.planner.evaluation import Evaluation, Life
from fxremat.planner.handed import handed_over
from fxremat.planner.moves import moved
from fxremat.planner.places import MODES, Flags, Floats, Ints
from fxremat.planner.pool import Candidate
from fxremat.planner.step import Numbers, Step, step_of

MOST_BYTES = 1 << 62
"""More than any step needs."""

MOST_ROOM = 1 << 27
"""Numbers of a step that no evaluation should need."""


@dataclass(frozen=True, slots=True)
class Alone:
    """What a single call does to memory.

    Attributes:
        peak_bytes: most bytes at any instant, less those at the start; never negative.
        change_bytes: bytes at the end, less those at the start.
        inputs: what it reads.
    """

    peak_bytes: int
    change_bytes: int
    inputs: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Makes candidates of decisions. Not for two threads at once, nor are those of other sizes.

    Attributes:
        line: the stages.
        blocks: of ``line``.
        options: what stages may keep.
        context_bytes: memory beside the graphs.
        numbers: of the size that is meant.
        room: all of that as numbers; those of other sizes work in it, too.
    """

    line: Line
    blocks: BlockCache
    options: Options
    context_bytes: ContextBytes
    numbers: Numbers
    room: Step

    @staticmethod
    def of(
        measured: Measured,
        blocks: BlockCache,
        options: Options,
        context_bytes: ContextBytes,
    ) -> Evaluator:
        """The evaluator of a measured line."""
        room = step_of(measured, options)
        return Evaluator(measured.line, blocks, options, context_bytes, room.numbers, room)

    def within(self, context_bytes: ContextBytes) -> Evaluator:
        """This line's evaluator where something else is held beside it; both share their room."""
        return replace(self, context_bytes=context_bytes)

    def at(self, measured: Measured, context_bytes: ContextBytes) -> Evaluator:
        """The evaluator of this line at another size: decisions stay, numbers do not.

        Args:
            measured: the line as it was measured, or scaled, at that size.
            context_bytes: at that size.
        """
        options = self.options.at(measured)
        numbers = Numbers.of(measured, options, self.room.number)
        return Evaluator(measured.line, self.blocks, options, context_bytes, numbers, self.room)

    @property
    def step(self) -> Step:
        """The line as numbers, of the size that is meant."""
        self.room.load(self.numbers)
        return self.room

    @property
    def count(self) -> int:
        """Evaluations so far."""
        from fxremat.planner.extract import EVALUATIONS  # noqa: PLC0415

        return int(self.step.data[self.step.at.counts + EVALUATIONS])

    def keep_all(self) -> Candidate:
        """Nothing recomputed."""
        return self.candidate(coded(keep_all(len(self.line.stages))))

    def candidate(self, codes: Codes, held: bytes = b"") -> Candidate:
        """A decision evaluated.

        Args:
            codes: the schedule.
            held: a bit for each node that is kept from its first computation on, none if empty.

        Raises:
            CostError: it runs an operation that was never measured.
            ScheduleError: it reads what nothing computes.
        """
        _calls, _call_s, total_s = self._replay(codes, self._flags(held))
        peak_bytes = self._totals()["peak_bytes"]
        return Candidate(codes, held, peak_bytes, total_s)

    def climb(self, start: Candidate, *, limit_bytes: int = MOST_BYTES) -> list[Candidate]:
        """What local search finds from ``start`` on, each faster than the one before.

        It ends with the first whose peak is above ``limit_bytes``.
        """
        from fxremat.planner.climb import MOST_STEPS, climb  # noqa: PLC0415

        found = np.zeros((MOST_STEPS, self.step.at.nodes), dtype=np.uint8)
        found_bytes, found_s = np.zeros(MOST_STEPS, dtype=np.int64), np.zeros(MOST_STEPS)
        held = self._flags(start.held)
        count = self._run(climb, start.codes, held, limit_bytes, found, found_bytes, found_s)
        bits = np.packbits(found[:count], axis=1)
        return [
            Candidate(start.codes, bits[i].tobytes(), int(found_bytes[i]), float(found_s[i]))
            for i in range(count)
        ]

    def evaluation(self, candidate: Candidate) -> Evaluation:
        """All that is found of a candidate."""
        from fxremat.planner.replay import HELD, OP, PEAK  # noqa: PLC0415

        calls, call_s, _total_s = self._replay(candidate.codes, self._flags(candidate.held))
        totals = self._totals()
        count = totals["calls"]
        ops = decoded(candidate.codes).computations
        found = Evaluation(
            ops=tuple(ops[i] for i in calls[OP, :count].tolist()),
            turn=totals["turn"],
            peaks_bytes=tuple(calls[PEAK, :count].tolist()),
            held_bytes=tuple(calls[HELD, :count].tolist()),
            turn_bytes=totals["turn_bytes"],
            end_bytes=totals["end_bytes"],
            seconds=tuple(call_s[:count].tolist()),
            lives=self._lives(calls),
        )
        return moved(found, candidate.moves) if candidate.moves else found

    def alone(
        self, stage: int, mode: Mode, asked: Iterable[fx.Node], *, option: int = 0, kept: bool
    ) -> Alone:
        """A single call, where nothing is held beside.

        Args:
            stage: of the call.
            mode: how it runs.
            asked: what it gives.
            option: the save option of the stage, for a backward.
            kept: its inputs stay; else each goes after its last reader.
        """
        from fxremat.planner.replay import run_alone  # noqa: PLC0415

        step = self.step
        inputs = np.zeros(step.at.nodes, dtype=np.int64)
        numbers = np.array([step.number[node] for node in asked], dtype=np.int64)
        peak, change, count = self._run(
            run_alone, stage, MODES[mode], option, numbers, kept, inputs
        )
        return Alone(peak, change, tuple(step.nodes[i] for i in inputs[:count].tolist()))

    def decision(self, candidate: Candidate) -> Decision:
        """What a candidate decides beside its schedule."""
        missing = self.options.missing(self.options.kept_by(decoded(candidate.codes)))
        nodes, order = self.step.nodes, self.line.order
        held: dict[int, list[fx.Node]] = {}
        for i in np.flatnonzero(self._flags(candidate.held)).tolist():
            held.setdefault(self.line.stage_of[nodes[i]], []).append(nodes[i])

        def numbers(tensors: Mapping[int, Iterable[fx.Node]]) -> Tensors:
            return tuple(
                (i, tuple(sorted(order[n] for n in own))) for i, own in sorted(tensors.items())
            )

        return Decision(numbers(missing), numbers(held), candidate.moves, candidate.shifts)

    def program(self, candidate: Candidate) -> Program:
        """The calls that carry a candidate out."""
        handed = handed_over(self.line, self.context_bytes)
        schedule, decision = decoded(candidate.codes), self.decision(candidate)
        return build_program(self.line, schedule, self.blocks, decision, handed)

    def _flags(self, held: bytes) -> Flags:
        nodes = self.step.at.nodes
        if not held:
            return np.zeros(nodes, dtype=np.uint8)
        return np.unpackbits(np.frombuffer(held, dtype=np.uint8), count=nodes)

    def _replay(self, codes: Codes, held: Flags) -> tuple[Ints, Floats, float]:
        # Loading numba takes longer than all else in the package: not at import.
        from fxremat.planner.replay import evaluate  # noqa: PLC0415

        calls, call_s = np.zeros((5, codes.size), dtype=np.int64), np.zeros(codes.size)
        total_s = self._run(evaluate, codes, held, calls, call_s)
        return calls, call_s, float(total_s)

    def _run(self, kernel: Callable[..., Any], *args: object) -> Any:
        """What ``kernel`` returns, once there is room enough for all blocks at once."""
        from fxremat.planner.replay import TOO_LONG  # noqa: PLC0415

        step = self.step
        self._put_surroundings()
        found = kernel(step.data, step.seconds, step.at, *args)
        while self._totals()["ended"] == TOO_LONG and step.data.size < MOST_ROOM:
            step.grow()
            found = kernel(step.data, step.seconds, step.at, *args)
        self._check()
        return found

    def _put_surroundings(self) -> None:
        """Let the step's numbers be those of this evaluator's context bytes."""
        step, at, now = self.step, self.step.at, self.context_bytes
        if step.around is now:
            return
        nbytes = now.given_bytes, now.turn_bytes, now.tangent_bytes, now.end_bytes
        step.data[at.around : at.around + len(nbytes)] = nbytes
        step.data[at.handed : at.handed + at.nodes] = 0
        handed = [step.number[node] for node in handed_over(self.line, now)]
        step.data[[at.handed + number for number in handed]] = 1
        step.around = now

    def _totals(self) -> dict[str, int]:
        names = ("calls", "turn", "peak_bytes", "turn_bytes", "end_bytes", "ended", "node")
        total = self.step.at.total
        values = self.step.data[total : total + len(names)].tolist()
        return dict(zip(names, values, strict=True))

    def _check(self) -> None:
        """Raise what the last evaluation found wrong."""
        from fxremat.planner.replay import NEVER_COMPUTED, TOO_LONG, UNTIMED  # noqa: PLC0415

        totals = self._totals()
        if not totals["ended"]:
            return
        if totals["ended"] == TOO_LONG:
            raise ScheduleError("a schedule runs more than can be evaluated at once")
        node = self.step.nodes[totals["node"]]
        if totals["ended"] == NEVER_COMPUTED:
            raise ScheduleError(f"{node.name} is read but no operation computes it")
        what = "timed" if totals["ended"] == UNTIMED else "measured in this way"
        raise CostError(
            f"{node.name} ({node.target}) is run by a schedule but was never {what}; "
            "please report this model"
        )

    def _lives(self, calls: Ints) -> tuple[Life, ...]:
        from fxremat.planner.replay import find_lives  # noqa: PLC0415

        step, at = self.step, self.step.at
        last = np.zeros(at.storage_count, dtype=np.int64)
        after = np.zeros(at.storage_count, dtype=np.int64)
        find_lives(step.data, at.packed, calls, last, after)
        used, needed = last.tolist(), after.tolist()
        nodes: dict[int, list[int]] = {}
        order, nbytes = self.line.order, self.line.joint.storages.nbytes
        for node in np.flatnonzero(step.data[at.saved : at.saved + at.forward_count]).tolist():
            for storage in step.storages[node]:
                if needed[storage] >= 0:
                    nodes.setdefault(storage, []).append(order[step.nodes[node]])
        return tuple(
            Life(storage, nbytes[storage], tuple(own), used[storage], needed[storage])
            for storage, own in nodes.items()
        )
