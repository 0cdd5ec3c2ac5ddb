"""Group the operations on values whose sizes depend on data.

A group becomes one operation (:mod:`fxremat.passes.joint.data_sizes`), so no path may lead out of
it and back into it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.passes.joint.graph import backward_nodes, is_getitem, tensors_of


def is_number(node: fx.Node) -> bool:
    """Return whether the value of ``node`` is a number."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int))


def _is_index(node: fx.Node) -> bool:
    """Return whether ``node`` returns numbers, or tensors of whole numbers or truth values."""
    tensors = list(tensors_of(node)) if "val" in node.meta else []
    return is_number(node) or (
        bool(tensors) and not any(t.is_floating_point() or t.is_complex() for t in tensors)
    )


def is_check(node: fx.Node) -> bool:
    """Return whether ``node`` only checks a number."""
    return node.op == "call_function" and node.meta.get("val", 0) is None


class Grouping:
    """The groups of nodes that become one operation each.

    Args:
        graph: the joint graph.
        data: nodes with a value whose size depends on data, and numbers that do.
        forward_output_count: how many outputs belong to the forward.

    Attributes:
        graph, data: as given.
        group_of: the group of each node that is in one: a list of nodes that grows.
        draw_before: for each random draw, the one before it, which must stay before it.
    """

    def __init__(self, graph: fx.Graph, data: set[fx.Node], forward_output_count: int) -> None:
        self.graph, self.data = graph, data
        self.group_of: dict[fx.Node, list[fx.Node]] = {}
        draws = list(filter(torch_compat.draws_random_numbers, graph.nodes))
        self.draw_before = dict(zip(draws[1:], draws, strict=False))
        self._draw_after = dict(itertools.pairwise(draws))
        self._order = {node: i for i, node in enumerate(graph.nodes)}
        results: Any = graph.output_node().args[0]
        tangents = [n for n in graph.nodes if torch_compat.is_tangent(n)]
        self._backward = backward_nodes(graph, tangents, list(results)[:forward_output_count])

    def is_possible(self) -> bool:
        """Return whether all nodes that compute with such sizes can be in composites."""
        members = [*self.data, *(user for node in self.data for user in node.users)]
        return all(
            node.op == "call_function"
            and not torch_compat.is_collective(node)
            and not torch_compat.is_wait(node)
            and not torch_compat.is_higher_order(node.target)
            for node in members
        )

    def is_repeated(self, node: fx.Node) -> bool:
        """Return whether each group that reads ``node`` computes it by itself, at no cost.

        It is a number computed from numbers, or a view.
        """
        if node not in self.data:
            return False
        if is_number(node):
            return all(map(is_number, node.all_input_nodes))
        if is_getitem(node):
            return self.is_repeated(node.all_input_nodes[0])
        keys = [torch_compat.storage_key(t) for t in tensors_of(node)]
        read = (t for n in node.all_input_nodes for t in tensors_of(n))
        return bool(keys) and {*keys} <= {*map(torch_compat.storage_key, read)}

    def side(self, node: fx.Node) -> bool:
        """Return whether ``node`` is of the backward."""
        return node in self._backward

    def depth(self) -> int:
        """Return how many operations of one group, at most, each read a result of the one before.

        Views and numbers do not count.
        """
        depths: dict[fx.Node, int] = {}
        for node in self.graph.nodes:
            group = self.group_of.get(node)
            if group is not None:
                before = (depths[n] for n in node.all_input_nodes if self.group_of.get(n) is group)
                computes = not (is_number(node) or is_getitem(node) or self.is_repeated(node))
                depths[node] = max(before, default=0) + computes
        return max(depths.values(), default=0)

    def members(self) -> list[list[fx.Node]]:
        """Return the groups, each with its nodes in graph order."""
        groups = {id(group): group for group in self.group_of.values()}
        return [sorted(group, key=self._order.__getitem__) for group in groups.values()]

    def group(self) -> None:
        """Put nodes into groups, so that a value with such a size is read inside its group.

        Exceptions are values of the forward that the backward reads, and indices and numbers of the
        forward that several groups read.
        """
        nodes = sorted(self.data, key=self._order.__getitem__)
        for node in nodes:
            if not (is_number(node) and self.is_repeated(node)):
                self._merge([node])
        for node in nodes:
            for user in node.users:
                if is_check(user) or (is_number(user) and self.is_repeated(user)):
                    continue
                joins = self.side(node) or not _is_index(node) or _is_index(user)
                if joins and not is_number(node) and self.side(user) == self.side(node):
                    self._merge([node, user])
                elif user not in self.group_of:
                    self._merge([user])
        for group in {id(group): group for group in self.group_of.values()}.values():
            if all(node in self.data and _is_index(node) for node in group):
                self._absorb(group)
        for node in self.graph.nodes:
            sources = self._sources(node) if is_check(node) else []
            if sources:
                self._merge([sources[-1], node])
        self._close()

    def _sources(self, number: fx.Node) -> list[fx.Node]:
        """Return the numbers of groups that ``number``, or a check, is computed from, in order."""
        sources: set[fx.Node] = set()
        waiting = [number]
        while waiting:
            for source in waiting.pop().all_input_nodes:
                if source in self.group_of:
                    sources.add(source)
                elif source in self.data:
                    waiting.append(source)
        return sorted(sources, key=self._order.__getitem__)

    def _absorb(self, indices: list[fx.Node]) -> None:
        """Put a group of indices and numbers into the only group of its side that reads it.

        In the backward it is put into all that do, which makes them one.
        """
        readers: dict[int, fx.Node] = {}
        waiting = list(indices)
        while waiting:
            for user in waiting.pop().users:
                if user not in self.group_of:
                    waiting += [user] * (user in self.data)
                elif self.side(user) == self.side(indices[0]) and user not in indices:
                    readers.setdefault(id(self.group_of[user]), user)
        if len(readers) == 1 or self.side(indices[0]):
            self._merge([indices[0], *readers.values()])

    def _merge(self, nodes: Iterable[fx.Node]) -> None:
        """Merge the groups of ``nodes``, some of which may be in none yet."""
        groups = {id(g): g for g in (self.group_of.get(n, [n]) for n in nodes)}
        first, *others = groups.values() or [[]]
        for other in others:
            first += other
        self.group_of.update(dict.fromkeys(first, first))

    def _close(self) -> None:
        """Merge groups, and add nodes to them, until no path leads out of a group and back."""
        import networkx  # noqa: PLC0415

        edges: dict[int, set[int]] = {}
        units: dict[int, list[fx.Node]] = {}

        def unit(node: fx.Node) -> int:
            group = self.group_of.get(node)
            key = self._order[node] if group is None else -1 - self._order[group[0]]
            units.setdefault(key, [node] if group is None else group)
            return key

        for node in self.graph.nodes:
            later = [*node.users, *filter(None, [self._draw_after.get(node)])]
            edges.setdefault(unit(node), set()).update(map(unit, later))
        for circle in networkx.strongly_connected_components(networkx.DiGraph(edges)):
            nodes = [n for key in circle if len(circle) > 1 for n in units[key]]
            kept = (n for n in nodes if n in self.group_of or not is_number(n))
            self._merge(sorted(kept, key=self._order.__getitem__))
