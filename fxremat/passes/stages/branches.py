"""Find branches: parts of the forward that share no activation before they meet."""

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
    """The forward as branches and the trunk, which comes after they meet.

    Segments are the trunk, and the branches, each without the branches nested in it. A segment
    flows into the one that comes after it where branches meet.

    Attributes:
        forward: all forward operations: views of given tensors, then segment after segment, with
            the trunk last, each in graph order.
        into: for each segment but the trunk the index of the segment that it flows into.
        segment_of: the index of the segment of each operation that is no view of a given tensor.
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
    """Yield divisions of the forward into branches: nested ones first, then one level of them.

    The operations before some point of the graph divide into groups that share no activation. The
    point is the last of those at which the groups other than the largest save most bytes. Each
    group may divide in the same way.

    Args:
        joint: the step.
        views: views of given tensors, which connect no groups.
        pinned: storages that are kept for the whole step. Those that carry no gradient, such as a
            mask, connect no groups either.
        least_share: least share of all saved bytes that a branch saves; what saves less belongs to
            the trunk.
        least_operations: least number of operations of a branch.

    Ensures: there are at least two branches; random draws keep their order, and every operation
        follows what it reads.
    """
    nodes = [n for n in joint.forward if n not in views]
    leading_views = [n for n in joint.forward if n in views]
    separating = _carrying_no_gradient(joint, pinned) | joint.storages.of(joint.given)
    saved_bytes = joint.storages.total(joint.saved - pinned)
    least_bytes = max(1, int(least_share * saved_bytes))
    divider = _Divider(joint, separating, least_bytes, least_operations)
    for nested in (True, False):
        segments, into = divider.divide(nodes, nested=nested)
        if len(segments) == 1:
            return
        ordered = [node for segment in segments for node in segment]
        draws = list(filter(rng.has_effect, nodes))
        if list(filter(rng.has_effect, ordered)) == draws and _is_topological(ordered):
            segment_of = {node: i for i, segment in enumerate(segments) for node in segment}
            yield Branches((*leading_views, *ordered), into, segment_of)
        if len(set(into)) == 1:
            return


Item = fx.Node | int
"""An operation or a storage."""


@dataclass(frozen=True, slots=True)
class _Groups:
    """Operations and storages, in groups that activations connect.

    Attributes:
        joined: the groups; an item of each stands for it.
        saved_bytes: bytes that each group saves; groups that save none are missing.
        operations: how many operations each group has.
    """

    joined: UnionFind = field(default_factory=UnionFind)
    saved_bytes: dict[Item, int] = field(default_factory=dict)
    operations: dict[Item, int] = field(default_factory=dict)

    def add(self, node: fx.Node, connected: Mapping[Item, int]) -> None:
        """Merge ``node``, the items of ``connected``, and their groups into one group.

        Args:
            node: an operation.
            connected: the bytes that each item saves for the backward.
        """
        new_bytes = sum(n for item, n in connected.items() if item not in self.joined.parents)
        merged = {self.joined[item] for item in (node, *connected)}
        self.joined.union(node, *connected)
        for sums, new in ((self.saved_bytes, new_bytes), (self.operations, 1)):
            total = new + sum(sums.pop(group, 0) for group in merged)
            if total:
                sums[self.joined[node]] = total


@dataclass(frozen=True, slots=True)
class _Divider:
    """Divides operations into branches.

    Attributes:
        joint: the step.
        separating: storages that connect no operations.
        least_bytes: least bytes that a branch saves.
        least_operations: least number of operations of a branch.
    """

    joint: JointGraph
    separating: frozenset[int]
    least_bytes: int
    least_operations: int

    def divide(
        self, nodes: Sequence[fx.Node], *, nested: bool
    ) -> tuple[list[Sequence[fx.Node]], tuple[int, ...]]:
        """Return ``nodes`` as segments, and where each but the last flows into.

        Segments are branches without what is nested in them, then the trunk. The second item has an
        index of the first for each but the trunk.

        Args:
            nodes: operations in graph order.
            nested: whether branches may divide into branches.
        """
        *branches, trunk = self._branches_and_trunk(nodes)
        segments: list[Sequence[fx.Node]] = []
        into: list[int] = []
        ends: list[int] = []
        for branch in branches:
            inner, flow = self.divide(branch, nested=True) if nested else ([branch], ())
            into += [len(segments) + s for s in flow] + [-1]
            segments += inner
            ends.append(len(segments) - 1)
        for end in ends:
            into[end] = len(segments)
        return [*segments, trunk], tuple(into)

    def _branches_and_trunk(self, nodes: Sequence[fx.Node]) -> list[Sequence[fx.Node]]:
        """Return the nodes of each branch, if there are any, then the nodes after them."""
        groups = _Groups()
        best_bytes, point = 1, 0
        for index, node in enumerate(nodes):
            self._add(node, groups)
            heavy = self._heavy(groups).values()
            other_bytes = sum(heavy) - max(heavy, default=0)
            if other_bytes >= best_bytes:
                best_bytes, point = other_bytes, index + 1
        if not point:
            return [nodes]
        groups = _Groups()
        for node in nodes[:point]:
            self._add(node, groups)
        branch_of = _branch_of(nodes[:point], groups.joined, self._heavy(groups).keys())
        count = 1 + max(branch_of.values())
        parts: list[list[fx.Node]] = [[] for _ in range(count + 1)]
        for node in nodes:
            parts[branch_of.get(node, count)].append(node)
        return list(parts)

    def _add(self, node: fx.Node, groups: _Groups) -> None:
        """Put ``node`` in one group with the storages that it makes and reads.

        Storages of ``separating`` are left out.
        """
        table = self.joint.storages
        connected: dict[Item, int] = {
            storage: table.nbytes[storage] if storage in self.joint.saved else 0
            for storage in table.of((node, *node.all_input_nodes)) - self.separating
        }
        for source in node.all_input_nodes:
            if not is_tensor(source) and source in groups.joined.parents:
                connected[source] = 0  # an operation with several values
        groups.add(node, connected)

    def _heavy(self, groups: _Groups) -> dict[Item, int]:
        """Return the groups that are large enough for a branch, with the bytes that each saves."""
        return {
            group: nbytes
            for group, nbytes in groups.saved_bytes.items()
            if nbytes >= self.least_bytes
            and groups.operations.get(group, 0) >= self.least_operations
        }


def _carrying_no_gradient(joint: JointGraph, pinned: frozenset[int]) -> frozenset[int]:
    """Return those of the storages ``pinned`` that connect no branches.

    No gradient flows through them, or they hold a generator's state or a new BatchNorm statistic.
    """
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


def _branch_of(
    nodes: Sequence[fx.Node], groups: Mapping[Item, Item], heavy: Set[Item]
) -> dict[fx.Node, int]:
    """Return the index of the branch of each node that is in one.

    A group that is not in ``heavy`` belongs to the first branch that reads a pinned tensor of it.

    Args:
        nodes: the operations before the branches meet.
        groups: the group of each node.
        heavy: groups that are a branch each.
    """
    group_of = {node: groups[node] for node in nodes}
    branch_of: dict[Item, int] = {}
    for group in group_of.values():
        if group in heavy:
            branch_of.setdefault(group, len(branch_of))
    changed = True
    while changed:
        changed = False
        for node in reversed(nodes):
            group = group_of[node]
            readers = [branch_of[group_of[u]] for u in node.users if group_of.get(u) in branch_of]
            if group not in heavy and readers and min(readers) < branch_of.get(group, len(heavy)):
                branch_of[group], changed = min(readers), True
    return {node: branch_of[group] for node, group in group_of.items() if group in branch_of}


def _is_topological(nodes: Sequence[fx.Node]) -> bool:
    todo = set(nodes)
    for node in nodes:
        if not todo.isdisjoint(node.all_input_nodes):
            return False
        todo.remove(node)
    return True


def place_backward(joint: JointGraph, branches: Branches, positions: Positions) -> Positions | None:
    """Return positions at which each backward operation is in the branch whose gradients it reads.

    Args:
        joint: the step, with its forward in the order of ``branches``.
        branches: the branches.
        positions: the positions of its operations, as if it had no branches.

    Returns ``None`` where the backward of a branch reads more of another branch than sums of
    gradients, or where a segment would have no position.
    """
    return _Placing(joint, branches, positions).run()


def are_independent(joint: JointGraph, positions: Positions, pinned: frozenset[int]) -> bool:
    """Return whether no branch reads an unpinned activation of another branch.

    This holds for the backward as well, and for sums of gradients of several branches.

    Args:
        joint: the step.
        positions: the positions of its operations, with branches as segments.
        pinned: storages that are kept for the whole step.
    """
    segments = positions.segments
    for node, position in positions.forward.items():
        if pinned.issuperset(joint.storages.of_node[node]):
            continue
        segment = segments.at(position)
        for user in node.users:
            read_at = positions.of(user)
            reader = segment if read_at is None else segments.at(read_at)
            if user in positions.sums or reader not in segments.path(segment):
                return False
    return True


class _Placing:
    """Moves backward operations into branches, for :func:`place_backward`."""

    def __init__(self, joint: JointGraph, branches: Branches, positions: Positions) -> None:
        self._joint = joint
        self._forward = positions.forward
        self._located = dict(positions.backward)
        ends = [0] * len(branches.into)
        for node, segment in branches.segment_of.items():
            for later in range(segment, len(ends)):
                ends[later] = max(ends[later], positions.forward[node] + 1)
        self._segments = Segments(tuple(ends), branches.into)
        # Where no operation comes after the branches, the trunk is the loss point.
        self._count = max(positions.count, self._segments.start(self._segments.trunk) + 1)
        self._sums: dict[fx.Node, frozenset[int]] = {}

    def run(self) -> Positions | None:
        joint = self._joint
        free = gradient_free(joint)
        for node in reversed(free):
            self._move_before_readers(node)
        for node in joint.backward:
            if node not in free:
                self._move_into_segment(node)
        for node in joint.backward:
            sources = [self._located[n] for n in node.all_input_nodes if n in self._located]
            current = [] if node in self._sums else [self._located[node]]
            self._located[node] = min([*current, *sources])
        if any(self._segments.start(s) >= end for s, end in enumerate(self._segments.ends)):
            return None  # every operation of a segment is at a position of another segment
        if not all(map(self._reads_its_path, joint.backward)):
            return None
        backward = {node: self._located[node] for node in joint.backward}
        return Positions(
            self._forward, backward, self._count, self._segments, frozenset(self._sums)
        )

    def _segment_of(self, node: fx.Node) -> int:
        return self._segments.at(self._located[node])

    def _move_before_readers(self, node: fx.Node) -> None:
        """Move a node that several segments read to the segment that all of these flow into.

        The backward of that segment runs before theirs.
        """
        readers = {self._segment_of(u) for u in node.users if u in self._located}
        if len(readers) > 1:
            first = self._segments.start(self._segments.meeting(readers))
            self._located[node] = max(self._located[node], first)

    def _move_into_segment(self, node: fx.Node) -> None:
        """Move a node to the segment whose gradients it reads, or one that flows into it.

        A node that reads gradients of several branches is recorded as a sum.
        """
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

    def _reads_its_path(self, node: fx.Node) -> bool:
        """Return whether ``node`` may run where it is placed.

        It may read backward nodes of its segment, and of segments that this flows into. Sums may
        read others. The result is false for random draws, which keep the order of the line.
        """
        if rng.has_effect(node):
            return False  # random draws of a backward keep the order of the line
        path = self._segments.path(self._segment_of(node))
        sources = [n for n in node.all_input_nodes if n in self._located]
        return node in self._sums or all(
            n not in self._sums and self._segment_of(n) in path for n in sources
        )
