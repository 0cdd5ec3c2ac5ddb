"""Which values of a stage's forward its backward's kernels compute for themselves.

A kernel that reads a value can as well read what the value is computed from, element by element,
and compute it on the way: that takes no memory and hardly any time. So of all that a backward
reads of its stage, the least bytes are chosen that give the rest: a minimum cut, as in Chen's
min-cut partitioner of AOTAutograd, but within a stage, and of what kernels read alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import networkx as nx
from torch import fx

from fxremat.passes.fuse.kinds import Kind
from fxremat.passes.fuse.regions import Region
from fxremat.passes.stages.linearize import Line

SOURCE, SINK = "given", "read"


def computed_again(
    line: Line, region: Region, kinds: Mapping[fx.Node, Kind]
) -> frozenset[fx.Node]:
    """Forward values of ``region`` that kernels of its backward need not be given."""
    own = {n for n in region.forward if kinds[n] is not Kind.VIEW}
    there = set(line.pinned)
    read: set[fx.Node] = set()
    for reader in region.backward:
        found = own.intersection(bases(reader.all_input_nodes, kinds))
        if kinds[reader].fuses:
            read |= found
        elif kinds[reader] is not Kind.VIEW:
            there |= found  # it is in memory anyway
    cheap = set(region.leaving)
    table = line.joint.storages
    graph = nx.DiGraph()
    graph.add_nodes_from((SOURCE, SINK))
    for node in own - there:
        nbytes = 1 if node in cheap else 1 + table.total(table.of_node[node])
        graph.add_edge((node, "in"), (node, "out"), capacity=nbytes)
        read_here = set(bases(node.all_input_nodes, kinds))
        sources = (n for n in read_here if n in own and n not in there)
        if kinds[node] is not Kind.POINTWISE or read_here & line.joint.mutated:
            graph.add_edge(SOURCE, (node, "in"))
            continue
        for source in sources:
            graph.add_edge((source, "out"), (node, "in"))
    for node in read - there:
        graph.add_edge((node, "out"), SINK)
    # Of equal cuts this is the one next to the readers, whatever the order of the nodes.
    _, (_, near) = nx.minimum_cut(graph, SOURCE, SINK)
    kept = {n for n in own - there if ((n, "in") in near) != ((n, "out") in near)}
    again: set[fx.Node] = set()
    waiting = [n for n in read if n not in there and n not in kept]
    while waiting:
        node = waiting.pop()
        if node not in again:
            again.add(node)
            sources = bases(node.all_input_nodes, kinds)
            waiting += [n for n in sources if n in own and n not in there and n not in kept]
    return frozenset(again)


def bases(nodes: Iterable[fx.Node], kinds: Mapping[fx.Node, Kind]) -> Iterator[fx.Node]:
    """What ``nodes`` are, or look at."""
    for node in nodes:
        while kinds.get(node) is Kind.VIEW and node.all_input_nodes:
            node = node.all_input_nodes[0]
        yield node
