"""From a schedule to the calls that carry it out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import fx

from fxremat.errors import ScheduleError
from fxremat.ir import Backward, Compute, Forward, Keep, Schedule
from fxremat.passes.block import Block, Mode, candidates, extract
from fxremat.passes.firsts import check_draws
from fxremat.passes.joint import JointGraph
from fxremat.passes.linearize import Line, Role
from fxremat.passes.sums import Sums, home_sums, sums_at


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a block.

    Attributes:
        op: the operation of the schedule that it carries out.
        block: what runs.
        rebuilds: it recomputes a stage whose backward is the next call.
        kept: storages among those of its inputs that are read again later.
    """

    op: Compute
    block: Block
    rebuilds: bool
    kept: frozenset[int]


@dataclass(frozen=True, slots=True)
class Program:
    """The calls of one step.

    Attributes:
        line: the stages.
        calls: in order.
        turn: index of the first call of the backward graph.
        saved: tensors that the forward graph hands to the backward graph, primals among
            them, in order of their first computation.
    """

    line: Line
    calls: tuple[Call, ...]
    turn: int
    saved: tuple[fx.Node, ...]


class BlockCache:
    """Blocks of one line, each extracted once."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._blocks: dict[tuple[object, ...], Block] = {}
        self._candidates: dict[tuple[object, ...], frozenset[fx.Node]] = {}
        self._home: dict[int, Sums] = {}

    def __call__(
        self,
        stage: int,
        mode: Mode,
        outputs: frozenset[fx.Node],
        missing: frozenset[fx.Node] = frozenset(),
        held: frozenset[fx.Node] = frozenset(),
        sums: Sums | None = None,
    ) -> Block:
        """The block of ``stage`` that gives ``outputs``; see :func:`extract`."""
        if mode is not Mode.AGAIN and not missing:
            held = frozenset()  # makes no difference
        sums = self._unusual(stage, sums)
        key = (stage, mode, outputs, missing, held, sums)
        if key not in self._blocks:
            self._blocks[key] = extract(
                self._line,
                stage=stage,
                mode=mode,
                outputs=outputs,
                missing=missing,
                held=held,
                sums=sums,
            )
        return self._blocks[key]

    def candidates(
        self,
        stage: int,
        mode: Mode,
        held: frozenset[fx.Node] = frozenset(),
        sums: Sums | None = None,
    ) -> frozenset[fx.Node]:
        """What a block of ``stage`` can give."""
        sums = self._unusual(stage, sums)
        key = (stage, mode, held, sums)
        if key not in self._candidates:
            self._candidates[key] = frozenset(candidates(self._line, stage, mode, held, sums))
        return self._candidates[key]

    def _unusual(self, stage: int, sums: Sums | None) -> Sums | None:
        """``sums``, or ``None`` where they are those of the line's own order."""
        if sums is None:
            return None
        if stage not in self._home:
            self._home[stage] = home_sums(self._line, stage)
        return None if sums == self._home[stage] else sums


def build_program(
    line: Line,
    schedule: Schedule,
    blocks: BlockCache,
    missing: Mapping[int, frozenset[fx.Node]] | None = None,
    held: Mapping[int, frozenset[fx.Node]] | None = None,
) -> Program:
    """Find the blocks that carry out ``schedule``.

    Args:
        line: the stages.
        schedule: what to do; its save options are in ``missing``.
        blocks: blocks of ``line``.
        missing: for each stage whose saved set is not kept whole: tensors that its
            backward recomputes where it needs them.
        held: for each stage: tensors kept from its first forward until they are last read.

    Every tensor is taken from the last call before that can give it, and every call
    gives only what is read later, so each tensor is freed as early as the order of
    operations allows.

    Requires: ``schedule`` runs the forward of every stage before the first backward.
    Ensures: the calls compute exactly what the joint graph does.

    Raises:
        ScheduleError: the schedule never computes something that is read.
    """
    joint = line.joint
    ops = list(schedule.computations)
    if len(ops) < len(schedule):
        raise ScheduleError(f"graphs with transfers can't be emitted: {schedule}")
    check_draws(line, ops)
    summed = sums_at(line, ops)
    needed = _Needed(line)
    calls: list[Call] = []
    turn = 0
    for op, mode in reversed(list(zip(ops, _modes(ops), strict=True))):
        there = (held or {}).get(op.stage, frozenset())
        sums = summed.get(op.stage) if mode is Mode.BACKWARD else None
        outputs = blocks.candidates(op.stage, mode, there, sums) & needed.tensors
        if not outputs and mode is Mode.AGAIN:
            continue
        lacks = (missing or {}).get(op.stage) if mode is Mode.BACKWARD else None
        block = blocks(op.stage, mode, outputs, lacks or frozenset(), there, sums)
        needed.remove(outputs)
        kept = needed.kept(block.reads)
        needed.add(block.inputs)
        rebuilds = mode is Mode.AGAIN and bool(calls) and calls[-1].op == Backward(op.stage)
        if block.nodes:
            calls.append(Call(op, block, rebuilds, kept))
        if op == Backward(len(line.stages) - 1):
            turn = len(calls)
    calls.reverse()
    unknown = needed.tensors - joint.given - set(joint.tangents)
    if unknown:
        raise ScheduleError(
            f"{min(unknown, key=str).name} is read but no operation computes it: {schedule}"
        )
    turn = len(calls) - turn
    saved = _read_after(joint, calls[turn:])
    return Program(
        line=line,
        calls=tuple(calls),
        turn=turn,
        saved=tuple(sorted(saved, key=lambda n: _saved_rank(line, n))),
    )


def _read_after(joint: JointGraph, calls: Iterable[Call]) -> set[fx.Node]:
    """What the backward graph reads but does not compute: no output that is only returned."""
    saved: set[fx.Node] = set()
    known = {*joint.tangents, *joint.constants}
    for call in calls:
        saved.update(n for n in call.block.inputs if n not in known)
        known.update(call.block.outputs)
    returned = (n for n in joint.backward_outputs if isinstance(n, fx.Node))
    saved.update(n for n in returned if n not in known)
    return saved


def _saved_rank(line: Line, node: fx.Node) -> tuple[int, int, int]:
    """Parameters and pinned tensors first, then what each stage leaves."""
    role, order = line.rank(node)
    return (line.stage_of[node] if role < Role.PINNED else -role, role, order)


class _Needed:
    """Tensors read from some point on, and how many of them lie in each storage."""

    def __init__(self, line: Line) -> None:
        joint = line.joint
        self._of_node = joint.storages.of_node
        self._count = [0] * len(joint.storages.nbytes)
        for storage in joint.storages.of((*joint.given, *joint.tangents)):
            self._count[storage] += 1  # never freed
        self.tensors: set[fx.Node] = set()
        results = (*joint.forward_outputs, *joint.backward_outputs)
        self.add(n for n in results if isinstance(n, fx.Node))

    def add(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            if node not in self.tensors:
                self.tensors.add(node)
                for storage in self._of_node[node]:
                    self._count[storage] += 1

    def remove(self, nodes: Iterable[fx.Node]) -> None:
        self.tensors.difference_update(nodes)
        for node in nodes:
            for storage in self._of_node[node]:
                self._count[storage] -= 1

    def kept(self, storages: Iterable[int]) -> frozenset[int]:
        """Those of ``storages`` that hold something needed, or are never freed."""
        count = self._count
        return frozenset([s for s in storages if count[s]])


def _modes(ops: list[Compute]) -> list[Mode]:
    seen: set[int] = set()
    modes = []
    for op in ops:
        match op:
            case Backward():
                modes.append(Mode.BACKWARD)
            case Forward(stage=stage):
                modes.append(Mode.AGAIN if stage in seen else Mode.FIRST)
                seen.add(stage)
    return modes


def keep_all(stage_count: int) -> Schedule:
    """Nothing recomputed: every stage keeps its saved set."""
    forward = [Forward(i, Keep.ALL) for i in range(stage_count)]
    backward = [Backward(i) for i in reversed(range(stage_count))]
    return Schedule((*forward, *backward))
