"""The calls that carry a schedule out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from torch import fx

from fxremat.ir import Backward, Compute, Forward, Keep, Schedule
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
        loss_point: index of the first call of the backward graph.
        saved: tensors that the forward graph passes to the backward graph, including primals, in
            the order of their first computation.
    """

    line: Line
    calls: tuple[Call, ...]
    loss_point: int
    saved: tuple[fx.Node, ...]


def link(
    line: Line,
    calls: Sequence[Call],
    handed: Set[fx.Node],
    released: Set[int],
    after: Iterable[fx.Node],
) -> tuple[Call, ...]:
    """Return ``calls`` with ``kept`` and ``handed`` set from what the calls after each one read.

    Args:
        line: the stages.
        calls: one after the other.
        handed: gradients whose memory nobody holds once they are made and handed over.
        released: storages of tangents that their last reader releases.
        after: tensors that are read once the calls have run.
    """
    table = line.joint.storages
    never_freed = table.of((*line.joint.given, *line.joint.tangents)) - released
    needed = set(after)
    alive = Counter(s for node in needed for s in table.of_node[node])

    def staying(storages: Iterable[int]) -> frozenset[int]:
        return frozenset(s for s in storages if s in never_freed or alive[s] > 0)

    found = []
    for call in reversed(calls):
        block = call.block
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
    return tuple(reversed(found))


def keep_all(stage_count: int) -> Schedule:
    """Return the schedule that recomputes nothing: every stage keeps its saved set."""
    forward = [Forward(i, Keep.ALL) for i in range(stage_count)]
    backward = [Backward(i) for i in reversed(range(stage_count))]
    return Schedule((*forward, *backward))
