"""Which values of a stage's forward its backward computes for itself.

A kernel that reads a value can as well read what the value is computed from, element by element,
and compute it on the way: that takes no memory and hardly any time. So of all that a backward
reads of its stage, the least bytes are chosen that give the rest: a minimum cut, as in the min-cut
partitioner of AOTAutograd, but within a stage, and of what kernels read alone.

A product of the backward reads what its forward did, such as the output of an activation. Where a
kernel of the same stage's backward reads what that is computed from anyway, it can write it as
well: the value is not held from forward to backward, for one write to memory. AOTAutograd's
partitioner does the same at any ``activation_memory_budget`` below 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set

import networkx as nx
import torch
from torch import fx

from fxremat import torch_compat
from fxremat.passes.fuse.groups import Span, spans_of
from fxremat.passes.fuse.kinds import Kind, Kinds, bases, kinds_of
from fxremat.passes.joint.graph import add_call, fake_result, tensors_of
from fxremat.passes.stages.linearize import Line

aten = torch.ops.aten

SOURCE, SINK = "given", "read"

SLOW = {aten.cat.default}
"""Pointwise operations that no reader computes for itself: for each element a kernel would look
for the input that has it, and take up to twice as long as it does where the result is in memory.
"""

Roots = Mapping[fx.Node, tuple[fx.Node, ...]]
"""Values that readers compute for themselves, and what each is computed from."""


def computed_again(
    line: Line, span: Span, kinds: Kinds, *, kept: Set[fx.Node] | None = None
) -> frozenset[fx.Node]:
    """Forward values of ``span`` that its backward need not be given.

    Args:
        line: the step.
        span: of it.
        kinds: of its operations.
        kept: values that are in memory anyway; ``None``: all that operations that run alone read.
    """
    own = {n for n in span.forward if kinds[n] is not Kind.VIEW}
    there = line.pinned | (kept or set())
    read: set[fx.Node] = set()
    for reader in span.backward:
        found = own.intersection(bases(reader.all_input_nodes, kinds))
        if kinds[reader].fuses or (kept is not None and kinds[reader] is Kind.ALONE):
            read |= found
        elif kinds[reader] is not Kind.VIEW:
            there = there | found
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
    kinds: Kinds,
    *,
    sources: Mapping[fx.Node, Set[fx.Node]],
    read: Set[fx.Node],
) -> set[fx.Node]:
    """The least bytes that all of ``read`` can be computed from.

    ``sources`` are those of each value that is not in memory anyway.
    """
    table = line.joint.storages
    graph = nx.DiGraph()
    graph.add_nodes_from((SOURCE, SINK))
    for node, read_by_it in sources.items():
        # What leaves the span is held anyway; among equals few values are better.
        nbytes = 0 if node in span.leaving else table.total(table.of_node[node])
        graph.add_edge((node, "in"), (node, "out"), capacity=1 + nbytes)
        mutated = line.joint.mutated.intersection(bases(node.all_input_nodes, kinds))
        if kinds[node] is not Kind.POINTWISE or mutated or node.target in SLOW:
            graph.add_edge(SOURCE, (node, "in"))
            continue
        for source in read_by_it:
            graph.add_edge((source, "out"), (node, "in"))
    for node in read & sources.keys():
        graph.add_edge((node, "out"), SINK)
    # Of equal cuts this is the one next to the readers.
    _, (far, _) = nx.minimum_cut(graph, SOURCE, SINK)
    return {n for n in sources if ((n, "in") in far) != ((n, "out") in far)}


def roots_of(again: Set[fx.Node], span: Span, kinds: Kinds) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """What each value of ``again`` is computed from that is not in ``again`` itself."""
    roots: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for node in span.forward:
        if node in again:
            roots[node] = tuple(read_by(node, roots, kinds))
    return roots


def read_by(node: fx.Node, roots: Roots, kinds: Kinds) -> dict[fx.Node, None]:
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


def computed_twice(line: Line) -> fx.GraphModule:
    """The graph of ``line`` in which backwards compute values that their kernels can write.

    Ensures: every value has the operations that it had; nothing else is computed.
    """
    kinds = kinds_of(line.joint)
    old = line.joint.module.graph
    gradients = {*line.joint.backward, *line.joint.tangents}
    graph, values = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(old, values))
    graph.output_node().meta = dict(old.output_node().meta)
    mode = torch_compat.fake_mode_of(t for n in old.nodes for t in tensors_of(n))
    twice: dict[fx.Node, fx.Node] = {}
    readers: dict[fx.Node, frozenset[fx.Node]] = {}
    for span in spans_of(line, kinds):
        again = _writable(line, span, kinds, gradients)
        readers |= {n: again for n in span.backward if kinds[n] is Kind.ALONE}
    for reader in old.nodes:
        again = readers.get(reader, frozenset())
        if again.isdisjoint(bases(reader.all_input_nodes, kinds)):
            continue
        is_again = lambda n, again=again: not again.isdisjoint(bases([n], kinds))
        needed, given = sources_first(reader.all_input_nodes, is_again)
        found = {n: values[n] for n in given}
        with graph.inserting_before(values[reader]):
            for node in needed:
                if node not in twice:
                    call = (node.target, node.args, node.kwargs)
                    made = twice[node] = add_call(graph, call, found, f"{node.name}_twice")
                    made.meta = dict(node.meta) | {"partitioner_tag": "is_backward"}
                    made.meta["val"] = fake_result((made.target, made.args, made.kwargs), mode)
                found[node] = twice[node]
        values[reader].args = fx.node.map_arg(reader.args, found.__getitem__)
        values[reader].kwargs = fx.node.map_arg(reader.kwargs, found.__getitem__)
    graph.lint()
    return torch_compat.graph_module(line.joint.module, graph)


def _writable(
    line: Line,
    span: Span,
    kinds: Kinds,
    gradients: Set[fx.Node],
) -> frozenset[fx.Node]:
    """What ``span``'s backward need not be given, as a kernel of it can write it in time.

    That is a kernel of gradients that reads what the value needs, and needs no reader of it.
    """
    kept: set[fx.Node] = set()
    readers = [n for n in span.backward if kinds[n] is Kind.ALONE]
    while True:
        again = computed_again(line, span, kinds, kept=kept)
        roots = roots_of(again, span, kinds)
        kernels = {n: read_by(n, roots, kinds).keys() for n in span.backward if kinds[n].fuses}
        kernels = {n: read for n, read in kernels.items() if not gradients.isdisjoint(read)}
        late: set[fx.Node] = set()
        for reader in readers:
            found = again.intersection(bases(reader.all_input_nodes, kinds))
            after = _depending(reader, span.backward) if found else set[fx.Node]()
            for value in found:
                needed = set(roots[value]) - line.joint.given
                if all(n in after or needed.isdisjoint(read) for n, read in kernels.items()):
                    late.add(value)
        if not late:
            return again
        kept |= late


def _depending(source: fx.Node, nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The ones of ``nodes``, which are in order, that depend on ``source``."""
    found = {source}
    for node in nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found
