"""What becomes one operation of the new graph, in which order, and what is asked of it."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import fx

from fxremat.passes.fuse.again import bases, computed_again, read_by, roots_of
from fxremat.passes.fuse.groups import group
from fxremat.passes.fuse.kinds import Kind, kinds_of
from fxremat.passes.fuse.parts import Part, parts_of
from fxremat.passes.fuse.spans import spans_of
from fxremat.passes.joint import rng
from fxremat.passes.joint.storage import is_tensor
from fxremat.passes.stages.linearize import Line

Roots = Mapping[fx.Node, tuple[fx.Node, ...]]

LEAST_OPERATIONS = 2
"""An operation alone runs as torch runs it."""

aten = torch.ops.aten

CONTIGUOUS = {aten.mm.default, aten.bmm.default, aten.addmm.default}
"""Operations whose results lie one way, whatever they are given."""


@dataclass(eq=False, slots=True)
class Item:
    """What becomes one operation of the graph, or a view.

    Attributes:
        nodes: what it computes, in order.
        roots: of what it computes for itself though others do: what each is computed from.
        fused: it becomes a unit.
        given: values that are asked of it; none where nobody needs it.
    """

    nodes: list[fx.Node]
    roots: Roots = field(default_factory=dict)
    fused: bool = False
    given: dict[fx.Node, None] = field(default_factory=dict)


class Items:
    """All operations of a line.

    Attributes:
        line: of which.
        kinds: of its operations.
        ordered: each after all that it reads, else as the graph has them; random draws in
            their order.
    """

    def __init__(self, line: Line) -> None:
        self.line = line
        self.kinds = kinds_of(line.joint)
        self._all = self._found()
        self._item_of = {n: item for item in self._all for n in item.nodes}
        self.ordered = self._ordered()
        self._ask()

    def looked_at(self, node: fx.Node) -> fx.Node | None:
        """What a view looks at, where that surely lies in memory as it was traced."""
        if self.kinds.get(node) is not Kind.VIEW or not is_tensor(node):
            return None
        (base,) = bases([node], self.kinds)
        if not is_tensor(base) or base.meta["val"].dtype != node.meta["val"].dtype:
            return None
        return base if self.is_sure(base) else None

    def is_sure(self, node: fx.Node) -> bool:
        """Whether a value surely lies in memory as it was traced."""
        item = self._item_of.get(node)
        made = item is not None and (item.fused or node.target in CONTIGUOUS)
        return made or node in self.line.joint.given

    def _found(self) -> list[Item]:
        """All operations, grouped."""
        joint = self.line.joint
        parts = parts_of(joint, self.kinds)
        items: list[Item] = []
        for span in spans_of(self.line, self.kinds):
            again = computed_again(self.line, span, self.kinds)
            roots = roots_of(again, span, self.kinds)
            items += self._grouped(span.forward, {}, parts)
            items += self._grouped(span.backward, roots, parts)
        grouped = {n for item in items for n in item.nodes}
        rest = (*joint.forward, *joint.backward)
        return items + [Item([n]) for n in rest if n not in grouped]

    def _grouped(
        self, nodes: Sequence[fx.Node], roots: Roots, parts: Mapping[fx.Node, Part]
    ) -> Iterator[Item]:
        table, given = self.line.joint.storages, self.line.joint.given
        groups = group(
            nodes,
            self.kinds,
            lambda n: read_by(n, roots, self.kinds),
            shared=lambda n: n not in given,
            nbytes=lambda n: table.total(table.of_node[n]),
            parts=parts,
        )
        for own in groups:
            enough = sum(self.kinds[n].fuses for n in own) >= LEAST_OPERATIONS
            is_aten = getattr(own[0].target, "namespace", "") == "aten"
            lacks = any(n in roots for n in bases(own[0].all_input_nodes, self.kinds))
            if enough or not is_aten or lacks:
                yield Item(own, roots, fused=True)

    def _reads_of(self, item: Item, node: fx.Node) -> Iterable[fx.Node]:
        """What running ``node`` reads in ``item``: outside of units a look is at what is sure."""
        if item.fused:
            return read_by(node, item.roots, self.kinds)
        base = self.looked_at(node)
        return node.all_input_nodes if base is None else [base]

    def _ordered(self) -> list[Item]:
        order, joint = self.line.order, self.line.joint
        waits: dict[Item, set[Item]] = {}
        for item in self._all:
            read = (n for own in item.nodes for n in self._reads_of(item, own))
            waits[item] = {self._item_of[n] for n in read if n in self._item_of} - {item}
        draws = [n for n in (*joint.forward, *joint.backward) if rng.is_state(n) or rng.draws(n)]
        for before, after in pairwise(draws):
            waits[self._item_of[after]].add(self._item_of[before])
        readers: dict[Item, list[Item]] = {item: [] for item in self._all}
        for item, sources in waits.items():
            for source in sources:
                readers[source].append(item)
        place = {
            item: (max(order[n] for n in item.nodes), number)
            for number, item in enumerate(self._all)
        }
        left = {item: len(sources) for item, sources in waits.items()}
        ready = [place[item] for item in self._all if not left[item]]
        heapq.heapify(ready)
        found = []
        while ready:
            item = self._all[heapq.heappop(ready)[1]]
            found.append(item)
            for reader in readers[item]:
                left[reader] -= 1
                if not left[reader]:
                    heapq.heappush(ready, place[reader])
        assert len(found) == len(self._all), "units wait for each other"
        return found

    def _ask(self) -> None:
        """Find what is asked of each item: nothing of those that nobody needs."""
        joint = self.line.joint
        for node in (*joint.forward_outputs, *joint.backward_outputs):
            if isinstance(node, fx.Node):
                self._give(node)
        for item in reversed(self.ordered):
            if not item.fused and (item.given or rng.draws(item.nodes[0])):
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
                        self._give(source)

    def _give(self, node: fx.Node) -> None:
        item = self._item_of.get(node)
        if item is not None:
            item.given.setdefault(node)
