"""The calls that carry a schedule out, and collectives that overlap with calls of others.

While a collective is under way the device computes: its start goes to the front of its own call or
of one before, its wait to the end of its own call or of one after. How far is a matter of room
(``planner.overlap``); here calls are changed accordingly. No operation is added or left out, and
there are as many calls as before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from torch import fx

from fxremat import torch_compat
from fxremat.ir import Backward, Compute, Forward, Keep, Schedule, Shift
from fxremat.passes.joint import batchnorm, rng
from fxremat.passes.joint.graph import is_tensor, values_of
from fxremat.passes.stages.block import Block
from fxremat.passes.stages.linearize import Line


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a block.

    Attributes:
        op: the operation of the schedule that it carries out.
        block: what runs.
        rebuilds: whether it recomputes a stage whose backward is the next call.
        kept: storages of its inputs that are read again later.
        handed: storages of gradients that are handed over right after it, and released.
    """

    op: Compute
    block: Block
    rebuilds: bool
    kept: frozenset[int] = frozenset()
    handed: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Program:
    """The calls of one step.

    Attributes:
        line: the stages.
        calls: the calls, in order.
        turn: index of the first call of the backward graph.
        saved: tensors that the forward graph passes to the backward graph, including primals, in
            the order of their first computation.
    """

    line: Line
    calls: tuple[Call, ...]
    turn: int
    saved: tuple[fx.Node, ...]


def link(
    line: Line,
    calls: Sequence[Call],
    handed: Set[fx.Node],
    released: Set[int],
    after: Iterable[fx.Node],
) -> tuple[list[Call], list[frozenset[fx.Node]]]:
    """Calls, and what each leaves in memory, from what the calls after it read.

    Args:
        line: the stages.
        calls: one after the other.
        handed: gradients whose memory nobody holds once they are made and handed over.
        released: storages of tangents that their last reader releases.
        after: tensors that are read once the calls have run.

    Returns calls whose ``kept`` and ``handed`` are found, and the tensors that are read after each.
    """
    table = line.joint.storages
    never_freed = table.of((*line.joint.given, *line.joint.tangents)) - released
    needed = set(after)
    alive = Counter(s for node in needed for s in table.of_node[node])

    def staying(storages: Iterable[int]) -> frozenset[int]:
        return frozenset(s for s in storages if s in never_freed or alive[s] > 0)

    found, later = [], []
    for call in reversed(calls):
        block = call.block
        later.append(frozenset(needed))
        given = frozenset(block.outputs)
        gone = (given & handed) - needed
        for node in needed & given:
            alive.subtract(table.of_node[node])
        needed -= given
        away = table.of(gone) - table.of(given - gone)
        kept = staying(block.reads)
        found.append(Call(call.op, block, call.rebuilds, kept, away - staying(away)))
        for node in block.inputs:
            if node not in needed:
                needed.add(node)
                alive.update(table.of_node[node])
    return found[::-1], later[::-1]


def keep_all(stage_count: int) -> Schedule:
    """Return the schedule that recomputes nothing: every stage keeps its saved set."""
    forward = [Forward(i, Keep.ALL) for i in range(stage_count)]
    backward = [Backward(i) for i in reversed(range(stage_count))]
    return Schedule((*forward, *backward))


def shifted(calls: Sequence[Call], line: Line, shifts: Iterable[Shift]) -> tuple[Call, ...]:
    """Calls with collectives where ``shifts``, one after the other, put them.

    Raises:
        LookupError: there is no such collective, or it cannot go there.
    """
    found = list(calls)
    for shift in shifts:
        blocks = blocks_of(found, line, shift)
        if not blocks:
            name = line.nodes[shift.node].name
            raise LookupError(f"{name} cannot go from call {shift.source}")
        for index, block in blocks.items():
            found[index] = replace(found[index], block=block)
    return tuple(found)


def blocks_of(calls: Sequence[Call], line: Line, shift: Shift) -> dict[int, Block]:
    """What the calls that a shift changes run then, by index; none where it cannot be."""
    source, target = calls[shift.source].block, calls[shift.target].block
    node = line.nodes[shift.node]
    early = not torch_compat.is_wait(node)
    step = -1 if early else 1
    if node not in source.nodes or shift.target - shift.source not in (0, step):
        return {}
    part = _needed(source, node) if early else _depending(source, node)
    if not _may_move(part, early=early):
        return {}
    move = _Move(line, source, part, _held(line, node), early)
    if target is source:
        return {shift.source: move.within()}
    blocks = move.to(target)
    return dict(zip((shift.source, shift.target), blocks, strict=True)) if blocks else {}


def _needed(block: Block, last: fx.Node) -> tuple[fx.Node, ...]:
    """What of a block gives ``last``, and its own values where it has several."""
    needed = {last}
    for node in reversed(block.nodes):
        if node in needed:
            needed.update(block.sources(node))
    needed.update([value for node in needed & {*block.nodes} for value in values_of(node)])
    return tuple(node for node in block.nodes if node in needed)


def _depending(block: Block, first: fx.Node) -> tuple[fx.Node, ...]:
    """What of a block needs ``first``."""
    found: dict[fx.Node, None] = {}
    for node in block.nodes:
        if node is first or not found.keys().isdisjoint(block.sources(node)):
            found[node] = None
    return tuple(found)


def _may_move(part: Sequence[fx.Node], *, early: bool) -> bool:
    """Whether order matters to none of it, and no start waits for anything."""
    fixed = (
        node
        for node in part
        if rng.is_draw(node)
        or rng.is_state(node)
        or batchnorm.updates_statistics(node)
        or (early and torch_compat.is_wait(node))
    )
    return next(fixed, None) is None


def _held(line: Line, node: fx.Node) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """What others may read until each wait for a collective, or this one wait, is over."""
    if torch_compat.is_wait(node):
        waits, collective = [node], torch_compat.awaited(node)
    else:
        values = [node, *values_of(node)]
        waits = [user for value in values for user in value.users if torch_compat.is_wait(user)]
        collective = node
    given = {*line.joint.given, *line.views}
    read = tuple(n for n in collective.all_input_nodes if is_tensor(n) and n not in given)
    return dict.fromkeys(waits, read)


@dataclass(frozen=True, slots=True)
class _Move:
    """Operations of a block that another moment is to run.

    Attributes:
        line: the stages.
        block: that has them.
        part: which.
        held: what stays until waits that are concerned are over.
        early: they go to the front, else to the end.
    """

    line: Line
    block: Block
    part: tuple[fx.Node, ...]
    held: Mapping[fx.Node, tuple[fx.Node, ...]]
    early: bool

    def within(self) -> Block:
        """They stay in their block."""
        block, moving = self.block, {*self.part}
        front = [*block.nodes[: block.front]]
        if self.early:
            front += (node for node in self.part if node not in front)
        rest = [node for node in block.nodes if node not in front and node not in moving]
        rest += (node for node in self.part if node not in front)
        return self._changed(block, (*front, *rest), {*block.outputs}, len(front))

    def to(self, target: Block) -> tuple[Block, Block] | None:
        """They go to another one: what is left, and that; ``None``: they cannot."""
        block = self.block
        rest = self._with_views({*block.nodes} - {*self.part})
        own = self._with_views({*self.part})
        leaving = {*own} - {*rest} - self.line.views
        if self._meet(target, own, leaving):
            return None
        if self.early:
            crossing = leaving & {*self._read(rest), *block.outputs}
            nodes = [*target.nodes[: target.front], *own, *target.nodes[target.front :]]
            wanted, front = {*target.outputs, *crossing}, target.front + len(own)
            left = {*block.outputs} - leaving
        else:
            crossing = ({*rest} - self.line.views) & {*self._read(own)}
            nodes = [*target.nodes, *own]
            wanted, front = {*target.outputs, *(leaving & {*block.outputs})}, target.front
            left = ({*block.outputs} - leaving) | crossing
        if not all(map(is_tensor, crossing)):
            return None
        staying = sum(node in rest for node in block.nodes[: block.front])
        return (
            self._changed(block, rest, left, staying),
            self._changed(target, tuple(dict.fromkeys(nodes)), wanted, front, own),
        )

    def _meet(self, target: Block, own: Sequence[fx.Node], leaving: Set[fx.Node]) -> bool:
        """Whether the target runs some of it too, or what it needs, or reads what it gives."""
        runs = {*target.nodes} - self.line.views
        needs = {*self._read(own)} - {*own}
        return bool(runs & leaving or leaving & {*target.inputs} or (self.early and runs & needs))

    def _with_views(self, chosen: set[fx.Node]) -> tuple[fx.Node, ...]:
        """Operations in their order, and the views of given tensors that they read."""
        needed: set[fx.Node] = set()
        found: list[fx.Node] = []
        for node in reversed(self.block.nodes):
            if (node in chosen and node not in self.line.views) or node in needed:
                found.append(node)
                views = (n for n in self.block.sources(node) if n in self.line.views)
                needed.update(views)
        return tuple(reversed(found))

    def _read(self, nodes: Iterable[fx.Node]) -> Iterable[fx.Node]:
        for node in nodes:
            yield from self.block.sources(node)
            yield from self.held.get(node, ())

    def _changed(
        self,
        block: Block,
        nodes: Sequence[fx.Node],
        wanted: Set[fx.Node],
        front: int,
        guests: Sequence[fx.Node] = (),
    ) -> Block:
        """``block`` with other operations."""
        there = {*nodes}
        modes = {n: self.block.mode_of(n) for n in guests if n not in block.nodes}
        waits = {**self.block.waits, **block.waits, **self.held}
        changed = replace(
            block,
            nodes=tuple(nodes),
            again=dict.fromkeys(node for node in block.again if node in there).keys(),
            guests={n: m for n, m in {**block.guests, **modes}.items() if n in there},
            waits={node: read for node, read in waits.items() if node in there},
            front=front,
        )
        return changed.connected(self.line, wanted)
