"""The joint graph with units in place of what they compute."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from fxremat import torch_compat
from fxremat.passes.fuse.again import sources_first
from fxremat.passes.fuse.items import Item, Items
from fxremat.passes.fuse.kinds import Kind
from fxremat.passes.fuse.units import Units
from fxremat.passes.joint.position import locate
from fxremat.passes.joint.sizes import LAYOUTS, Size, difference, layouts_of
from fxremat.passes.stages.linearize import Line
from fxremat.runtime.views import look


def fuse(line: Line, units: Units) -> fx.GraphModule:
    """The graph of ``line`` with units.

    Args:
        line: the step, as it was traced with operations taken apart.
        units: those that exist; new ones are added.

    Ensures: no unit crosses a cut of ``line``; every tensor that is left has the layout it had;
        random draws keep their order.
    """
    return _Writer(Items(line), units).write()


def _numbers(line: Line, ordered: Sequence[Item]) -> dict[Item, int]:
    """Sequence numbers: a backward's is that of the operation it differentiates."""
    positions = locate(line.joint, views=line.views)
    forward = [i for i in ordered if i.given and i.nodes[0] in positions.forward]
    numbers = {item: i for i, item in enumerate(forward)}
    at: dict[int, int] = {}
    for item, number in numbers.items():
        for node in item.nodes:
            at[positions.forward[node]] = number
    known = -1
    filled = []
    for position in range(positions.count):
        known = max(known, at.get(position, known))
        filled.append(max(known, 0))
    for item in ordered:
        if item.nodes[0] in positions.backward:
            position = max(positions.backward[n] for n in item.nodes)
            numbers[item] = filled[position] if filled else 0
    return numbers


class _Writer:
    """Writes the new graph."""

    def __init__(self, items: Items, units: Units) -> None:
        self._items = items
        self._joint = items.line.joint
        self._units = units
        self._graph = fx.Graph()
        self._values: dict[fx.Node, fx.Node] = {}

    def write(self) -> fx.GraphModule:
        """All of it."""
        old = self._joint.module.graph
        for node in old.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._copy(node)
        numbers = _numbers(self._items.line, self._items.ordered)
        for item in self._items.ordered:
            if not item.given:
                continue
            made = self._unit(item) if item.fused else self._copy(item.nodes[0])
            if item in numbers:
                for new in (made, *(self._values[node] for node in item.given)):
                    new.meta["seq_nr"] = numbers[item]
        output = old.output_node()
        new = self._graph.output(fx.node.map_arg(output.args[0], self._values.__getitem__))
        new.meta = dict(output.meta)
        self._graph.lint()
        return torch_compat.graph_module(self._joint.module, self._graph)

    def _copy(self, node: fx.Node) -> fx.Node:
        """An operation as it is; a view of what surely lies as traced looks at it."""
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

    def _unit(self, item: Item) -> fx.Node:
        """A call of the unit that computes ``item``."""
        given = sorted(item.given, key=item.nodes.index)
        graph, inputs = _graph_of(item, given, self._items.kinds)
        sure = [self._items.is_sure(n) for n in inputs]
        unit = self._units.of(graph, sure, self._joint.device)
        sizes = (Size.named(name, hint) for name, hint in unit.hints.items())
        args = (*(self._values[n] for n in inputs), *sizes)
        made = self._graph.call_function(unit, args)  # type: ignore[arg-type]
        made.meta = {k: v for k, v in given[-1].meta.items() if k not in _OF_ONE}
        if len(given) == 1:
            made.meta |= _kept(given[0])
            self._values[given[0]] = made
            return made
        made.meta["val"] = tuple(n.meta["val"] for n in given)
        if all(LAYOUTS in n.meta for n in given):
            made.meta[LAYOUTS] = tuple(n.meta[LAYOUTS][0] for n in given)
        for i, node in enumerate(given):
            pick = self._graph.call_function(operator.getitem, (made, i))
            pick.meta = {k: v for k, v in node.meta.items() if k != "seq_nr"}
            self._values[node] = pick
        return made


_OF_ONE = ("val", LAYOUTS, "tensor_meta", "desc", "seq_nr")


def _kept(node: fx.Node) -> dict[str, Any]:
    """What is known of the tensors of a node."""
    return {k: node.meta[k] for k in ("val", LAYOUTS) if k in node.meta}


def _graph_of(
    item: Item, given: Sequence[fx.Node], kinds: Mapping[fx.Node, Kind]
) -> tuple[fx.Graph, list[fx.Node]]:
    """A graph that gives ``given``, and what it takes."""
    inside = {*item.nodes, *item.roots}
    order, inputs = sources_first(given, lambda n: n in inside or kinds.get(n) is Kind.VIEW)
    graph = fx.Graph()
    copied: dict[fx.Node, Any] = {}
    for i, node in enumerate(inputs):
        copied[node] = graph.placeholder(f"in{i}")
        copied[node].meta = _kept(node)
    for node in order:
        copied[node] = graph.create_node(
            "call_function",
            node.target,
            fx.node.map_arg(node.args, copied.__getitem__),
            fx.node.map_arg(node.kwargs, copied.__getitem__),
        )
        copied[node].meta = _kept(node)
    graph.output(tuple(copied[n] for n in given))
    return graph, inputs
