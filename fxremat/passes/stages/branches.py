"""Branches: parts of the forward that share no activation before they meet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from networkx.utils import UnionFind
from torch import fx

from fxremat.passes.joint import batchnorm, rng
from fxremat.passes.joint.graph import JointGraph, is_tensor
from fxremat.passes.stages.position import Positions, Segments, gradient_free


@dataclass(frozen=True, slots=True)
class Branches:
    """The forward as branches and the trunk after them.

    Attributes:
        forward: all forward operations: views of given tensors, then segment after segment,
            the trunk last; within each in graph order.
        into: for each segment but the trunk the one that it flows into.
        segment_of: of each operation but views of given tensors.
    """

    forward: tuple[fx.Node, ...]
    into: tuple[int, ...]
    segment_of: dict[fx.Node, int]


def find_branches(
    joint: JointGraph,
    *,
    views: frozenset[fx.Node],
    pinned: frozenset[int],
    least_share: float,
    least_operations: int,
) -> Iterator[Branches]:
    """Ways to see the forward as a join: with branches in branches, then without.

    The operations before some point of the graph fall apart into groups that share no
    activation. The point is the one at which most saved bytes are in groups beside the
    largest, and the last of those. Each group may fall apart in the same way.

    Args:
        joint: the step.
        views: views of given tensors; they connect nothing.
        pinned: storages that are kept for the whole step; nor do those of them that carry
            no gradient, such as a mask.
        least_share: a branch saves at least this share of all saved bytes; what saves less is the
            trunk's.
        least_operations: a branch has at least so many operations.

    Ensures: there are at least two branches; random draws keep their order, and every
        operation follows what it reads.
    """
    nodes = [n for n in joint.forward if n not in views]
    looking = [n for n in joint.forward if n in views]
    apart = _carrying_no_gradient(joint, pinned) | joint.storages.of(joint.given)
    saved_bytes = joint.storages.total(joint.saved - pinned)
    least_bytes = max(1, int(least_share * saved_bytes))
    forking = _Forking(joint, apart, least_bytes, least_operations)
    for nested in (True, False):
        segments, into = forking.split(nodes, nested=nested)
        if len(segments) == 1:
            return
        ordered = [node for own in segments for node in own]
        draws = list(filter(rng.draws, nodes))
        if list(filter(rng.draws, ordered)) == draws and _is_order(ordered):
            segment_of = {node: i for i, own in enumerate(segments) for node in own}
            yield Branches((*looking, *ordered), into, segment_of)
        if len(set(into)) == 1:
            return


Item = fx.Node | int
"""An operation or a storage."""


@dataclass(frozen=True, slots=True)
class _Groups:
    """Operations and storages that activations connect.

    Attributes:
        joined: the groups, each by one item of it.
        saved_bytes, operations: of groups that have any.
    """

    joined: UnionFind = field(default_factory=UnionFind)
    saved_bytes: dict[Item, int] = field(default_factory=dict)
    operations: dict[Item, int] = field(default_factory=dict)

    def add(self, node: fx.Node, connected: Mapping[Item, int]) -> None:
        """Connect ``node`` with items that save so many bytes."""
        new_bytes = sum(n for item, n in connected.items() if item not in self.joined.parents)
        before = {self.joined[item] for item in (node, *connected)}
        self.joined.union(node, *connected)
        for sums, more in ((self.saved_bytes, new_bytes), (self.operations, 1)):
            total = more + sum(sums.pop(group, 0) for group in before)
            if total:
                sums[self.joined[node]] = total


@dataclass(frozen=True, slots=True)
class _Forking:
    """Finds where operations fall apart.

    Attributes:
        joint: the step.
        apart: storages that connect nothing.
        least_bytes: what a branch saves at least.
        least_operations: operations that a branch has at least.
    """

    joint: JointGraph
    apart: frozenset[int]
    least_bytes: int
    least_operations: int

    def split(
        self, nodes: Sequence[fx.Node], *, nested: bool
    ) -> tuple[list[Sequence[fx.Node]], tuple[int, ...]]:
        """The segments of ``nodes``, the last one after all, and into which the others flow."""
        *branches, rest = self._fork(nodes)
        segments: list[Sequence[fx.Node]] = []
        into: list[int] = []
        ends: list[int] = []
        for own in branches:
            inner, flow = self.split(own, nested=True) if nested else ([own], ())
            into += [len(segments) + s for s in flow] + [-1]
            segments += inner
            ends.append(len(segments) - 1)
        for end in ends:
            into[end] = len(segments)
        return [*segments, rest], tuple(into)

    def _fork(self, nodes: Sequence[fx.Node]) -> list[Sequence[fx.Node]]:
        """Branches of ``nodes``, if there are any, and what comes after them."""
        groups = _Groups()
        best_bytes, point = 1, 0
        for index, node in enumerate(nodes):
            self._add(node, groups)
            heavy = self._heavy(groups).values()
            beside_bytes = sum(heavy) - max(heavy, default=0)
            if beside_bytes >= best_bytes:
                best_bytes, point = beside_bytes, index + 1
        if not point:
            return [nodes]
        groups = _Groups()
        for node in nodes[:point]:
            self._add(node, groups)
        place = _places(nodes[:point], groups.joined, self._heavy(groups).keys())
        count = 1 + max(place.values())
        found: list[list[fx.Node]] = [[] for _ in range(count + 1)]
        for node in nodes:
            found[place.get(node, count)].append(node)
        return list(found)

    def _add(self, node: fx.Node, groups: _Groups) -> None:
        """Connect ``node`` with what it makes and reads, but what connects nothing."""
        table = self.joint.storages
        connected: dict[Item, int] = {
            storage: table.nbytes[storage] if storage in self.joint.saved else 0
            for storage in table.of((node, *node.all_input_nodes)) - self.apart
        }
        for source in node.all_input_nodes:
            if not is_tensor(source) and source in groups.joined.parents:
                connected[source] = 0  # an operation with several values
        groups.add(node, connected)

    def _heavy(self, groups: _Groups) -> dict[Item, int]:
        """The groups that are large enough for a branch, and what they save."""
        return {
            group: nbytes
            for group, nbytes in groups.saved_bytes.items()
            if nbytes >= self.least_bytes
            and groups.operations.get(group, 0) >= self.least_operations
        }


def _carrying_no_gradient(joint: JointGraph, pinned: frozenset[int]) -> frozenset[int]:
    """Storages of ``pinned`` that depend on nothing that gets a gradient, or are made once."""
    results = zip(joint.primals, joint.backward_outputs, strict=True)
    differentiable = {primal for primal, gradient in results if gradient is not None}
    carrying: set[int] = set()
    once: set[int] = set()
    for node in joint.forward:
        if rng.is_state(node) or batchnorm.is_new_statistic(node):
            once.update(joint.storages.of_node[node])
        elif not differentiable.isdisjoint(node.all_input_nodes):
            differentiable.add(node)
            carrying.update(joint.storages.of_node[node])
    return pinned - (carrying - once)


def _places(
    nodes: Sequence[fx.Node], groups: Mapping[Item, Item], heavy: Set[Item]
) -> dict[fx.Node, int]:
    """The branch of each node that is in one.

    A light group goes with the first branch that reads anything pinned that it makes.
    """
    group_of = {node: groups[node] for node in nodes}
    place: dict[Item, int] = {}
    for group in group_of.values():
        if group in heavy:
            place.setdefault(group, len(place))
    changed = True
    while changed:
        changed = False
        for node in reversed(nodes):
            group = group_of[node]
            readers = [place[group_of[u]] for u in node.users if group_of.get(u) in place]
            if group not in heavy and readers and min(readers) < place.get(group, len(heavy)):
                place[group], changed = min(readers), True
    return {node: place[group] for node, group in group_of.items() if group in place}


def _is_order(nodes: Sequence[fx.Node]) -> bool:
    """Whether each follows what it reads."""
    todo = set(nodes)
    for node in nodes:
        if not todo.isdisjoint(node.all_input_nodes):
            return False
        todo.remove(node)
    return True


def place_backward(joint: JointGraph, branches: Branches, positions: Positions) -> Positions | None:
    """Keep the backward of each branch to itself.

    ``positions`` are those on a line of ``joint``, whose forward is in the order of ``branches``.
    None where a branch's backward takes more from another than sums of gradients do, or a segment
    has no position of its own.
    """
    return _Placing(joint, branches, positions).run()


def is_apart(joint: JointGraph, where: Positions, pinned: frozenset[int]) -> bool:
    """Whether no branch, and no sum, reads an activation of another branch."""
    for node, position in where.forward.items():
        if pinned.issuperset(joint.storages.of_node[node]):
            continue
        here = where.segments.at(position)
        for user in node.users:
            at = where.of(user)
            there = here if at is None else where.segments.at(at)
            if user in where.sums or there not in where.segments.path(here):
                return False
    return True


class _Placing:
    """One run of ``place_backward``."""

    def __init__(self, joint: JointGraph, branches: Branches, positions: Positions) -> None:
        self._joint = joint
        self._forward = positions.forward
        self._located = dict(positions.backward)
        ends = [0] * len(branches.into)
        for node, segment in branches.segment_of.items():
            for later in range(segment, len(ends)):
                ends[later] = max(ends[later], positions.forward[node] + 1)
        self._segments = Segments(tuple(ends), branches.into)
        # Where no operation comes after the branches the turn stands for it.
        self._count = max(positions.count, self._segments.start(self._segments.trunk) + 1)
        self._sums: dict[fx.Node, frozenset[int]] = {}

    def run(self) -> Positions | None:
        joint = self._joint
        free = gradient_free(joint)
        for node in reversed(free):
            self._lift(node)
        for node in joint.backward:
            if node not in free:
                self._confine(node)
        for node in joint.backward:
            sources = [self._located[n] for n in node.all_input_nodes if n in self._located]
            own = [] if node in self._sums else [self._located[node]]
            self._located[node] = min([*own, *sources])
        if any(self._segments.start(s) >= end for s, end in enumerate(self._segments.ends)):
            return None  # all of a segment's operations stand where others do: no stage is its own
        if not all(map(self._reads_ahead, joint.backward)):
            return None
        backward = {node: self._located[node] for node in joint.backward}
        return Positions(
            self._forward, backward, self._count, self._segments, frozenset(self._sums)
        )

    def _segment_of(self, node: fx.Node) -> int:
        return self._segments.at(self._located[node])

    def _lift(self, node: fx.Node) -> None:
        """What several segments read is computed before any of them goes back."""
        readers = {self._segment_of(u) for u in node.users if u in self._located}
        if len(readers) > 1:
            first = self._segments.start(self._segments.meeting(readers))
            self._located[node] = max(self._located[node], first)

    def _confine(self, node: fx.Node) -> None:
        """To the segment whose gradients it reads, or one that flows into it."""
        sources = [n for n in node.all_input_nodes if n in self._located]
        owners = {self._segment_of(n) for n in sources if n not in self._sums}
        owners = owners.union(*(self._sums[n] for n in sources if n in self._sums))
        owners = set(self._segments.outmost(owners))
        if len(owners) > 1:
            self._sums[node] = frozenset(owners)
        elif owners and owners.isdisjoint(self._segments.path(self._segment_of(node))):
            (segment,) = owners
            first, last = self._segments.start(segment), self._segments.ends[segment] - 1
            self._located[node] = min(max(self._located[node], first), last)

    def _reads_ahead(self, node: fx.Node) -> bool:
        """Whether ``node`` reads what its own segment, or one further on, has."""
        if rng.draws(node):
            return False  # a backward's draws keep the order of the line
        path = self._segments.path(self._segment_of(node))
        sources = [n for n in node.all_input_nodes if n in self._located]
        return node in self._sums or all(
            n not in self._sums and self._segment_of(n) in path for n in sources
        )
