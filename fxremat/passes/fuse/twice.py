"""Values that a kernel of the backward writes, so that they need not be kept for it.

A product of the backward reads what its forward did, such as the output of an activation. Where a
kernel of the same stage's backward reads what that is computed from anyway, it can write it as
well: the value is not held from forward to backward, for one write to memory. AOTAutograd's
partitioner does the same at any ``activation_memory_budget`` below 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.passes.fuse.again import bases, computed_again, read_by, roots_of, sources_first
from fxremat.passes.fuse.kinds import Kind, kinds_of
from fxremat.passes.fuse.spans import Span, spans_of
from fxremat.passes.joint.storage import tensors_of
from fxremat.passes.stages.linearize import Line


def computed_twice(line: Line) -> fx.GraphModule:
    """The graph of ``line`` in which backwards compute such values themselves.

    Ensures: every value has the operations that it had; nothing else is computed.
    """
    kinds = kinds_of(line.joint)
    graph = line.joint.module.graph
    nodes = list(graph.nodes)
    mode = torch_compat.fake_mode_of(t for n in nodes for t in tensors_of(n))
    gradients = {*line.joint.backward, *line.joint.tangents}
    twice: dict[fx.Node, frozenset[fx.Node]] = {}
    for span in spans_of(line, kinds):
        again = _writable(line, span, kinds, gradients)
        for node in span.backward:
            reads = bases(node.all_input_nodes, kinds)
            if kinds[node] is Kind.ALONE and not again.isdisjoint(reads):
                twice[node] = again
    return _Writer(kinds, mode).write(line, nodes, twice)


def _writable(
    line: Line,
    span: Span,
    kinds: Mapping[fx.Node, Kind],
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
    """Those of ``nodes``, in order, that need ``source``."""
    found = {source}
    for node in nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


class _Writer:
    """Copies the graph, with more operations before those that read what is computed twice."""

    def __init__(self, kinds: Mapping[fx.Node, Kind], mode: Any) -> None:
        self._kinds = kinds
        self._mode = mode
        self._graph = fx.Graph()
        self._values: dict[fx.Node, fx.Node] = {}
        self._twice: dict[fx.Node, fx.Node] = {}

    def write(
        self,
        line: Line,
        nodes: Iterable[fx.Node],
        twice: Mapping[fx.Node, frozenset[fx.Node]],
    ) -> fx.GraphModule:
        """The graph with ``twice``: of who reads them, the values."""
        for node in nodes:
            if node.op == "output":
                output = self._graph.output(fx.node.map_arg(node.args[0], self._values.__getitem__))
                output.meta = dict(node.meta)
                continue
            again = twice.get(node, frozenset())
            new = self._sources(node, again)
            made = self._graph.node_copy(node, new.__getitem__)
            made.meta = dict(node.meta)
            self._values[node] = made
        self._graph.lint()
        return torch_compat.graph_module(line.joint.module, self._graph)

    def _sources(self, reader: fx.Node, again: frozenset[fx.Node]) -> dict[fx.Node, fx.Node]:
        """What ``reader`` reads: the values that are there, or the same computed once more."""
        values = dict.fromkeys(reader.all_input_nodes)
        needed, given = sources_first(
            values, lambda n: not again.isdisjoint(bases([n], self._kinds))
        )
        found = {n: self._values[n] for n in given}
        for node in needed:
            if node not in self._twice:
                self._twice[node] = self._once_more(node, found)
            found[node] = self._twice[node]
        return found

    def _once_more(self, node: fx.Node, sources: Mapping[fx.Node, fx.Node]) -> fx.Node:
        made = self._graph.create_node(
            "call_function",
            node.target,
            fx.node.map_arg(node.args, sources.__getitem__),
            fx.node.map_arg(node.kwargs, sources.__getitem__),
            name=f"{node.name}_twice",
        )
        made.meta = dict(node.meta) | {"partitioner_tag": "is_backward"}
        made.meta["val"] = self._run(made)
        return made

    def _run(self, made: fx.Node) -> Any:
        """Its value, without data."""
        target: Any = made.target

        def value_of(node: fx.Node) -> Any:
            return node.meta["val"]

        with self._mode, torch.no_grad():
            return target(
                *fx.node.map_arg(made.args, value_of), **fx.node.map_arg(made.kwargs, value_of)
            )
