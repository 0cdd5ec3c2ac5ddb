"""Values that a kernel of the backward writes, so that they need not be kept for it.

A product of the backward reads what its forward did, such as the output of an activation. Where a
kernel of the same stage's backward reads what that is computed from anyway, it can write it as
well: the value is not held from forward to backward, for one write to memory. AOTAutograd's
partitioner does the same at any ``activation_memory_budget`` below 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.passes.fuse.again import bases, computed_again
from fxremat.passes.fuse.kinds import Kind, kinds_of
from fxremat.passes.fuse.regions import Region, regions_of
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
    twice: dict[fx.Node, frozenset[fx.Node]] = {}
    for region in regions_of(line, kinds):
        again = _writable(line, region, kinds)
        for node in region.backward:
            reads = bases(node.all_input_nodes, kinds)
            if kinds[node] is Kind.ALONE and not again.isdisjoint(reads):
                twice[node] = again
    return _Writer(kinds, mode).write(line, nodes, twice)


def _writable(line: Line, region: Region, kinds: Mapping[fx.Node, Kind]) -> frozenset[fx.Node]:
    """What ``region``'s backward need not be given, as a kernel of it can write it in time."""
    kept: set[fx.Node] = set()
    readers = [n for n in region.backward if kinds[n] is Kind.ALONE]
    while True:
        again = computed_again(line, region, kinds, kept=kept)
        late: set[fx.Node] = set()
        for reader in readers:
            found = again.intersection(bases(reader.all_input_nodes, kinds))
            after = _depending(reader, region.backward) if found else set[fx.Node]()
            late.update(
                n for n in found if not _is_read_beside(n, region, kinds, again, after, line)
            )
        if not late:
            return again
        kept |= late


def _is_read_beside(
    value: fx.Node,
    region: Region,
    kinds: Mapping[fx.Node, Kind],
    again: Set[fx.Node],
    after: Set[fx.Node],
    line: Line,
) -> bool:
    """Whether a kernel that does not come ``after`` its reader reads what ``value`` needs."""
    gradients = {*line.joint.backward, *line.joint.tangents}
    needed = set(_roots([value], kinds, again)) - line.joint.given
    for node in region.backward:
        if kinds[node].fuses and node not in after:
            own = set(_roots(bases(node.all_input_nodes, kinds), kinds, again))
            if not gradients.isdisjoint(own) and not needed.isdisjoint(own):
                return True
    return False


def _roots(
    values: Iterable[fx.Node], kinds: Mapping[fx.Node, Kind], again: Set[fx.Node]
) -> Iterator[fx.Node]:
    """What ``values`` are computed from, where those in ``again`` are computed."""
    for value in values:
        if value in again:
            yield from _roots(bases(value.all_input_nodes, kinds), kinds, again)
        else:
            yield value


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
            new = {s: self._value(s, again) for s in node.all_input_nodes}
            made = self._graph.node_copy(node, new.__getitem__)
            made.meta = dict(node.meta)
            self._values[node] = made
        self._graph.lint()
        return torch_compat.graph_module(line.joint.module, self._graph)

    def _value(self, node: fx.Node, again: frozenset[fx.Node]) -> fx.Node:
        """What stands for ``node``: itself, or the same computed once more."""
        if again.isdisjoint(bases([node], self._kinds)):
            return self._values[node]
        if node not in self._twice:
            new = {s: self._value(s, again) for s in node.all_input_nodes}
            made = self._graph.create_node(
                "call_function",
                node.target,
                fx.node.map_arg(node.args, new.__getitem__),
                fx.node.map_arg(node.kwargs, new.__getitem__),
                name=f"{node.name}_twice",
            )
            made.meta = dict(node.meta) | {"partitioner_tag": "is_backward"}
            made.meta["val"] = self._run(made)
            self._twice[node] = made
        return self._twice[node]

    def _run(self, made: fx.Node) -> Any:
        """Its value, without data."""
        target: Any = made.target

        def value_of(node: fx.Node) -> Any:
            return node.meta["val"]

        with self._mode, torch.no_grad():
            return target(
                *fx.node.map_arg(made.args, value_of), **fx.node.map_arg(made.kwargs, value_of)
            )
