"""What the calls of a decision run, read, make and free, written apart from the planner's loops.

A schedule is read backwards: every tensor is taken from the last call before that can give it,
and every call gives only what is read later, so each is freed as early as the order of
operations allows.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from torch import fx

from fxremat import torch_compat
from fxremat.errors import ScheduleError
from fxremat.ir import Backward, Compute, Decision, Forward, Schedule
from fxremat.passes.emit.program import Call, Program
from fxremat.passes.joint import rng
from fxremat.passes.joint.graph import JointGraph, is_getitem, is_tensor
from fxremat.passes.stages.block import Block, Mode, dependencies
from fxremat.passes.stages.linearize import Line, Role
from fxremat.passes.stages.order import check_draws

NOTHING: frozenset[fx.Node] = frozenset()
NOTHING_MORE = Decision()


def build_program(
    line: Line,
    schedule: Schedule,
    decision: Decision = NOTHING_MORE,
    handed: frozenset[fx.Node] = NOTHING,
) -> Program:
    """Find the blocks that carry out ``schedule``.

    Args:
        line: the stages.
        schedule: what to do.
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
    needed.add(n for n in _tensors(joint.backward_outputs) if n not in handed)
    needed.add_handed(handed)
    returned = set(_tensors(joint.forward_outputs))  # be they read again or not
    needed.add(returned)
    later = set(_tensors(joint.backward_outputs))
    calls: list[Call] = []
    loss_point, saved = 0, later.copy()
    for op, mode in reversed(list(zip(ops, _modes(ops), strict=True))):
        stage, backward = op.stage, mode is Mode.BACKWARD
        own_held = held.get(stage, NOTHING)
        sums = summed.get(stage) if backward else None
        if sums == home_sums(line, stage):
            sums = None  # the line's own order has them
        given = needed.among(candidates(line, stage, mode, own_held, sums))
        if not given and mode is Mode.AGAIN:
            continue
        own_missing = missing.get(stage, NOTHING) if backward else NOTHING
        block = extract(
            line,
            stage=stage,
            mode=mode,
            outputs=given,
            missing=own_missing,
            held=own_held,
            sums=sums,
        )
        away = needed.remove(given)
        later -= given
        kept = needed.storages(block.reads)
        needed.add(block.inputs)
        later.update(block.inputs)
        rebuilds = mode is Mode.AGAIN and bool(calls) and calls[-1].op == Backward(stage)
        if block.nodes:
            calls.append(Call(op, block, rebuilds, kept, away))
        if op == Backward(len(line.stages) - 1):
            loss_point, saved = len(calls), later.copy()
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
        loss_point=len(calls) - loss_point,
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
        self._never_freed = joint.storages.of((*joint.given, *_held_tangents(joint)))
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


def _held_tangents(joint: JointGraph) -> Iterator[fx.Node]:
    """Gradients of outputs that are there to the end: returned, read by nothing, or of a torch
    that holds them.
    """
    table = joint.storages
    read = {s for node in joint.backward for n in node.all_input_nodes for s in table.of_node[n]}
    stays = table.of((*joint.given, *_tensors((*joint.forward_outputs, *joint.backward_outputs))))
    for tangent in joint.tangents:
        goes = read.issuperset(table.of_node[tangent]) and stays.isdisjoint(table.of_node[tangent])
        if not (goes and torch_compat.releases_tangents()):
            yield tangent


def _rank(line: Line, node: fx.Node) -> tuple[int, int, int]:
    """Sorts what is there throughout before all else, which goes stage by stage."""
    role, order = line.rank(node)
    return (line.stage_of[node] if role < Role.PINNED else -role, role, order)


def _tensors(results: Iterable[object]) -> Iterator[fx.Node]:
    return (n for n in results if isinstance(n, fx.Node))


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


Sums = frozenset[fx.Node]
"""Sums that a backward runs."""


def home_sums(line: Line, stage: int) -> Sums:
    """Those that the backward of ``stage`` runs where it is the last of what they read."""
    return frozenset(n for n in line.sums if line.stage_of[n] == stage)


def sums_at(line: Line, ops: Sequence[Compute]) -> dict[int, Sums]:
    """For each stage the sums that run with its backward in a schedule."""
    if not line.sums:
        return {}
    when = {op.stage: index for index, op in enumerate(ops) if isinstance(op, Backward)}
    found: dict[int, set[fx.Node]] = defaultdict(set)
    for node, stages in line.sums.items():
        found[max(stages, key=lambda stage: when.get(stage, -1))].add(node)
    return {stage: frozenset(found[stage]) for stage in range(len(line.stages))}


def backward_nodes(line: Line, stage: int, sums: Sums) -> tuple[fx.Node, ...]:
    """What the backward of ``stage`` runs, each sum as soon as all that it reads is there."""
    own = [n for n in line.stages[stage].backward if n not in line.sums]
    waiting = sorted(sums, key=lambda n: line.order[n])
    missing = {*own, *waiting}
    result: list[fx.Node] = []
    for index, node in enumerate(own):
        result.append(node)
        missing.remove(node)
        if index + 1 < len(own) and own[index + 1].target is operator.getitem:
            continue  # nothing comes between an operation and its values
        for reader in list(waiting):
            if missing.isdisjoint(reader.all_input_nodes):
                result.append(reader)
                missing.remove(reader)
                waiting.remove(reader)
    return tuple(result)


def _operations(line: Line, stage: int, mode: Mode, sums: Sums | None) -> tuple[fx.Node, ...]:
    parts = line.stages[stage]
    if mode is not Mode.BACKWARD:
        return parts.forward
    return parts.backward if sums is None else backward_nodes(line, stage, sums)


def candidates(
    line: Line,
    stage: int,
    mode: Mode,
    held: frozenset[fx.Node] = frozenset(),
    sums: Sums | None = None,
) -> tuple[fx.Node, ...]:
    """Tensors that a block of ``stage`` in ``mode`` can give; see :func:`extract`."""
    nodes = _operations(line, stage, mode, sums)
    if mode is Mode.AGAIN:
        there = line.pinned | held
        return tuple(n for n in nodes if is_tensor(n) and n not in there)
    return tuple(n for n in nodes if is_tensor(n))


def extract(
    line: Line,
    *,
    stage: int,
    mode: Mode,
    outputs: Iterable[fx.Node],
    missing: frozenset[fx.Node] = frozenset(),
    held: frozenset[fx.Node] = frozenset(),
    sums: Sums | None = None,
) -> Block:
    """The least block that gives ``outputs``.

    Args:
        line: the stages.
        stage: which of them.
        mode: how the block runs.
        outputs: what is asked for.
        missing: for a backward: tensors of the stage's forward that nobody kept. Those
            that it needs are recomputed, each right before it is first read.
        held: tensors of the stage's forward that are kept from their first computation
            on, as pinned ones are: a recomputation reads them.
        sums: for a backward: the sums that run with it, ``None`` for those of the line's
            own order.

    Requires: ``outputs`` are among :func:`candidates`, ``missing`` among those of
        ``Mode.AGAIN``.
    Ensures: but in ``Mode.AGAIN``, every random draw runs, asked for or not.
    """
    own = _operations(line, stage, mode, sums)
    wanted = set(outputs)
    needed = set(wanted)
    if mode is not Mode.AGAIN:
        needed.update(filter(rng.draws, own))
    inside: list[fx.Node] = []
    for node in reversed(own):
        available = mode is Mode.AGAIN and (node in line.pinned or node in held)
        if node in needed and not available:
            inside.append(node)
            needed.update(dependencies(node, mode))
    inside.reverse()
    again = _recomputed(line, stage, needed, missing - held) if missing else []
    nodes = _interleave(line, inside, mode, again)
    block = Block(stage, mode, tuple(nodes), again=dict.fromkeys(again).keys())
    return block.connected(line, wanted)


def _recomputed(
    line: Line, stage: int, needed: set[fx.Node], missing: frozenset[fx.Node]
) -> list[fx.Node]:
    """Forward operations of ``stage`` that give what is ``needed`` and ``missing``."""
    wanted = set(needed)
    found = []
    for node in reversed(line.stages[stage].forward):
        if node in wanted and (node in missing or not is_tensor(node)):
            found.append(node)
            wanted.update(dependencies(node, Mode.AGAIN))
    found.reverse()
    return found


def _interleave(
    line: Line, nodes: list[fx.Node], mode: Mode, again: list[fx.Node]
) -> list[fx.Node]:
    """``nodes``, and each view of a given tensor and each of ``again`` before its first reader.

    The values of an operation with several directly follow it.
    """
    recomputed = set(again)
    values: dict[fx.Node, list[fx.Node]] = {}
    for node in again:
        if is_getitem(node):
            values.setdefault(node.all_input_nodes[0], []).append(node)
    result: dict[fx.Node, None] = {}
    for last in nodes:
        waiting = [last]
        while waiting:
            node = waiting[-1]
            how = Mode.AGAIN if node in recomputed else mode
            before = [
                source
                for source in dependencies(node, how)
                if (source in line.views or source in recomputed) and source not in result
            ]
            if before:
                waiting.extend(reversed(before))
                continue
            waiting.pop()
            result[node] = None
            result.update(dict.fromkeys(values.get(node, ())))
    return list(result)
