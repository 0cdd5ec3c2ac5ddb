"""Which operations of a stage's forward, or of its backward, run as one unit.

Between two operations that run alone, all others that need neither to have run, and all that
need the first, are apart: a level is the number of operations that ran alone on the longest way
to a value. Those of one level can be one unit whatever their order; they are where they have a
value or an input in common.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from torch import fx

from fxremat.passes.fuse.kinds import Kind
from fxremat.passes.joint import rng

Sources = Callable[[fx.Node], Iterable[fx.Node]]


def group(
    nodes: Sequence[fx.Node],
    kinds: Mapping[fx.Node, Kind],
    sources: Sources,
    *,
    shared: Callable[[fx.Node], bool],
    nbytes: Callable[[fx.Node], int],
    once: Collection[fx.Node],
) -> list[list[fx.Node]]:
    """Groups of those of ``nodes`` that fuse.

    Args:
        nodes: of one stage and direction, in order.
        kinds: of all.
        sources: what running a node reads: no views, and no values that are computed again.
        shared: whether readers of an input may be one unit for that.
        nbytes: of a value.
        once: what nothing computes again is never one unit with what is.
    """
    levels = _levels(nodes, kinds, sources, nbytes, once)
    leader = {node: node for node in nodes}

    def find(node: fx.Node) -> fx.Node:
        while leader[node] is not node:
            leader[node] = leader[leader[node]]
            node = leader[node]
        return node

    def join(one: fx.Node, other: fx.Node) -> None:
        leader[find(one)] = find(other)

    readers: dict[tuple[fx.Node, int, bool], fx.Node] = {}
    members = [n for n in nodes if kinds[n].fuses or _is_part(n, kinds)]
    for node in members:
        for source in sources(node):
            near = levels.get(source) == levels[node] and (source in once) == (node in once)
            if near and (kinds[source].fuses or _is_part(source, kinds)):
                join(source, node)
            elif shared(source):
                join(readers.setdefault((source, levels[node], node in once), node), node)
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in members:
        groups.setdefault(find(node), []).append(node)
    return list(groups.values())


def _levels(
    nodes: Sequence[fx.Node],
    kinds: Mapping[fx.Node, Kind],
    sources: Sources,
    nbytes: Callable[[fx.Node], int],
    once: Collection[fx.Node],
) -> dict[fx.Node, int]:
    """Of each value; what only later levels read is computed there where that holds no more.

    What runs once is followed by a level of its own, and no draw has a lower level than the one
    before: units could wait for each other else.
    """

    def after(source: fx.Node, node: fx.Node) -> int:
        return int(source in once and node not in once)

    levels: dict[fx.Node, int] = {}
    users: dict[fx.Node, list[fx.Node]] = {node: [] for node in nodes}
    drawn = 0
    for node in nodes:
        if kinds[node] is Kind.VIEW:
            continue
        known = [n for n in sources(node) if n in levels]
        for source in known:
            users[source].append(node)
        alone = kinds[node] is Kind.ALONE
        levels[node] = max((levels[n] + after(n, node) for n in known), default=0) + alone
        if rng.is_state(node) or rng.draws(node):
            levels[node] = drawn = max(levels[node], drawn)
    for node in reversed(nodes):
        if kinds[node] is not Kind.POINTWISE or not all(u in levels for u in _readers(node, kinds)):
            continue
        if not users[node] or not all(kinds[u].fuses for u in users[node]):
            continue
        later = min(levels[u] - after(node, u) for u in users[node])
        held = {
            s
            for s in sources(node)
            if s in levels and all(u is node or levels[u] < later for u in users[s])
        }
        if sum(map(nbytes, held)) <= nbytes(node):
            levels[node] = later
    return levels


def _is_part(node: fx.Node, kinds: Mapping[fx.Node, Kind]) -> bool:
    """Whether ``node`` is one result of an operation that fuses."""
    return kinds[node] is Kind.VALUE and kinds[node.all_input_nodes[0]].fuses


def _readers(node: fx.Node, kinds: Mapping[fx.Node, Kind]) -> Iterator[fx.Node]:
    """Who reads ``node``, or a view of it."""
    for user in node.users:
        if kinds.get(user) is Kind.VIEW:
            yield from _readers(user, kinds)
        else:
            yield user
