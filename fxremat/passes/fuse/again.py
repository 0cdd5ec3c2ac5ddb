"""Choose which values of a stage's forward its backward computes again inside of kernels.

A kernel that reads a value can instead read what the value is computed from, element by element,
and compute it on the way. This takes no memory and hardly any time. So of all that a backward reads
of its stage, the least bytes are kept from which the rest can be computed: a minimum cut, as in the
min-cut partitioner of AOTAutograd, but within a stage, and only of what kernels read.

A matrix product of the backward reads what its forward did, such as the output of an activation. If
a kernel of the same stage's backward reads what that is computed from anyway, it can also write
that output. The value is then not held from forward to backward, for one write to memory.
AOTAutograd's partitioner does the same at any ``activation_memory_budget`` below 1.
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
"""Pointwise operations that no reader repeats: for each element a kernel would search for the input
that has it, and take up to twice as long as with the result in memory."""

Roots = Mapping[fx.Node, tuple[fx.Node, ...]]
"""Values that readers compute themselves, and what each is computed from."""


def computed_again(
    line: Line, span: Span, kinds: Kinds, *, kept: Set[fx.Node] | None = None
) -> frozenset[fx.Node]:
    """Return the forward values of ``span`` that its backward recomputes inside of kernels.

    ``kept`` are values that are in memory anyway; ``None``: all that unfused operations read.
    """
    values = {n for n in span.forward if kinds[n] is not Kind.VIEW}
    in_memory = line.pinned | (kept or set())
    read: set[fx.Node] = set()
    for reader in span.backward:
        inputs = values.intersection(bases(reader.all_input_nodes, kinds))
        if kinds[reader].fuses or (kept is not None and kinds[reader] is Kind.ALONE):
            read |= inputs
        elif kinds[reader] is not Kind.VIEW:
            in_memory = in_memory | inputs
    sources = {n: values.intersection(bases(n.all_input_nodes, kinds)) - in_memory for n in values}
    computed = {n: sources[n] for n in values - in_memory}
    held = _least_kept(line, span, kinds, sources=computed, read=read)
    again: set[fx.Node] = set()
    waiting = list(read - in_memory - held)
    while waiting:
        node = waiting.pop()
        if node not in again:
            again.add(node)
            waiting += sources[node] - held
    return frozenset(again)


def _least_kept(
    line: Line,
    span: Span,
    kinds: Kinds,
    *,
    sources: Mapping[fx.Node, Set[fx.Node]],
    read: Set[fx.Node],
) -> set[fx.Node]:
    """Return the values with the fewest bytes from which all of ``read`` can be computed.

    ``sources`` has, for each value that is not in memory anyway, those values of the span that it
    is computed from and that are not in memory anyway either.
    """
    table = line.joint.storages
    graph = nx.DiGraph()
    graph.add_nodes_from((SOURCE, SINK))
    for node, read_by_it in sources.items():
        # What leaves the span is held anyway; of equal cuts, the one of fewer values is better.
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
    # Of equal cuts this is the one closest to the readers.
    _, (far, _) = nx.minimum_cut(graph, SOURCE, SINK)
    return {n for n in sources if ((n, "in") in far) != ((n, "out") in far)}


def roots_of(again: Set[fx.Node], span: Span, kinds: Kinds) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """Return, for each value of ``again``, the values outside of ``again`` that it follows from."""
    roots: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for node in span.forward:
        if node in again:
            roots[node] = tuple(read_by(node, roots, kinds))
    return roots


def read_by(node: fx.Node, roots: Roots, kinds: Kinds) -> dict[fx.Node, None]:
    """Return what ``node`` reads if it computes the values in ``roots`` itself, as keys of a dict.

    Views are replaced by what they are views of.
    """
    read = bases(node.all_input_nodes, kinds)
    return dict.fromkeys(root for source in read for root in roots.get(source, (source,)))


def sources_first(
    wanted: Iterable[fx.Node], is_inside: Callable[[fx.Node], bool]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the nodes inside that ``wanted`` depend on, and the nodes outside that these read.

    Args:
        wanted: nodes, each of which is in one of the two lists itself.
        is_inside: returns whether a node is inside. The search ends at nodes outside.

    The first list is in the order in which the nodes can run.
    """
    order: list[fx.Node] = []
    others: list[fx.Node] = []
    visited: set[fx.Node] = set()
    waiting: list[tuple[fx.Node, bool]] = [(n, False) for n in reversed([*wanted])]
    while waiting:
        node, is_ready = waiting.pop()
        if is_ready:
            order.append(node)
        elif node not in visited:
            visited.add(node)
            if is_inside(node):
                waiting.append((node, True))
                waiting += [(n, False) for n in reversed(node.all_input_nodes)]
            else:
                others.append(node)
    return order, others


def computed_twice(line: Line) -> fx.GraphModule:
    """Return the graph of ``line`` in which the backward computes some forward values again.

    They are read by unfused operations of the backward, such as matrix products, and a kernel of
    the same span's backward can write them in passing.

    Ensures: every value is computed by the same operations as before; nothing else is computed.
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
        replaced = {n: values[n] for n in given}
        with graph.inserting_before(values[reader]):
            for node in needed:
                if node not in twice:
                    call = (node.target, node.args, node.kwargs)
                    made = twice[node] = add_call(graph, call, replaced, f"{node.name}_twice")
                    made.meta = dict(node.meta) | {"partitioner_tag": "is_backward"}
                    made.meta["val"] = fake_result((made.target, made.args, made.kwargs), mode)
                replaced[node] = twice[node]
        values[reader].args = fx.node.map_arg(reader.args, replaced.__getitem__)
        values[reader].kwargs = fx.node.map_arg(reader.kwargs, replaced.__getitem__)
    graph.lint()
    return torch_compat.graph_module(line.joint.module, graph)


def _writable(
    line: Line,
    span: Span,
    kinds: Kinds,
    gradients: Set[fx.Node],
) -> frozenset[fx.Node]:
    """Return the forward values that ``span``'s backward can recompute before they are read.

    A value is one of them if some kernel can write it before any unfused operation reads it: the
    kernel reads one of ``gradients``, which are tangents and values of the backward, reads all that
    the value is computed from, and depends on no unfused operation that reads the value.
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
            inputs = again.intersection(bases(reader.all_input_nodes, kinds))
            after = _depending(reader, span.backward) if inputs else set[fx.Node]()
            for value in inputs:
                needed = set(roots[value]) - line.joint.given
                if all(n in after or needed.isdisjoint(read) for n, read in kernels.items()):
                    late.add(value)
        if not late:
            return again
        kept |= late


def _depending(source: fx.Node, nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return ``source`` and all of ``nodes``, which are in order, that depend on it."""
    depending = {source}
    for node in nodes:
        if not depending.isdisjoint(node.all_input_nodes):
            depending.add(node)
    return depending
