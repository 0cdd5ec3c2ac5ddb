"""Evaluates decisions of one measured line, exactly as their graphs would run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from torch import fx

from fxremat.costs.cost import Measured
from fxremat.costs.options import Options
from fxremat.ir import Backward, Decision, Forward, Schedule, Tensors
from fxremat.ir.schedule import Codes, coded, decoded
from fxremat.passes.emit.program import Call, Program, keep_all, link
from fxremat.passes.stages.block import BlockCache, Mode
from fxremat.passes.stages.linearize import Line, Role
from fxremat.passes.stages.order import check_draws
from fxremat.planner.arrays import LineArrays, SizedNumbers
from fxremat.planner.candidates import AcrossTurn, Candidate, Evaluation
from fxremat.planner.context_bytes import ContextBytes
from fxremat.planner.footprints import Footprint
from fxremat.planner.handed import handed_over
from fxremat.planner.layout import arrays_of, numbering
from fxremat.planner.moves import moved
from fxremat.planner.places import COLUMNS, MODES, Ints

MOST_BYTES = 1 << 62
"""More than any step needs."""


@dataclass(frozen=True, slots=True)
class Alone(Footprint):
    """What a single call does to memory.

    Attributes:
        inputs: what it reads.
    """

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
    numbers: SizedNumbers
    room: LineArrays

    @staticmethod
    def of(
        measured: Measured,
        blocks: BlockCache,
        options: Options,
        context_bytes: ContextBytes,
    ) -> Evaluator:
        """The evaluator of a measured line."""
        number = numbering(measured.line)
        numbers = SizedNumbers.of(measured, options, number)
        room = arrays_of(measured.line, number, options.rebuilt(), numbers)
        return Evaluator(measured.line, blocks, options, context_bytes, numbers, room)

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
        numbers = SizedNumbers.of(measured, options, self.room.number)
        return Evaluator(measured.line, self.blocks, options, context_bytes, numbers, self.room)

    @property
    def arrays(self) -> LineArrays:
        """The line as numbers, of the size and the context that are meant."""
        self.room.load(self.numbers)
        now = self.context_bytes
        if self.room.around is not now:
            nbytes = (
                now.given_bytes,
                now.loss_point_bytes,
                now.backward_bytes,
                now.end_bytes,
            )
            joint = self.line.joint
            goes = now.releases(joint)
            released = {storage: storage in goes for storage in joint.released}
            self.room.surround(now, nbytes, self._handed, released)
        return self.room

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
        arrays = self.arrays
        _calls, _call_s, total_s = arrays.evaluate(codes, arrays.flags(held))
        return Candidate(codes, held, arrays.totals()["peak_bytes"], total_s)

    def climb(self, start: Candidate, *, limit_bytes: int = MOST_BYTES) -> list[Candidate]:
        """What local search finds from ``start`` on, each faster than the one before.

        It ends with the first whose peak is above ``limit_bytes``.
        """
        from fxremat.planner.climb import MOST_STEPS, climb  # noqa: PLC0415

        arrays = self.arrays
        found = np.zeros((MOST_STEPS, arrays.at.nodes), dtype=np.uint8)
        found_bytes, found_s = np.zeros(MOST_STEPS, dtype=np.int64), np.zeros(MOST_STEPS)
        held = arrays.flags(start.held)
        count = arrays.run(climb, start.codes, held, limit_bytes, found, found_bytes, found_s)
        bits = np.packbits(found[:count], axis=1)
        return [
            Candidate(start.codes, bits[i].tobytes(), int(found_bytes[i]), float(found_s[i]))
            for i in range(count)
        ]

    def evaluation(self, candidate: Candidate) -> Evaluation:
        """All that is found of a candidate."""
        from fxremat.planner.replay import HELD, OP, PEAK  # noqa: PLC0415

        arrays = self.arrays
        calls, call_s, _total_s = arrays.evaluate(candidate.codes, arrays.flags(candidate.held))
        totals = arrays.totals()
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

        arrays = self.arrays
        inputs = np.zeros(arrays.at.nodes, dtype=np.int64)
        numbers = np.array([arrays.number[node] for node in asked], dtype=np.int64)
        peak, change, count = arrays.run(
            run_alone, stage, MODES[mode], option, numbers, kept, inputs
        )
        return Alone(peak, change, tuple(arrays.nodes[i] for i in inputs[:count].tolist()))

    def decision(self, candidate: Candidate) -> Decision:
        """What a candidate decides beside its schedule."""
        missing = self.options.missing(self.options.kept_by(decoded(candidate.codes)))
        nodes, order = self.arrays.nodes, self.line.order
        held: dict[int, list[fx.Node]] = {}
        for i in np.flatnonzero(self.arrays.flags(candidate.held)).tolist():
            held.setdefault(self.line.stage_of[nodes[i]], []).append(nodes[i])

        def numbers(tensors: Mapping[int, Iterable[fx.Node]]) -> Tensors:
            return tuple(
                (i, tuple(sorted(order[n] for n in own))) for i, own in sorted(tensors.items())
            )

        return Decision(numbers(missing), numbers(held), candidate.moves, candidate.shifts)

    def program(self, candidate: Candidate) -> Program:
        """The calls that carry a candidate out, but for its shifts: what was evaluated."""
        arrays = self.arrays
        calls, _, _ = arrays.evaluate(candidate.codes, arrays.flags(candidate.held))
        released = self.context_bytes.releases(self.line.joint)
        return program_of(
            arrays, self.line, self.blocks, candidate.codes, calls, released, self._handed
        )

    @property
    def _handed(self) -> frozenset[fx.Node]:
        return handed_over(self.line, self.context_bytes)

    def _lives(self, calls: Ints) -> tuple[AcrossTurn, ...]:
        from fxremat.planner.replay import find_lives  # noqa: PLC0415

        arrays, at = self.arrays, self.arrays.at
        last = np.zeros(at.storage_count, dtype=np.int64)
        after = np.zeros(at.storage_count, dtype=np.int64)
        find_lives(arrays.data, at.packed, calls, last, after)
        used, needed = last.tolist(), after.tolist()
        nodes: dict[int, list[int]] = {}
        order, nbytes = self.line.order, self.line.joint.storages.nbytes
        for node in np.flatnonzero(arrays.data[at.saved : at.saved + at.forward_count]).tolist():
            for storage in arrays.storages[node]:
                if needed[storage] >= 0:
                    nodes.setdefault(storage, []).append(order[arrays.nodes[node]])
        return tuple(
            AcrossTurn(storage, nbytes[storage], tuple(own), used[storage], needed[storage])
            for storage, own in nodes.items()
        )


def program_of(
    arrays: LineArrays,
    line: Line,
    blocks: BlockCache,
    codes: Codes,
    calls: Ints,
    released: frozenset[int],
    handed: frozenset[fx.Node] = frozenset(),
) -> Program:
    """The calls of the last evaluation of ``arrays``.

    Args:
        arrays: ``line`` as numbers.
        line: the stages.
        blocks: of ``line``.
        codes: the schedule.
        calls: what the evaluation found of each.
        released: storages of tangents that their last reader releases.
        handed: gradients that are given back as soon as they are made.

    Ensures: the calls compute exactly what the joint graph does.

    Raises:
        ScheduleError: the schedule draws random numbers in another order.
    """
    from fxremat.planner.extract import ASKED, INPUTS, NODES  # noqa: PLC0415
    from fxremat.planner.replay import BLOCK, OP, REBUILT  # noqa: PLC0415

    ops = decoded(codes).computations
    check_draws(line, ops)
    modes, seen = [], set()
    for op in ops:
        first = Mode.AGAIN if op.stage in seen else Mode.FIRST
        modes.append(Mode.BACKWARD if isinstance(op, Backward) else first)
        seen.add(op.stage)
    data, at, totals = arrays.data, arrays.at, arrays.totals()
    made = []
    for index, block, rebuilds in calls[[OP, BLOCK, REBUILT], : totals["calls"]].T.tolist():
        lists = at.block + COLUMNS * block
        asked, runs, end = data[[lists + ASKED, lists + NODES, lists + INPUTS]].tolist()
        op, mode = ops[index], modes[index]
        own = blocks.of(op.stage, mode, data[runs:end], data[asked:runs], arrays.nodes)
        made.append(Call(op, own, bool(rebuilds)))
    joint = line.joint
    results = (*joint.forward_outputs, *(n for n in joint.backward_outputs if n not in handed))
    after = (n for n in results if isinstance(n, fx.Node))
    linked, _ = link(line, made, handed, released, after)
    saved = (arrays.nodes[i] for i in np.flatnonzero(data[at.saved : at.saved + at.nodes]).tolist())
    crossing = set(saved).difference(joint.tangents, joint.constants)
    return Program(
        line, tuple(linked), totals["turn"], tuple(sorted(crossing, key=lambda n: _rank(line, n)))
    )


def _rank(line: Line, node: fx.Node) -> tuple[int, int, int]:
    """Sorts what is there throughout before all else, which goes stage by stage."""
    role, order = line.rank(node)
    return (line.stage_of[node] if role < Role.PINNED else -role, role, order)


def carried_out(line: Line, blocks: BlockCache, schedule: Schedule, decision: Decision) -> Program:
    """The calls of what was decided before, of which nothing is measured.

    Args:
        line: the stages.
        blocks: of ``line``.
        schedule: what to do.
        decision: what save options keep, and what is kept from a first forward until it is last
            read.

    Raises:
        LookupError: the decision is one of another line.
        ScheduleError: the schedule reads what nothing computes, or draws random numbers in another
            order.
    """
    number, nodes = numbering(line), line.nodes
    missing = dict(decision.missing)
    most = max((op.option for op in schedule if isinstance(op, Forward)), default=0)
    rebuilt = [
        [frozenset(nodes[i] for i in missing.get(stage, ()))] * (most + 1)
        for stage in range(len(line.stages))
    ]
    arrays = arrays_of(line, number, rebuilt, SizedNumbers.nothing(line, number))
    held = arrays.flags(b"")
    for _, own in decision.held:
        held[[number[nodes[i]] for i in own]] = 1
    codes = coded(schedule)
    calls, _, _ = arrays.evaluate(codes, held)
    return program_of(arrays, line, blocks, codes, calls, line.joint.released)
