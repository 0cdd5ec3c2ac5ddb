"""The joint graph with units in place of what they compute."""

from __future__ import annotations

import hashlib
import heapq
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.passes.fuse.again import bases, computed_again
from fxremat.passes.fuse.groups import group
from fxremat.passes.fuse.kinds import Kind, kinds_of
from fxremat.passes.fuse.regions import regions_of
from fxremat.passes.fuse.unit import Input, Unit
from fxremat.passes.joint import rng
from fxremat.passes.joint.digest import written
from fxremat.passes.joint.graph import JointGraph
from fxremat.passes.joint.position import locate
from fxremat.passes.joint.sizes import LAYOUTS, Size, difference, layouts_of, names_in
from fxremat.passes.joint.storage import is_tensor
from fxremat.passes.stages.linearize import Line
from fxremat.runtime.views import look

NOTHING: frozenset[fx.Node] = frozenset()

LEAST_OPERATIONS = 2
"""An operation alone runs as torch runs it."""


@dataclass(eq=False, slots=True)
class _Item:
    """What becomes one operation of the graph, or a view.

    Attributes:
        nodes: what it computes, in order.
        again: what it computes for itself of what others compute, too.
        fused: it becomes a unit.
        given: values that are asked of it.
    """

    nodes: list[fx.Node]
    again: frozenset[fx.Node] = frozenset()
    fused: bool = False
    given: dict[fx.Node, None] = field(default_factory=dict)


class Units:
    """All units of a process' graphs, or of one graph: equal ones are one."""

    def __init__(self) -> None:
        self._units: dict[str, Unit] = {}

    def __iter__(self) -> Iterator[Unit]:
        yield from self._units.values()

    def __len__(self) -> int:
        return len(self._units)

    def of(self, graph: fx.Graph, sure: Sequence[bool], device: torch.device) -> Unit:
        """The unit that runs ``graph``.

        Args:
            graph: operations.
            sure: which of its inputs surely lie as traced.
            device: of all tensors.
        """
        lines = [repr(list(sure))]
        number: dict[fx.Node, int] = {}
        names: dict[str, int] = {}
        operations = []
        for node in graph.nodes:
            number[node] = len(number)
            layouts = tuple(map(repr, layouts_of(node))) if node.op != "output" else ()
            dtypes = [str(t.dtype) for t in _tensors(node)]
            args = written((node.args, dict(node.kwargs)), lambda n: f"%{number[n]}")
            lines.append(f"{node.op} {_target(node)} {args} {layouts} {dtypes}")
            names.update(names_in((node.args, node.kwargs)))
            for layout in layouts_of(node) if node.op != "output" else ():
                names.update(names_in(layout.numbers))
            if node.op == "call_function" and node.target is not operator.getitem:
                operations.append(str(node.target).split(".")[1])
        digest = hashlib.sha256("\n".join([str(device), *lines]).encode()).hexdigest()
        if digest not in self._units:
            told = list(dict.fromkeys(operations))
            name = "_".join(["fused", *told[:MOST_NAMES], digest[:6]])
            places = [n for n in graph.nodes if n.op == "placeholder"]
            inputs = [
                Input(layouts_of(n)[0], n.meta["val"].dtype, own)
                for n, own in zip(places, sure, strict=True)
            ]
            self._units[digest] = Unit(name, graph, inputs, names, device)
        return self._units[digest]


CONTIGUOUS = {
    torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default,
}  # fmt: skip
"""Operations whose results lie one way, whatever they are given."""

MOST_NAMES = 4
"""Operations that the name of a unit has."""


def _target(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_function" else node.op


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    items = value if isinstance(value, (tuple, list)) else (value,)
    return [t for t in items if isinstance(t, torch.Tensor)]


def fuse(line: Line, units: Units) -> fx.GraphModule:
    """The graph of ``line`` with units.

    Args:
        line: the step, as it was traced with operations taken apart.
        units: those that exist; new ones are added.

    Ensures: no unit crosses a cut of ``line``; every tensor that is left has the layout it had.
    """
    return _Fuser(line, units).module()


class _Fuser:
    def __init__(self, line: Line, units: Units) -> None:
        self._line = line
        self._joint = line.joint
        self._units = units
        self._kinds = kinds_of(line.joint)
        self._once = _run_once(line.joint)
        self._items = self._all_items()
        self._item_of = {n: item for item in self._items for n in item.nodes}

    def _all_items(self) -> list[_Item]:
        """All operations, grouped."""
        items: list[_Item] = []
        for region in regions_of(self._line, self._kinds):
            again = computed_again(self._line, region, self._kinds)
            for nodes, inside in ((region.forward, NOTHING), (region.backward, again)):
                items += self._grouped(nodes, inside)
        grouped = {n for item in items for n in item.nodes}
        rest = (*self._joint.forward, *self._joint.backward)
        items += [_Item([n]) for n in rest if n not in grouped]
        return items

    def _grouped(self, nodes: Sequence[fx.Node], again: frozenset[fx.Node]) -> list[_Item]:
        table, given = self._joint.storages, self._joint.given

        def sources(node: fx.Node) -> list[fx.Node]:
            return list(dict.fromkeys(self._reads(node, again)))

        groups = group(
            nodes,
            self._kinds,
            sources,
            shared=lambda n: n not in given,
            nbytes=lambda n: table.total(table.of_node[n]),
            once=self._once,
        )
        return [
            _Item(own, again, fused=True)
            for own in groups
            if sum(self._kinds[n].fuses for n in own) >= LEAST_OPERATIONS
            or not _is_aten(own[0])
            or any(n in again for source in own[0].all_input_nodes for n in bases([source], self._kinds))
        ]

    def _reads(self, node: fx.Node, again: frozenset[fx.Node]) -> Iterator[fx.Node]:
        """What running ``node`` in a unit reads, views and what is computed again left out."""
        for source in bases(node.all_input_nodes, self._kinds):
            if source in again:
                yield from self._reads(source, again)
            else:
                yield source

    def _reads_alone(self, node: fx.Node) -> Sequence[fx.Node]:
        """What ``node`` reads outside of units: a look at what surely lies as traced is one."""
        base = self._looked_at(node)
        return [base] if base is not None else node.all_input_nodes

    def _looked_at(self, node: fx.Node) -> fx.Node | None:
        """What a view looks at, where that surely lies in memory as it was traced."""
        if self._kinds.get(node) is not Kind.VIEW or not is_tensor(node):
            return None
        (base,) = bases([node], self._kinds)
        if not is_tensor(base) or base.meta["val"].dtype != node.meta["val"].dtype:
            return None
        return base if self._is_sure(base) else None

    def _is_sure(self, node: fx.Node) -> bool:
        """Whether a value surely lies in memory as it was traced."""
        item = self._item_of.get(node)
        made = item is not None and (item.fused or node.target in CONTIGUOUS)
        return made or node in self._joint.given

    def module(self) -> fx.GraphModule:
        """The graph."""
        ordered = self._ordered()
        self._ask(ordered)
        looks = {}
        for item in ordered:
            base = None if item.fused else self._looked_at(item.nodes[0])
            if base is not None:
                looks[item.nodes[0]] = base
        numbers = self._numbers(ordered)
        sure = {n for n in self._joint.module.graph.nodes if self._is_sure(n)}
        writer = _Writer(self._joint, self._kinds, self._units, numbers, looks, sure)
        return writer.write(ordered)

    def _sources(self, item: _Item) -> Iterator[_Item]:
        for node in item.nodes:
            if item.fused:
                found: Iterable[fx.Node] = self._reads(node, item.again)
            else:
                found = self._reads_alone(node)
            for source in found:
                other = self._item_of.get(source)
                if other is not None and other is not item:
                    yield other

    def _ordered(self) -> list[_Item]:
        """Each after all that it reads, else as the graph has them."""
        order = self._line.order
        place = {item: max(order[n] for n in item.nodes) for item in self._items}
        waits = {item: set(self._sources(item)) for item in self._items}
        readers: dict[_Item, list[_Item]] = {item: [] for item in self._items}
        for item, sources in waits.items():
            for source in sources:
                readers[source].append(item)
        left = {item: len(sources) for item, sources in waits.items()}
        ready = [(place[item], i, item) for i, item in enumerate(self._items) if not left[item]]
        number = {item: i for i, item in enumerate(self._items)}
        heapq.heapify(ready)
        found = []
        while ready:
            _, _, item = heapq.heappop(ready)
            found.append(item)
            for reader in readers[item]:
                left[reader] -= 1
                if not left[reader]:
                    heapq.heappush(ready, (place[reader], number[reader], reader))
        assert len(found) == len(self._items), "units wait for each other"
        return found

    def _ask(self, ordered: Sequence[_Item]) -> None:
        """Find what is asked of each item; nothing of those that nobody needs."""
        results = (*self._joint.forward_outputs, *self._joint.backward_outputs)
        for node in results:
            if isinstance(node, fx.Node):
                self._give(node)
        for item in reversed(ordered):
            draws = not item.fused and rng.draws(item.nodes[0])
            if not item.given and not draws:
                continue
            if not item.fused:
                item.given.setdefault(item.nodes[0])
                for source in self._reads_alone(item.nodes[0]):
                    self._give(source)
                continue
            inside: set[fx.Node] = set()
            waiting = list(item.given)
            while waiting:
                node = waiting.pop()
                if node in inside:
                    continue
                inside.add(node)
                for source in self._reads(node, item.again):
                    if self._item_of.get(source) is item:
                        waiting.append(source)
                    else:
                        self._give(source)

    def _give(self, node: fx.Node) -> None:
        item = self._item_of.get(node)
        if item is not None:
            item.given.setdefault(node)

    def _numbers(self, ordered: Sequence[_Item]) -> dict[_Item, int]:
        """Sequence numbers: a backward's is that of the operation it differentiates."""
        positions = locate(self._joint, views=self._line.views)
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


def _is_aten(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", "") == "aten"


def _run_once(joint: JointGraph) -> frozenset[fx.Node]:
    """New values of mutated inputs, and what leads to them alone: nothing computes them again.

    It could not: the old values are gone by then.
    """
    count = len(joint.mutated)
    mutations = {n for n in joint.forward_outputs[:count] if isinstance(n, fx.Node)}
    others = {n for n in joint.forward_outputs[count:] if isinstance(n, fx.Node)}
    once: set[fx.Node] = set()
    for node in reversed(joint.forward):
        users = [u for u in node.users if u.op != "output"]
        leads = users and all(u in once for u in users) and node not in others
        if leads or node in mutations:
            once.add(node)
    return frozenset(once)


class _Writer:
    """Writes the new graph."""

    def __init__(
        self,
        joint: JointGraph,
        kinds: Mapping[fx.Node, Kind],
        units: Units,
        numbers: Mapping[_Item, int],
        looks: Mapping[fx.Node, fx.Node],
        sure: Collection[fx.Node],
    ) -> None:
        self._joint = joint
        self._kinds = kinds
        self._units = units
        self._numbers = numbers
        self._looks = looks
        self._sure = sure
        self._graph = fx.Graph()
        self._values: dict[fx.Node, fx.Node] = {}

    def write(self, ordered: Sequence[_Item]) -> fx.GraphModule:
        """All of it."""
        old = self._joint.module.graph
        for node in old.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._copy(node)
        for item in ordered:
            if not item.given:
                continue
            if item.fused:
                self._unit(item)
            else:
                self._copy(item.nodes[0])
            for node in item.given:
                new = self._values[node]
                if item in self._numbers:
                    new.meta["seq_nr"] = self._numbers[item]
                    if item.fused and new.target is operator.getitem:
                        new.args[0].meta["seq_nr"] = self._numbers[item]  # type: ignore[union-attr]
        output = old.output_node()
        new = self._graph.output(fx.node.map_arg(output.args[0], self._values.__getitem__))
        new.meta = dict(output.meta)
        self._graph.lint()
        return torch_compat.graph_module(self._joint.module, self._graph)

    def _copy(self, node: fx.Node) -> None:
        if node in self._looks:
            base = self._looks[node]
            (layout,), (whole,) = layouts_of(node), layouts_of(base)
            place = ((*layout.shape,), (*layout.stride,), difference(layout.offset, whole.offset))
            args = (self._values[base], *place)
            self._values[node] = self._graph.create_node(
                "call_function", look, args, name=node.name
            )
        else:
            self._values[node] = self._graph.node_copy(node, self._values.__getitem__)
        self._values[node].meta = {k: v for k, v in node.meta.items() if k != "seq_nr"}

    def _unit(self, item: _Item) -> None:
        given = sorted(item.given, key=item.nodes.index)
        graph, inputs = _graph_of(item, given, self._kinds)
        unit = self._units.of(graph, [n in self._sure for n in inputs], self._joint.device)
        sizes = tuple(Size.named(name, hint) for name, hint in unit.hints.items())
        args = (*(self._values[n] for n in inputs), *sizes)
        made = self._graph.call_function(unit, args)  # type: ignore[arg-type]
        first = given[-1]
        made.meta = {k: v for k, v in first.meta.items() if k not in _OF_ONE}
        if len(given) == 1:
            made.meta |= {k: first.meta[k] for k in ("val", LAYOUTS) if k in first.meta}
            self._values[first] = made
            return
        made.meta["val"] = tuple(n.meta["val"] for n in given)
        if all(LAYOUTS in n.meta for n in given):
            made.meta[LAYOUTS] = tuple(n.meta[LAYOUTS][0] for n in given)
        for i, node in enumerate(given):
            pick = self._graph.call_function(operator.getitem, (made, i))
            pick.meta = {k: v for k, v in node.meta.items() if k != "seq_nr"}
            self._values[node] = pick


_OF_ONE = ("val", LAYOUTS, "tensor_meta", "desc", "seq_nr")


def _graph_of(
    item: _Item, given: Sequence[fx.Node], kinds: Mapping[fx.Node, Kind]
) -> tuple[fx.Graph, list[fx.Node]]:
    """A graph that gives ``given``, and what it takes."""
    inside = {*item.nodes, *item.again}
    order: list[fx.Node] = []
    seen: set[fx.Node] = set()
    inputs: dict[fx.Node, None] = {}
    waiting: list[tuple[fx.Node, bool]] = [(n, False) for n in reversed(given)]
    while waiting:
        node, ready = waiting.pop()
        if ready:
            order.append(node)
            continue
        if node in seen:
            continue
        seen.add(node)
        if node not in inside and kinds.get(node) is not Kind.VIEW:
            inputs[node] = None
            continue
        waiting.append((node, True))
        waiting += [(n, False) for n in reversed(node.all_input_nodes)]
    graph = fx.Graph()
    copied: dict[fx.Node, Any] = {}
    for i, node in enumerate(inputs):
        copied[node] = graph.placeholder(f"in{i}")
        copied[node].meta = {k: node.meta[k] for k in ("val", LAYOUTS) if k in node.meta}
    for node in order:
        copied[node] = graph.create_node(
            "call_function",
            node.target,
            fx.node.map_arg(node.args, copied.__getitem__),
            fx.node.map_arg(node.kwargs, copied.__getitem__),
        )
        copied[node].meta = {k: node.meta[k] for k in ("val", LAYOUTS) if k in node.meta}
    graph.output(tuple(copied[n] for n in given))
    return graph, list(inputs)
