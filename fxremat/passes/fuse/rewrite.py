"""Rewrite the joint graph with units in place of what they compute.

An item becomes one operation of the new graph: it is a group of operations that fuse, or a single
one. Items are ordered, and it is determined what is asked of each, before any is written.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import networkx as nx
import torch
from torch import fx

from fxremat import torch_compat
from fxremat.passes.fuse.again import Roots, computed_again, read_by, roots_of, sources_first
from fxremat.passes.fuse.groups import group, spans_of
from fxremat.passes.fuse.kinds import Kind, Kinds, Part, bases, kinds_of, parts_of
from fxremat.passes.fuse.unit import Unit, Units
from fxremat.passes.joint import rng
from fxremat.passes.joint.constraints import CONSTRAINT
from fxremat.passes.joint.graph import add_call, is_tensor
from fxremat.passes.joint.sizes import LAYOUTS, Size, difference, layouts_of
from fxremat.passes.stages.linearize import Line
from fxremat.passes.stages.position import locate
from fxremat.runtime.views import look

aten = torch.ops.aten

LEAST_OPERATIONS = 2
"""A single operation runs as torch runs it, unless it changes the layout of memory."""

CONTIGUOUS = {aten.mm.default, aten.bmm.default, aten.addmm.default}
"""Operations whose results have the same layout whatever they are given."""


def fuse(line: Line, units: Units) -> fx.GraphModule:
    """Return the graph of ``line`` with groups of operations replaced by units, which are compiled.

    ``units`` is the table of units; new ones are added.

    Ensures: no unit crosses a cut of ``line``; every remaining tensor has the layout it had; random
    draws keep their order.
    """
    return _Writer(_Items(line), units).write()


@dataclass(eq=False, slots=True)
class _Item:
    """Nodes that become one operation of the new graph: a unit, or a single operation or view.

    Attributes:
        nodes: the nodes, in order.
        roots: values that it recomputes, and what each is computed from.
        fused: whether it becomes a unit.
        given: values that others read; empty if nobody needs it.
    """

    nodes: list[fx.Node]
    roots: Roots = field(default_factory=dict)
    fused: bool = False
    given: dict[fx.Node, None] = field(default_factory=dict)


class _Items:
    """The operations of a line as items: each becomes one operation of the new graph.

    Attributes:
        line: the step.
        kinds: kinds of its operations.
        ordered: items, each after all that it reads, otherwise in the order of the graph; random
            draws keep their order.
    """

    def __init__(self, line: Line) -> None:
        self.line = line
        self.kinds = kinds_of(line.joint)
        self._all = self._build_items()
        self._item_of = {n: item for item in self._all for n in item.nodes}
        self.ordered = self._ordered()
        self._ask()

    def looked_at(self, node: fx.Node) -> fx.Node | None:
        """Return the node that ``node`` is a view of, or ``None``.

        It is also ``None`` if that node may have another layout than the traced one.
        """
        if self.kinds.get(node) is not Kind.VIEW or not is_tensor(node):
            return None
        (base,) = bases([node], self.kinds)
        if not is_tensor(base) or base.meta["val"].dtype != node.meta["val"].dtype:
            return None
        return base if self.is_sure(base) else None

    def is_sure(self, node: fx.Node) -> bool:
        """Return whether a value certainly has its traced layout when the graph runs."""
        item = self._item_of.get(node)
        made = item is not None and (item.fused or node.target in CONTIGUOUS)
        return made or node in self.line.joint.given

    def _build_items(self) -> list[_Item]:
        joint = self.line.joint
        parts = parts_of(joint, self.kinds)
        items: list[_Item] = []
        for span in spans_of(self.line, self.kinds):
            again = computed_again(self.line, span, self.kinds)
            roots = roots_of(again, span, self.kinds)
            items += self._grouped(span.forward, {}, parts)
            items += self._grouped(span.backward, roots, parts)
        grouped = {n for item in items for n in item.nodes}
        rest = (*joint.forward, *joint.backward)
        return items + [_Item([n]) for n in rest if n not in grouped]

    def _grouped(
        self, nodes: Sequence[fx.Node], roots: Roots, parts: Mapping[fx.Node, Part]
    ) -> Iterator[_Item]:
        table, given = self.line.joint.storages, self.line.joint.given
        groups = group(
            nodes,
            self.kinds,
            lambda n: read_by(n, roots, self.kinds),
            shared=lambda n: n not in given,
            nbytes=lambda n: table.total(table.of_node[n]),
            parts=parts,
        )
        for members in groups:
            first = members[0]
            several = sum(self.kinds[n].fuses for n in members) >= LEAST_OPERATIONS
            is_aten = getattr(first.target, "namespace", "") == "aten"
            lacks = any(n in roots for n in bases(first.all_input_nodes, self.kinds))
            if several or _transposes(first) or not is_aten or lacks:
                yield _Item(members, roots, fused=True)

    def _reads_of(self, item: _Item, node: fx.Node) -> Iterable[fx.Node]:
        """Return the nodes that ``node`` reads if it runs as a part of ``item``.

        Values that the item recomputes are replaced by what they are computed from. Outside of
        units, a view reads its base.
        """
        if item.fused:
            return read_by(node, item.roots, self.kinds)
        base = self.looked_at(node)
        return node.all_input_nodes if base is None else [base]

    def _ordered(self) -> list[_Item]:
        order, joint = self.line.order, self.line.joint
        after = nx.DiGraph()
        after.add_nodes_from(self._all)
        for item in self._all:
            read = (source for node in item.nodes for source in self._reads_of(item, node))
            sources = {self._item_of[n]: None for n in read if n in self._item_of}
            after.add_edges_from((source, item) for source in sources if source is not item)
        draws = [
            n for n in (*joint.forward, *joint.backward) if rng.is_state(n) or rng.has_effect(n)
        ]
        for one, other in pairwise(draws):
            after.add_edge(self._item_of[one], self._item_of[other])
        number = {item: i for i, item in enumerate(self._all)}
        return list(
            nx.lexicographical_topological_sort(
                after, key=lambda item: (max(order[n] for n in item.nodes), number[item])
            )
        )

    def _ask(self) -> None:
        """Fill ``given`` of each item with the values that other items or the step's users read."""
        for node in (*self.line.joint.results, *self.line.joint.gradients):
            self._ask_for(node)
        for item in reversed(self.ordered):
            if not item.fused and (item.given or rng.has_effect(item.nodes[0])):
                item.given.setdefault(item.nodes[0])
            inside: set[fx.Node] = set()
            waiting = list(item.given)
            while waiting:
                node = waiting.pop()
                if node in inside:
                    continue
                inside.add(node)
                for source in self._reads_of(item, node):
                    if self._item_of.get(source) is item:
                        waiting.append(source)
                    else:
                        self._ask_for(source)

    def _ask_for(self, node: fx.Node) -> None:
        item = self._item_of.get(node)
        if item is not None:
            item.given.setdefault(node)


def _transposes(node: fx.Node) -> bool:
    """Return whether ``node`` is a clone with another order of elements in memory.

    Kernels copy those in blocks.
    """
    if node.target is not aten.clone.default:
        return False
    source, made = (n.meta["val"] for n in (node.all_input_nodes[0], node))
    return bool(source.stride() != made.stride())


def _numbers(line: Line, ordered: Sequence[_Item]) -> dict[_Item, int]:
    """Return the ``seq_nr`` of each item; a backward item has that of what it differentiates."""
    positions = locate(line.joint, views=line.views)
    forward = [i for i in ordered if i.given and i.nodes[0] in positions.forward]
    numbers = {item: i for i, item in enumerate(forward)}
    at: dict[int, int] = {}
    for item, number in numbers.items():
        for node in item.nodes:
            at[positions.forward[node]] = number
    highest = -1
    filled = []
    for position in range(positions.count):
        highest = max(highest, at.get(position, highest))
        filled.append(max(highest, 0))
    for item in ordered:
        if item.nodes[0] in positions.backward:
            position = max(positions.backward[n] for n in item.nodes)
            numbers[item] = filled[position] if filled else 0
    return numbers


class _Writer:
    def __init__(self, items: _Items, units: Units) -> None:
        self._items = items
        self._joint = items.line.joint
        self._units = units
        self._graph = fx.Graph()
        self._values: dict[fx.Node, fx.Node] = {}

    def write(self) -> fx.GraphModule:
        old = self._joint.module.graph
        for node in old.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._copy(node)
        numbers = _numbers(self._items.line, self._items.ordered)
        for item in self._items.ordered:
            if not item.given:
                continue
            made = self._call_unit(item) if item.fused else self._copy(item.nodes[0])
            if item in numbers:
                for new in (made, *(self._values[node] for node in item.given)):
                    new.meta["seq_nr"] = numbers[item]
        output = old.output_node()
        new = self._graph.output(fx.node.map_arg(output.args[0], self._values.__getitem__))
        new.meta = dict(output.meta)
        self._graph.lint()
        return torch_compat.graph_module(self._joint.module, self._graph)

    def _copy(self, node: fx.Node) -> fx.Node:
        """Copy ``node`` to the new graph, and return the copy.

        A view whose base certainly has its traced layout becomes a view of this base.
        """
        base = self._items.looked_at(node)
        if base is not None:
            (layout,), (whole,) = layouts_of(node), layouts_of(base)
            place = ((*layout.shape,), (*layout.stride,), difference(layout.offset, whole.offset))
            args = (self._values[base], *place)
            new = self._graph.create_node("call_function", look, args, name=node.name)
        else:
            new = self._graph.node_copy(node, self._values.__getitem__)
        new.meta = {k: v for k, v in node.meta.items() if k != "seq_nr"}
        self._values[node] = new
        return new

    def _call_unit(self, item: _Item) -> fx.Node:
        given = sorted(item.given, key=item.nodes.index)
        graph, inputs = _graph_of(item, given, self._items.kinds)
        sure = [self._items.is_sure(n) for n in inputs]
        unit = self._units.of(graph, sure, self._joint.device)
        made, values = call_unit(self._graph, unit, [self._values[n] for n in inputs], given)
        self._values.update(values)
        return made


def call_unit(
    graph: fx.Graph, unit: Unit, inputs: Sequence[fx.Node], given: Sequence[fx.Node]
) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
    """Add a call of a unit to ``graph``; return its node, and a node for each of its results.

    Args:
        graph: it is changed.
        unit: it computes ``given``.
        inputs: the nodes of ``graph`` that the unit reads.
        given: the nodes that the results replace; they may be of another graph.
    """
    sizes = (Size.named(name, hint) for name, hint in unit.hints.items())
    made = graph.call_function(unit, (*inputs, *sizes))
    made.meta = {k: v for k, v in given[-1].meta.items() if k not in _PER_TENSOR}
    if len(given) == 1:
        made.meta |= _tensor_meta(given[0])
        return made, {given[0]: made}
    made.meta["val"] = tuple(n.meta["val"] for n in given)
    if all(LAYOUTS in n.meta for n in given):
        made.meta[LAYOUTS] = tuple(n.meta[LAYOUTS][0] for n in given)
    values: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(given):
        values[node] = graph.call_function(operator.getitem, (made, i))
        values[node].meta = {k: v for k, v in node.meta.items() if k != "seq_nr"}
    return made, values


_PER_TENSOR = ("val", LAYOUTS, CONSTRAINT, "tensor_meta", "desc", "seq_nr")


def _tensor_meta(node: fx.Node) -> dict[str, Any]:
    return {k: node.meta[k] for k in ("val", LAYOUTS, CONSTRAINT) if k in node.meta}


def _graph_of(
    item: _Item, given: Sequence[fx.Node], kinds: Kinds
) -> tuple[fx.Graph, list[fx.Node]]:
    """Return a graph that computes ``given``, values of ``item``, and the nodes that it reads."""
    inside = {*item.nodes, *item.roots}
    order, inputs = sources_first(given, lambda n: n in inside or kinds.get(n) is Kind.VIEW)
    graph = fx.Graph()
    copied: dict[fx.Node, Any] = {}
    for i, node in enumerate(inputs):
        copied[node] = graph.placeholder(f"in{i}")
        copied[node].meta = _tensor_meta(node)
    for node in order:
        copied[node] = add_call(graph, (node.target, node.args, node.kwargs), copied)
        copied[node].meta = _tensor_meta(node)
    graph.output(tuple(copied[n] for n in given))
    return graph, inputs
