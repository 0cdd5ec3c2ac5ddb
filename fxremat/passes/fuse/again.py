"""Which values of a stage's forward its backward's kernels compute for themselves.

A kernel that reads a value can as well read what the value is computed from, element by element,
and compute it on the way: that takes no memory and hardly any time. So of all that a backward
reads of its stage, the least bytes are chosen that give the rest: a minimum cut, as in Chen's
min-cut partitioner of AOTAutograd, but within a stage, and of what kernels read alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set

import networkx as nx
from torch import fx

from fxremat.passes.fuse.kinds import Kind
from fxremat.passes.fuse.spans import Span
from fxremat.passes.stages.linearize import Line

SOURCE, SINK = "given", "read"


def computed_again(
    line: Line,
    span: Span,
    kinds: Mapping[fx.Node, Kind],
    *,
    kept: Set[fx.Node] | None = None,
) -> frozenset[fx.Node]:
    """Forward values of ``span`` that its backward need not be given.

    Args:
        line: the step.
        span: of it.
        kinds: of its operations.
        kept: what is in memory anyway, whatever reads it; ``None``: all that is read by what runs
            alone.
    """
    own = {n for n in span.forward if kinds[n] is not Kind.VIEW}
    there = line.pinned | (kept or set())
    read: set[fx.Node] = set()
    for reader in span.backward:
        found = own.intersection(bases(reader.all_input_nodes, kinds))
        if kinds[reader].fuses or (kept is not None and kinds[reader] is Kind.ALONE):
            read |= found
        elif kinds[reader] is not Kind.VIEW:
            there = there | found  # it is in memory anyway
    sources = {n: own.intersection(bases(n.all_input_nodes, kinds)) - there for n in own}
    held = _kept(line, span, kinds, sources={n: sources[n] for n in own - there}, read=read)
    again: set[fx.Node] = set()
    waiting = list(read - there - held)
    while waiting:
        node = waiting.pop()
        if node not in again:
            again.add(node)
            waiting += sources[node] - held
    return frozenset(again)


def _kept(
    line: Line,
    span: Span,
    kinds: Mapping[fx.Node, Kind],
    *,
    sources: Mapping[fx.Node, Set[fx.Node]],
    read: Set[fx.Node],
) -> set[fx.Node]:
    """The least bytes that all of ``read`` can be computed from.

    Args:
        line: the step.
        span: of it.
        kinds: of its operations.
        sources: of each value that is not in memory anyway: others of them that it reads.
        read: what a backward's kernels read.
    """
    table = line.joint.storages
    graph = nx.DiGraph()
    graph.add_nodes_from((SOURCE, SINK))
    for node, read_by_it in sources.items():
        # What leaves the span is held anyway; among equals few values are better.
        nbytes = 0 if node in span.leaving else table.total(table.of_node[node])
        graph.add_edge((node, "in"), (node, "out"), capacity=1 + nbytes)
        mutated = line.joint.mutated.intersection(bases(node.all_input_nodes, kinds))
        if kinds[node] is not Kind.POINTWISE or mutated:
            graph.add_edge(SOURCE, (node, "in"))
            continue
        for source in read_by_it:
            graph.add_edge((source, "out"), (node, "in"))
    for node in read & sources.keys():
        graph.add_edge((node, "out"), SINK)
    # Of equal cuts this is the one next to the readers.
    _, (far, _) = nx.minimum_cut(graph, SOURCE, SINK)
    return {n for n in sources if ((n, "in") in far) != ((n, "out") in far)}


def roots_of(
    again: Set[fx.Node], span: Span, kinds: Mapping[fx.Node, Kind]
) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """What each value of ``again`` is computed from, that is not of ``again`` itself."""
    roots: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for node in span.forward:
        if node in again:
            roots[node] = tuple(read_by(node, roots, kinds))
    return roots


def read_by(
    node: fx.Node, roots: Mapping[fx.Node, tuple[fx.Node, ...]], kinds: Mapping[fx.Node, Kind]
) -> dict[fx.Node, None]:
    """What running ``node`` reads, where it computes for itself what has ``roots``.

    Views are left out: it is what they look at.
    """
    read = bases(node.all_input_nodes, kinds)
    return dict.fromkeys(root for source in read for root in roots.get(source, (source,)))


def sources_first(
    wanted: Iterable[fx.Node], is_inside: Callable[[fx.Node], bool]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """What ``wanted`` need: nodes inside, each after all that it reads, and what these read."""
    order: list[fx.Node] = []
    others: list[fx.Node] = []
    seen: set[fx.Node] = set()
    waiting: list[tuple[fx.Node, bool]] = [(n, False) for n in reversed([*wanted])]
    while waiting:
        node, is_ready = waiting.pop()
        if is_ready:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            if is_inside(node):
                waiting.append((node, True))
                waiting += [(n, False) for n in reversed(node.all_input_nodes)]
            else:
                others.append(node)
    return order, others


def bases(nodes: Iterable[fx.Node], kinds: Mapping[fx.Node, Kind]) -> Iterator[fx.Node]:
    """What ``nodes`` are, or look at."""
    for node in nodes:
        while kinds.get(node) is Kind.VIEW and node.all_input_nodes:
            node = node.all_input_nodes[0]
        yield node
