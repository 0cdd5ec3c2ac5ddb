"""Choose which operations run as one unit.

Units lie within spans, which are runs of stages. If operations are decomposed, there are many cuts
between stages. Of cuts without an unfused operation in between, only the one that the fewest bytes
cross is kept: the others would divide what one kernel can compute.

Within a span and direction, operations of one level can be one unit in any order. The level is the
number of unfused operations, and of ended parts, on the longest path to a value. Operations of a
level become one unit if they share a value or an input; values of one operation, such as mean and
variance of a norm, count as one input.
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
"""A cut is dropped if another one, at most ``NEAR`` unfused operations away, is crossed by fewer
bytes by a factor of ``MUCH``."""

Sources = Callable[[fx.Node], Iterable[fx.Node]]


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive stages within which operations are fused.

    Attributes:
        forward, backward: their operations, in graph order.
        leaving: tensors that cross the cut after them.
    """

    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    leaving: tuple[fx.Node, ...]


def spans_of(line: Line, kinds: Kinds) -> list[Span]:
    """Return the spans of a line in order: consecutive stages within which operations are fused."""
    order = line.order.__getitem__
    sums = line.sums  # they run with the stage that runs last
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
    """Return the indices of the stages that begin a span, except the first."""
    table = line.joint.storages
    fixed = {*line.segments.ends, len(line.stages) - 1 if line.ends_at_loss_point else 0}
    best: dict[int, tuple[int, int]] = {}
    lone = 0
    for index in range(1, len(line.stages)):
        before = line.stages[index - 1].forward
        lone += sum(kinds[n] is Kind.ALONE and not rng.is_state(n) for n in before)
        crossing = table.total(table.of(line.stages[index].boundary))
        if lone not in best or crossing <= best[lone][0]:
            best[lone] = crossing, index

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
    """Return groups of ``nodes``, each of which runs as one unit; unfused operations are in none.

    Args:
        nodes: operations of one span, all of the forward or all of the backward, in order.
        kinds: kinds of all operations.
        sources: returns what running a node reads, without views and recomputed values.
        shared: returns whether nodes may be grouped just because they read this input.
        nbytes: returns the bytes of a value.
        parts: the part of each node, unless it is 0; nodes of different parts are not grouped.
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
    components = enumerate(nx.connected_components(joined))
    number = {n: i for i, component in components for n in component}
    groups: dict[int, list[fx.Node]] = {}
    for node in joined:
        groups.setdefault(number[node], []).append(node)
    return list(groups.values())


class _Levels:
    """Finds a level for each operation that is no view; kernels contain operations of one level.

    It is at least that of each source, and higher if the source runs unfused or is of a higher
    part. Random draws keep their order. For arguments see :func:`group`.
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
        self.levels = self._lowest_levels()
        self._postpone()
        self._join_readers()

    def _rise(self, source: fx.Node, node: fx.Node) -> int:
        """Return 1 if ``source``, which ``node`` reads, is of a higher part than it; else 0.

        The level of ``node`` is higher by at least this number.
        """
        return int(self._parts.get(source, 0) > self._parts.get(node, 0))

    def _lowest_levels(self) -> dict[fx.Node, int]:
        """Return the lowest level of each node that is not below its level in ``_floors``."""
        levels: dict[fx.Node, int] = {}
        drawn = 0
        for node in self._nodes:
            before = (levels[s] + self._rise(s, node) for s in self._reads[node] if s in levels)
            lone = self._kinds[node] is Kind.ALONE
            levels[node] = max(max(before, default=0) + lone, self._floors.get(node, 0))
            if rng.is_state(node) or rng.has_effect(node):
                levels[node] = drawn = max(levels[node], drawn)
        return levels

    def _postpone(self) -> None:
        """Raise the level of values that only kernels of later levels read to the first of these.

        This is not done if more bytes were held then: those that the values are computed from.
        """
        for node in reversed(self._nodes):
            users = self._users[node]
            fusing = users and all(self._kinds[u].fuses for u in users)
            if self._kinds[node] is not Kind.POINTWISE or node not in self._inside or not fusing:
                continue
            later = min(self.levels[u] - self._rise(node, u) for u in users)
            if later == self.levels[node]:
                continue
            cone, held = self._cone(node)
            kept = (s for s in held if all(self.levels[u] < later for u in self._users[s]))
            if sum(map(self._nbytes, kept)) <= self._nbytes(node):
                self._floors.update(dict.fromkeys(cone, later))
                self.levels.update(dict.fromkeys(cone, later))
        self.levels = self._lowest_levels()

    def _join_readers(self) -> None:
        """Raise the level of values that need nothing of the span to where their inputs are read.

        Of the levels of other operations that read their inputs, it is the one where most bytes of
        these are read. Values that no unfused operation reads are with their readers already.
        """
        for node in self._nodes:
            is_read = any(self._kinds[u] is Kind.ALONE for u in self._users[node])
            if not is_read or self._kinds[node] is not Kind.POINTWISE or node not in self._inside:
                continue
            cone, held = self._cone(node)
            if held or self.levels[node]:
                continue
            read = {s for n in cone for s in self._reads[n] if s not in self._users}
            shared: Counter[int] = Counter()
            for other in self._nodes:
                bound = any(s in self._users for s in self._reads[other])
                if other not in cone and self._kinds[other].fuses and bound:
                    for source in read.intersection(self._reads[other]):
                        shared[self.levels[other]] += self._nbytes(source)
            if shared:
                level = min(shared, key=lambda level: (-shared[level], level))
                self._floors.update(dict.fromkeys(cone, level))
        self.levels = self._lowest_levels()

    def _cone(self, node: fx.Node) -> tuple[set[fx.Node], set[fx.Node]]:
        """Return ``node`` with what is computed only for it, and what these read of the span."""
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
                others.add(source)  # it may join the cone when its last reader does
        return cone, others - cone
