"""From a schedule to the calls that carry it out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from fxremat.errors import ScheduleError
from fxremat.ir import Backward, Compute, Decision, Forward, Keep, Schedule
from fxremat.passes.stages.block import NOTHING, Block, BlockCache, Mode, candidates
from fxremat.passes.stages.linearize import Line, Role
from fxremat.passes.stages.order import check_draws, sums_at

NOTHING_MORE = Decision()


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a block.

    Attributes:
        op: the operation of the schedule that it carries out.
        block: what runs.
        rebuilds: it recomputes a stage whose backward is the next call.
        kept: storages among those of its inputs that are read again later.
        handed: storages of gradients that are handed over right after it, and given back.
    """

    op: Compute
    block: Block
    rebuilds: bool
    kept: frozenset[int]
    handed: frozenset[int] = frozenset()


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


def build_program(
    line: Line,
    schedule: Schedule,
    blocks: BlockCache,
    decision: Decision = NOTHING_MORE,
    handed: frozenset[fx.Node] = NOTHING,
) -> Program:
    """Find the blocks that carry out ``schedule``.

    Args:
        line: the stages.
        schedule: what to do.
        blocks: blocks of ``line``.
        decision: what save options keep, and what is kept from a first forward until it is last
            read.
        handed: gradients whose memory nobody holds once they are made and handed over.

    Every tensor is taken from the last call before that can give it, and every call
    gives only what is read later, so each tensor is freed as early as the order of
    operations allows.

    Requires: ``schedule`` runs the forward of every stage before the first backward.
    Ensures: the calls compute exactly what the joint graph does.

    Raises:
        ScheduleError: the schedule never computes something that is read.
    """
    joint, nodes = line.joint, line.nodes
    missing = {stage: frozenset(nodes[i] for i in own) for stage, own in decision.missing}
    held = {stage: frozenset(nodes[i] for i in own) for stage, own in decision.held}
    ops = list(schedule.computations)
    if len(ops) < len(schedule):
        raise ScheduleError(f"graphs with transfers can't be emitted: {schedule}")
    check_draws(line, ops)
    summed = sums_at(line, ops)
    needed = _Needed(line)
    needed.add(n for n in joint.gradients if n not in handed)
    needed.add_handed(handed)
    returned = set(joint.results)  # be they read again or not
    needed.add(returned)
    later = set(joint.gradients)
    calls: list[Call] = []
    turn, saved = 0, later.copy()
    for op, mode in reversed(list(zip(ops, _modes(ops), strict=True))):
        stage, backward = op.stage, mode is Mode.BACKWARD
        own_held = held.get(stage, NOTHING)
        sums = summed.get(stage) if backward else None
        given = needed.among(candidates(line, stage, mode, own_held, sums))
        if not given and mode is Mode.AGAIN:
            continue
        own_missing = missing.get(stage, NOTHING) if backward else NOTHING
        block = blocks(stage, mode, given, own_missing, own_held, sums)
        away = needed.remove(given)
        later -= given
        kept = needed.storages(block.reads)
        needed.add(block.inputs)
        later.update(block.inputs)
        rebuilds = mode is Mode.AGAIN and bool(calls) and calls[-1].op == Backward(stage)
        if block.nodes:
            calls.append(Call(op, block, rebuilds, kept, away))
        if op == Backward(len(line.stages) - 1):
            turn, saved = len(calls), later.copy()
    calls.reverse()
    unknown = needed.tensors.difference(joint.given, joint.tangents)
    if unknown:
        raise ScheduleError(
            f"{min(unknown, key=str).name} is read but no operation computes it: {schedule}"
        )
    crossing = saved.difference(joint.tangents, joint.constants)
    return Program(
        line=line,
        calls=tuple(calls),
        turn=len(calls) - turn,
        saved=tuple(sorted(crossing, key=lambda node: _rank(line, node))),
    )


class _Needed:
    """Tensors that are read later, and the storages in which any of them lies."""

    def __init__(self, line: Line) -> None:
        joint = line.joint
        self.tensors: set[fx.Node] = set()
        self._handed: set[fx.Node] = set()
        self._table = joint.storages
        self._of_node = joint.storages.of_node
        self._never_freed = joint.storages.of((*joint.given, *joint.tangents))
        self._alive: Counter[int] = Counter()

    def add(self, nodes: Iterable[fx.Node]) -> None:
        """They are read by what comes next."""
        for node in nodes:
            if node not in self.tensors or node in self._handed:
                self.tensors.add(node)
                self._handed.discard(node)
                self._alive.update(self._of_node[node])

    def add_handed(self, nodes: Iterable[fx.Node]) -> None:
        """They are handed over as soon as they are there."""
        new = set(nodes) - self.tensors
        self.tensors |= new
        self._handed |= new

    def remove(self, nodes: frozenset[fx.Node]) -> frozenset[int]:
        """Nothing before asks for them. Storages among theirs that are given back at once."""
        handed = nodes & self._handed
        staying = nodes - handed
        for node in staying:
            self._alive.subtract(self._of_node[node])
        self.tensors -= nodes
        self._handed -= handed
        if not handed:
            return frozenset()
        gone = self._table.of(handed) - self._table.of(staying)
        return gone - self.storages(gone)

    def among(self, nodes: Iterable[fx.Node]) -> frozenset[fx.Node]:
        """Those of ``nodes``."""
        return frozenset(self.tensors.intersection(nodes))

    def storages(self, storages: Iterable[int]) -> frozenset[int]:
        """Those in which any lies, or that are never freed."""
        return frozenset(s for s in storages if s in self._never_freed or self._alive[s] > 0)


def _rank(line: Line, node: fx.Node) -> tuple[int, int, int]:
    """Sorts what is there throughout before all else, which goes stage by stage."""
    role, order = line.rank(node)
    return (line.stage_of[node] if role < Role.PINNED else -role, role, order)


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
