"""Exact evaluation of decisions of a measured line: peak and seconds of the graphs they lead to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from torch import fx

from fxremat.costs.measured.cost import Measured
from fxremat.effort import Effort
from fxremat.errors import FAULT, ScheduleError
from fxremat.ir import Backward, Decision, Forward, Schedule, Tensors
from fxremat.ir.schedule import Codes, coded, decoded
from fxremat.passes.emit.program import Call, Program, keep_all, link
from fxremat.passes.stages.block import BlockCache, Mode
from fxremat.passes.stages.linearize import Line, Role
from fxremat.passes.stages.order import check_draws
from fxremat.planner.context.context_bytes import ContextBytes
from fxremat.planner.context.handed import handed_over
from fxremat.planner.decision.candidates import AcrossTurn, Candidate, Evaluation
from fxremat.planner.decision.moves import moved
from fxremat.planner.decision.save_options import Options
from fxremat.planner.replay.arrays import LineArrays, SizedNumbers
from fxremat.planner.replay.layout import arrays_of, numbering
from fxremat.planner.replay.places import COLUMNS, MODES, Ints

MOST_BYTES = 1 << 62
"""A number of bytes that no step exceeds."""


@dataclass(frozen=True, slots=True)
class CallFootprint:
    """The memory of a single call of a stage's forward or backward.

    Attributes:
        peak_bytes: maximum of the bytes held, less those at the start; never negative.
        change_bytes: bytes held at the end, less those at the start.
        inputs: the values that it reads.
    """

    peak_bytes: int
    change_bytes: int
    inputs: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Computes the exact memory and the predicted seconds of schedules of a step.

    Evaluators of a step share their working memory, also across sizes: they are not thread-safe.

    Attributes:
        line: the stages.
        blocks: blocks of ``line``.
        options: save options of the stages.
        context_bytes: memory of the step that no block allocates.
        numbers: bytes and seconds at the size in question.
        room: the arrays that all evaluators of the step work in.
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
        """Return an evaluator of schedules of the measured stages."""
        number = numbering(measured.line)
        numbers = SizedNumbers.of(measured, options, number)
        room = arrays_of(measured.line, number, options.rebuilt(), numbers)
        return Evaluator(measured.line, blocks, options, context_bytes, numbers, room)

    def within(self, context_bytes: ContextBytes) -> Evaluator:
        """Return a copy for other context bytes, which shares the arrays of this evaluator."""
        return replace(self, context_bytes=context_bytes)

    def at(self, measured: Measured, context_bytes: ContextBytes) -> Evaluator:
        """Return an evaluator of the same step at another size, for the same schedules.

        ``measured`` has the stages as measured, or scaled, at that size.
        """
        options = self.options.at(measured)
        numbers = SizedNumbers.of(measured, options, self.room.number)
        return Evaluator(measured.line, self.blocks, options, context_bytes, numbers, self.room)

    @property
    def arrays(self) -> LineArrays:
        """The shared arrays, with the bytes and seconds of this evaluator loaded into them."""
        self.room.load(self.numbers)
        now = self.context_bytes
        if self.room.context_key is not now:
            nbytes = (
                now.given_bytes,
                now.loss_point_more_bytes,
                now.backward_bytes,
                now.end_bytes,
            )
            joint = self.line.joint
            releases = now.releases(joint)
            released = {storage: storage in releases for storage in joint.released}
            self.room.set_context(now, nbytes, self._handed, released)
        return self.room

    def keep_all(self) -> Candidate:
        """Return the evaluated schedule that keeps everything and recomputes nothing."""
        return self.candidate(coded(keep_all(len(self.line.stages))))

    def candidate(self, codes: Codes, held: bytes = b"") -> Candidate:
        """Evaluate a schedule, and return it with its peak memory and its seconds.

        Args:
            codes: the schedule.
            held: one bit for each node, set if its value is held from its first computation on;
                empty: none is.

        Raises:
            CostError: the schedule runs an operation that was never measured.
            ScheduleError: the schedule reads a value that no operation computes.
        """
        arrays = self.arrays
        _calls, _call_s, total_s = arrays.evaluate(codes, arrays.flags(held))
        return Candidate(codes, held, arrays.totals()["peak_bytes"], total_s)

    def climb(
        self, start: Candidate, effort: Effort, *, limit_bytes: int = MOST_BYTES
    ) -> list[Candidate]:
        """Return the results of a local search from ``start``, each faster than the one before.

        The search holds ever more of what ``start`` recomputes. It ends with the first candidate
        whose peak exceeds ``limit_bytes``.
        """
        from fxremat.planner.replay.climb import climb  # noqa: PLC0415

        arrays, steps = self.arrays, effort.climb_steps
        found = np.zeros((steps, arrays.at.nodes), dtype=np.uint8)
        found_bytes, found_s = np.zeros(steps, dtype=np.int64), np.zeros(steps)
        held = arrays.flags(start.held)
        results = found, found_bytes, found_s
        count = arrays.run(climb, start.codes, held, limit_bytes, effort, *results)
        bits = np.packbits(found[:count], axis=1)
        return [
            Candidate(start.codes, bits[i].tobytes(), int(found_bytes[i]), float(found_s[i]))
            for i in range(count)
        ]

    def evaluation(self, candidate: Candidate) -> Evaluation:
        """Return memory and seconds of each call of a candidate."""
        from fxremat.planner.replay.replay import HELD, OP, PEAK  # noqa: PLC0415

        arrays = self.arrays
        calls, call_s, _total_s = arrays.evaluate(candidate.codes, arrays.flags(candidate.held))
        totals = arrays.totals()
        count = totals["calls"]
        ops = decoded(candidate.codes).computations
        evaluation = Evaluation(
            ops=tuple(ops[i] for i in calls[OP, :count].tolist()),
            loss_point=totals["loss_point"],
            peaks_bytes=tuple(calls[PEAK, :count].tolist()),
            held_bytes=tuple(calls[HELD, :count].tolist()),
            loss_point_bytes=totals["loss_point_bytes"],
            end_bytes=totals["end_bytes"],
            seconds=tuple(call_s[:count].tolist()),
            lives=self._lives(calls),
        )
        return moved(evaluation, candidate.moves) if candidate.moves else evaluation

    def call_footprint(
        self, stage: int, mode: Mode, asked: Iterable[fx.Node], *, option: int = 0, kept: bool
    ) -> CallFootprint:
        """Return the memory that a single call of a stage takes, with nothing else held.

        Args:
            stage: the stage of the call.
            mode: how the block runs.
            asked: the values that the call returns.
            option: the save option of the stage, for a backward.
            kept: whether its inputs are held; otherwise each is freed after its last reader.
        """
        from fxremat.planner.replay.replay import run_single_call  # noqa: PLC0415

        arrays = self.arrays
        inputs = np.zeros(arrays.at.nodes, dtype=np.int64)
        numbers = np.array([arrays.number[node] for node in asked], dtype=np.int64)
        peak, change, count = arrays.run(
            run_single_call, stage, MODES[mode], option, numbers, kept, inputs
        )
        return CallFootprint(peak, change, tuple(arrays.nodes[i] for i in inputs[:count].tolist()))

    def decision(self, candidate: Candidate) -> Decision:
        """Return a candidate's decision: tensors to recompute, tensors to hold, and offloads.

        Its schedule is not part of that.
        """
        missing = self.options.missing(self.options.kept_by(decoded(candidate.codes)))
        nodes, order = self.arrays.nodes, self.line.order
        held: dict[int, list[fx.Node]] = {}
        for i in np.flatnonzero(self.arrays.flags(candidate.held)).tolist():
            held.setdefault(self.line.stage_of[nodes[i]], []).append(nodes[i])

        def numbers(tensors: Mapping[int, Iterable[fx.Node]]) -> Tensors:
            return tuple(
                (i, tuple(sorted(order[n] for n in kept))) for i, kept in sorted(tensors.items())
            )

        return Decision(numbers(missing), numbers(held), candidate.moves)

    def program(self, candidate: Candidate) -> Program:
        """Return the calls that carry out ``candidate``, each with the operations that it runs."""
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
        from fxremat.planner.replay.replay import find_lives  # noqa: PLC0415

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
            AcrossTurn(storage, nbytes[storage], tuple(read), used[storage], needed[storage])
            for storage, read in nodes.items()
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
    """Return the sequence of calls, each a block of operations, that ``arrays`` evaluated last.

    Args:
        arrays: the arrays of the step after the evaluation.
        line, blocks: the stages, and their blocks of operations.
        codes: the schedule that was evaluated.
        calls: the calls, as the evaluation returned them.
        released: storages of tangents that their last reader releases.
        handed: gradients whose memory is released as soon as they are computed.

    Ensures: the calls compute exactly what the joint graph computes.

    Raises:
        ScheduleError: the schedule draws random numbers in another order, or saves what a
            constraint has computed again.
    """
    from fxremat.planner.replay.extract import ASKED, INPUTS, NODES  # noqa: PLC0415
    from fxremat.planner.replay.replay import BLOCK, OP, REBUILT  # noqa: PLC0415

    ops = decoded(codes).computations
    check_draws(line, ops)
    modes, have_run = [], set()
    for op in ops:
        first = Mode.AGAIN if op.stage in have_run else Mode.FIRST
        modes.append(Mode.BACKWARD if isinstance(op, Backward) else first)
        have_run.add(op.stage)
    data, at, totals = arrays.data, arrays.at, arrays.totals()
    made = []
    for index, block, rebuilds in calls[[OP, BLOCK, REBUILT], : totals["calls"]].T.tolist():
        lists = at.block + COLUMNS * block
        asked, runs, end = data[[lists + ASKED, lists + NODES, lists + INPUTS]].tolist()
        op, mode = ops[index], modes[index]
        extracted = blocks.of(op.stage, mode, data[runs:end], data[asked:runs], arrays.nodes)
        made.append(Call(op, extracted, bool(rebuilds)))
    joint = line.joint
    results = (*joint.forward_outputs, *(n for n in joint.backward_outputs if n not in handed))
    after = (n for n in results if isinstance(n, fx.Node))
    linked = link(line, made, handed, released, after)
    saved = (arrays.nodes[i] for i in np.flatnonzero(data[at.saved : at.saved + at.nodes]).tolist())
    crossing = set(saved).difference(joint.tangents, joint.constants)
    for storage in sorted(joint.storages.of(crossing) & line.unsaved):
        owner = joint.storages.owner[storage]
        raise ScheduleError(
            f"{owner.name} ({owner.target}) is to be computed again, but a schedule saves it; "
            "please report this model",
            code=FAULT,
        )
    return Program(
        line, linked, totals["loss_point"], tuple(sorted(crossing, key=lambda n: _rank(line, n)))
    )


def _rank(line: Line, node: fx.Node) -> tuple[int, int, int]:
    """Return a key that sorts saved values: those held throughout first, then stage by stage."""
    role, order = line.rank(node)
    return (line.stage_of[node] if role < Role.PINNED else -role, role, order)


def carried_out(line: Line, blocks: BlockCache, schedule: Schedule, decision: Decision) -> Program:
    """Return the sequence of calls of a saved schedule and decision, without any measurement.

    Each call is a block of operations.

    Raises:
        LookupError: the decision belongs to another line.
        ScheduleError: the schedule reads a value that no operation computes, or draws random
            numbers in another order.
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
    for _, tensors in decision.held:
        held[[number[nodes[i]] for i in tensors]] = 1
    codes = coded(schedule)
    calls, _, _ = arrays.evaluate(codes, held)
    return program_of(arrays, line, blocks, codes, calls, line.joint.released)
