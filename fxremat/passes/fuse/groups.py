"""Which operations of a stage's forward, or of its backward, run as one unit.

Operations of one level can be one unit; they are where they have a value or an input in common.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import fx

from fxremat.passes.fuse.kinds import Kind
from fxremat.passes.fuse.levels import Sources, levels_of


def group(
    nodes: Sequence[fx.Node],
    kinds: Mapping[fx.Node, Kind],
    sources: Sources,
    *,
    shared: Callable[[fx.Node], bool],
    nbytes: Callable[[fx.Node], int],
    parts: Mapping[fx.Node, int],
) -> list[list[fx.Node]]:
    """Groups of those of ``nodes`` that fuse.

    Args:
        nodes: of one stage and direction, in order.
        kinds: of all.
        sources: what running a node reads: no views, and no values that are computed again.
        shared: whether readers of an input may be one unit for that.
        nbytes: of a value.
        parts: of those that are not of part 0; a unit is of one.
    """
    levels = levels_of(nodes, kinds, sources, nbytes=nbytes, parts=parts)
    leader = {node: node for node in nodes}

    def find(node: fx.Node) -> fx.Node:
        while leader[node] is not node:
            leader[node] = leader[leader[node]]
            node = leader[node]
        return node

    def join(one: fx.Node, other: fx.Node) -> None:
        leader[find(one)] = find(other)

    readers: dict[tuple[fx.Node, int, int], fx.Node] = {}
    members = [n for n in nodes if kinds[n].fuses or _is_part(n, kinds)]
    for node in members:
        part = parts.get(node, 0)
        for source in sources(node):
            near = levels.get(source) == levels[node] and parts.get(source, 0) == part
            if near and (kinds[source].fuses or _is_part(source, kinds)):
                join(source, node)
            elif shared(source):
                join(readers.setdefault((source, levels[node], part), node), node)
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in members:
        groups.setdefault(find(node), []).append(node)
    return list(groups.values())


def _is_part(node: fx.Node, kinds: Mapping[fx.Node, Kind]) -> bool:
    """Whether ``node`` is one result of an operation that fuses."""
    return kinds[node] is Kind.VALUE and kinds[node.all_input_nodes[0]].fuses
