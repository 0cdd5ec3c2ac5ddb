"""In which order a stage's operations can run as units.

A level is the number of operations that ran alone, and of parts that ended, on the longest way to
a value. Between two of these, all others that need neither to have run, and all that need the
first, are apart; those of one level can be one unit whatever their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torch import fx

from fxremat.passes.fuse.kinds import Kind
from fxremat.passes.joint import rng

Sources = Callable[[fx.Node], Iterable[fx.Node]]


def levels_of(
    nodes: Sequence[fx.Node],
    kinds: Mapping[fx.Node, Kind],
    sources: Sources,
    *,
    nbytes: Callable[[fx.Node], int],
    parts: Mapping[fx.Node, int],
) -> dict[fx.Node, int]:
    """Of each of ``nodes`` but views.

    Args:
        nodes: of one span and direction, in order.
        kinds: of all.
        sources: what running a node reads: no views, and no values that are computed again.
        nbytes: of a value.
        parts: of those that are not of part 0; see :mod:`fxremat.passes.fuse.parts`.

    Ensures: none is below that of a source, nor equal where the source runs alone, or is of a
        higher part; no draw's is below that of the draw before.
    """
    finder = _Levels(nodes, kinds, sources, nbytes, parts)
    finder.put_off()
    finder.bring_together()
    return finder.levels


class _Levels:
    def __init__(
        self,
        nodes: Sequence[fx.Node],
        kinds: Mapping[fx.Node, Kind],
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

    def put_off(self) -> None:
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

    def bring_together(self) -> None:
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
            shared: dict[int, int] = {}
            for other in self._nodes:
                if other not in cone and self._kinds[other].fuses and self._is_bound(other):
                    for source in read.intersection(self._reads[other]):
                        level = self.levels[other]
                        shared[level] = shared.get(level, 0) + self._nbytes(source)
            if shared:
                level = min(shared, key=lambda level: (-shared[level], level))
                self._floors.update(dict.fromkeys(cone, level))
        self.levels = self._found()

    def _is_bound(self, node: fx.Node) -> bool:
        """Whether ``node`` cannot run at any level."""
        return any(s in self._users for s in self._reads[node])

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


def readers_of(node: fx.Node, kinds: Mapping[fx.Node, Kind]) -> Iterator[fx.Node]:
    """Who reads ``node``, or a view of it."""
    waiting = list(node.users)
    while waiting:
        user = waiting.pop()
        if kinds.get(user) is Kind.VIEW:
            waiting += user.users
        else:
            yield user
