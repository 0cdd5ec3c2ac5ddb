"""Which operations run as one unit.

Units are within spans, runs of stages: cuts between stages are many, where operations are taken
apart. Where several have no operation between them that runs alone, all but the one that the
fewest bytes cross are left out: they would cut what one kernel could compute.

Within a span and direction operations of one level can be one unit whatever their order. A level
is the number of operations that ran alone, and of parts that ended, on the longest way to a value.
Operations of a level are one unit where they have a value or an input in common; values of one
operation, such as the mean and the variance of a norm, count as one input.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import networkx as nx
from torch import fx

from fxremat.passes.fuse.kinds import Kind, Kinds, is_fused, readers_of
from fxremat.passes.joint import rng
from fxremat.passes.stages.linearize import Line

NEAR, MUCH = 4, 1.5
"""A cut is left out where another one, so many operations that run alone away or fewer, is
crossed by so many times fewer bytes."""

Sources = Callable[[fx.Node], Iterable[fx.Node]]


@dataclass(frozen=True, slots=True)
class Span:
    """Stages that follow each other.

    Attributes:
        forward, backward: their operations, in the order of the graph.
        leaving: tensors that cross the cut after them.
    """

    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    leaving: tuple[fx.Node, ...]


def spans_of(line: Line, kinds: Kinds) -> list[Span]:
    """The spans of a line, in order."""
    order = line.order.__getitem__
    sums = line.sums  # they run with whichever stage is the last
    spans, first = [], 0
    for end in (*_cuts(line, kinds), len(line.stages)):
        stages = line.stages[first:end]
        spans.append(
            Span(
                tuple(sorted((n for s in stages for n in s.forward), key=order)),
                tuple(sorted((n for s in stages for n in s.backward if n not in sums), key=order)),
                line.stages[end].boundary if end < len(line.stages) else (),
            )
        )
        first = end
    return spans


def _cuts(line: Line, kinds: Kinds) -> list[int]:
    """Stages before which a span begins."""
    table = line.joint.storages
    fixed = {*line.segments.ends, len(line.stages) - 1 if line.ends_at_turn else 0}
    best: dict[int, tuple[int, int]] = {}
    alone = 0
    for index in range(1, len(line.stages)):
        before = line.stages[index - 1].forward
        alone += sum(kinds[n] is Kind.ALONE and not rng.is_state(n) for n in before)
        crossing = table.total(table.of(line.stages[index].boundary))
        if alone not in best or crossing <= best[alone][0]:
            best[alone] = crossing, index

    def stays(run: int) -> bool:
        near = (best[i][0] for i in range(run - NEAR, run + NEAR + 1) if i in best)
        return best[run][0] <= MUCH * min(near)

    return sorted({best[run][1] for run in best if stays(run)} | fixed - {0})


def group(
    nodes: Sequence[fx.Node],
    kinds: Kinds,
    sources: Sources,
    *,
    shared: Callable[[fx.Node], bool],
    nbytes: Callable[[fx.Node], int],
    parts: Mapping[fx.Node, int],
) -> list[list[fx.Node]]:
    """Groups of those of ``nodes`` that fuse.

    Args:
        nodes: of one span and direction, in order.
        kinds: of all.
        sources: what running a node reads: no views, and no values that are computed again.
        shared: whether readers of an input may be one unit for that.
        nbytes: of a value.
        parts: of nodes that are not of part 0; a unit is of one.
    """
    levels = _Levels(nodes, kinds, sources, nbytes, parts).levels
    joined = nx.Graph()
    joined.add_nodes_from(n for n in nodes if is_fused(n, kinds))
    readers: dict[tuple[fx.Node, int, int], fx.Node] = {}
    for node in list(joined):
        part = parts.get(node, 0)
        for source in sources(node):
            near = levels.get(source) == levels[node] and parts.get(source, 0) == part
            if near and is_fused(source, kinds):
                joined.add_edge(source, node)
            elif shared(source):
                made_by = source.all_input_nodes[0] if kinds.get(source) is Kind.VALUE else source
                joined.add_edge(readers.setdefault((made_by, levels[node], part), node), node)
    number = {n: i for i, own in enumerate(nx.connected_components(joined)) for n in own}
    groups: dict[int, list[fx.Node]] = {}
    for node in joined:
        groups.setdefault(number[node], []).append(node)
    return list(groups.values())


class _Levels:
    """Finds the level of each operation but views.

    None is below that of a source, nor equal where the source runs alone, or is of a higher part;
    no draw's is below that of the draw before. Arguments are those of :func:`group`.
    """

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        kinds: Kinds,
        sources: Sources,
        nbytes: Callable[[fx.Node], int],
        parts: Mapping[fx.Node, int],
    ) -> None:
        self._kinds, self._nbytes, self._parts = kinds, nbytes, parts
        self._nodes = [n for n in nodes if kinds[n] is not Kind.VIEW]
        self._reads = {n: list(dict.fromkeys(sources(n))) for n in self._nodes}
        self._users: dict[fx.Node, list[fx.Node]] = {n: [] for n in self._nodes}
        for node, read in self._reads.items():
            for source in read:
                if source in self._users:
                    self._users[source].append(node)
        self._inside = {
            n for n in self._nodes if all(u in self._users for u in readers_of(n, kinds))
        }
        self._floors: dict[fx.Node, int] = {}
        self.levels = self._found()
        self._put_off()
        self._bring_together()

    def _after(self, source: fx.Node, node: fx.Node) -> int:
        return int(self._parts.get(source, 0) > self._parts.get(node, 0))

    def _found(self) -> dict[fx.Node, int]:
        """The least levels that are no less than the floors."""
        levels: dict[fx.Node, int] = {}
        drawn = 0
        for node in self._nodes:
            before = (levels[s] + self._after(s, node) for s in self._reads[node] if s in levels)
            alone = self._kinds[node] is Kind.ALONE
            levels[node] = max(max(before, default=0) + alone, self._floors.get(node, 0))
            if rng.is_state(node) or rng.draws(node):
                levels[node] = drawn = max(levels[node], drawn)
        return levels

    def _put_off(self) -> None:
        """What only kernels of later levels read is computed there, where that holds no more."""
        for node in reversed(self._nodes):
            users = self._users[node]
            fusing = users and all(self._kinds[u].fuses for u in users)
            if self._kinds[node] is not Kind.POINTWISE or node not in self._inside or not fusing:
                continue
            later = min(self.levels[u] - self._after(node, u) for u in users)
            if later == self.levels[node]:
                continue
            cone, held = self._cone(node)
            kept = (s for s in held if all(self.levels[u] < later for u in self._users[s]))
            if sum(map(self._nbytes, kept)) <= self._nbytes(node):
                self._floors.update(dict.fromkeys(cone, later))
                self.levels.update(dict.fromkeys(cone, later))
        self.levels = self._found()

    def _bring_together(self) -> None:
        """What needs nothing of the span is computed with those that read the same values.

        Only where something that runs alone reads it: all else is with its readers.
        """
        for node in self._nodes:
            alone = any(self._kinds[u] is Kind.ALONE for u in self._users[node])
            if not alone or self._kinds[node] is not Kind.POINTWISE or node not in self._inside:
                continue
            cone, held = self._cone(node)
            if held or self.levels[node]:
                continue
            read = {s for n in cone for s in self._reads[n] if s not in self._users}
            shared: Counter[int] = Counter()
            for other in self._nodes:
                bound = any(s in self._users for s in self._reads[other])  # to some levels
                if other not in cone and self._kinds[other].fuses and bound:
                    for source in read.intersection(self._reads[other]):
                        shared[self.levels[other]] += self._nbytes(source)
            if shared:
                level = min(shared, key=lambda level: (-shared[level], level))
                self._floors.update(dict.fromkeys(cone, level))
        self.levels = self._found()

    def _cone(self, node: fx.Node) -> tuple[set[fx.Node], set[fx.Node]]:
        """``node`` and what is computed for it alone, and what else of the span these read."""
        cone, others = {node}, set[fx.Node]()
        waiting = [s for s in self._reads[node] if s in self._users]
        while waiting:
            source = waiting.pop()
            if source in cone:
                continue
            alike = self.levels[source] == self.levels[node] and source in self._inside
            pointwise = self._kinds[source] is Kind.POINTWISE
            if alike and pointwise and cone.issuperset(self._users[source]):
                cone.add(source)
                waiting += [s for s in self._reads[source] if s in self._users]
            else:
                others.add(source)  # unless its last reader is met yet
        return cone, others - cone
