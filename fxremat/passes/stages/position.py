"""Give operations positions in the order of the forward, and in segments of it.

The position of a forward operation is its index. A backward node gets the position of the forward
operation that it differentiates. It belongs to the stage that has this position, wherever the
forward is cut.

Segments are the forward as a tree: branches that meet, and nested branches that meet before.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import fx

from fxremat import torch_compat
from fxremat.passes.joint import rng
from fxremat.passes.joint.batchnorm import is_inverse
from fxremat.passes.joint.graph import JointGraph, operation_of


@dataclass(frozen=True, slots=True)
class Segments:
    """Runs of places (operations or stages) between the points where branches fork and meet.

    A segment directly follows the last of the segments that flow into it. So it is one run of
    places together with these. The last segment is the trunk: what comes after the outermost
    branches, or the whole line where there are none.

    Attributes:
        ends: the place after the last of each segment but the trunk.
        into: for each of these segments the one that it flows into.
    """

    ends: tuple[int, ...] = ()
    into: tuple[int, ...] = ()

    @property
    def trunk(self) -> int:
        """The index of the trunk, which is the last segment."""
        return len(self.ends)

    @property
    def depth(self) -> int:
        """The number of levels of nested branches; 0 without branches."""
        return max(map(self._depth_of, range(self.trunk)), default=0)

    def at(self, place: int) -> int:
        """Return the index of the segment that ``place``, an operation or a stage, is in."""
        return bisect_right(self.ends, place)

    def start(self, segment: int) -> int:
        """Return the first place, an operation or a stage, of a segment."""
        return self.ends[segment - 1] if segment else 0

    def path(self, segment: int) -> tuple[int, ...]:
        """Return the indices of a segment, of the one it flows into, and so on up to the trunk."""
        path = [segment]
        while path[-1] != self.trunk:
            path.append(self.into[path[-1]])
        return tuple(path)

    def meeting(self, segments: Iterable[int]) -> int:
        """Return the index of the first segment that each of ``segments`` is or flows into."""
        first, *others = map(self.path, segments)
        return next(s for s in first if all(s in path for path in others))

    def outmost(self, segments: Iterable[int]) -> frozenset[int]:
        """Return those of ``segments`` that no other of them flows into."""
        distinct = frozenset(segments)
        return distinct.difference(*(self.path(s)[1:] for s in distinct))

    def branches(self, depth: int) -> tuple[range, ...]:
        """Return the branches at a nesting depth, each as the places before it meets others.

        At depth 1 these are the outermost branches, each with all segments that flow into it. At
        the greatest depth they are the segments that nothing flows into.
        """
        branches = []
        for segment in range(self.trunk):
            segment_depth = self._depth_of(segment)
            is_leaf = segment not in self.into
            if segment_depth == depth or (segment_depth < depth and is_leaf):
                first = min(s for s in range(segment + 1) if segment in self.path(s))
                branches.append(range(self.start(first), self.ends[segment]))
        return tuple(branches)

    def name_of(self, segment: int) -> str:
        """Return the name of a segment: ``trunk``, ``branch1`` or, nested in it, ``branch1_0``."""
        if segment == self.trunk:
            return "trunk"
        numbers = []
        for one, parent in zip(self.path(segment), self.path(segment)[1:], strict=False):
            numbers.append(sum(1 for s in range(one) if self.into[s] == parent))
        return "branch" + "_".join(map(str, reversed(numbers)))

    def _depth_of(self, segment: int) -> int:
        return len(self.path(segment)) - 1


@dataclass(frozen=True, slots=True)
class Positions:
    """The positions of the operations of a joint graph.

    Attributes:
        forward: the position of each forward node but views of given tensors, which every stage
            makes by itself. The values of an operation, and waits for it, share its position.
        backward: the position of each backward node, never above that of a backward node that it
            reads. In branches it is in the segment of the gradients that the node reads, or in one
            that flows into it.
        count: how many positions there are.
        segments: the positions as segments.
        sums: backward nodes that read gradients of several branches: those that add up the
            gradients of shared parameters, and what reads these. Their position is the lowest of
            those that they read.
    """

    forward: dict[fx.Node, int]
    backward: dict[fx.Node, int]
    count: int
    segments: Segments = field(default_factory=Segments)
    sums: frozenset[fx.Node] = frozenset()

    def of(self, node: fx.Node) -> int | None:
        """Return the position of ``node``; ``None`` if it has none."""
        return self.forward.get(node, self.backward.get(node))


def locate(joint: JointGraph, *, views: frozenset[fx.Node] = frozenset()) -> Positions:
    """Return the positions of all operations of ``joint``, in a line without branches.

    The position of a forward operation is its index; that of a backward one is the position of the
    forward operation that it differentiates.

    Args:
        joint: the step.
        views: views of given tensors, which get no position.

    Ensures: backward nodes that run by descending position, and in graph order where positions are
        equal, run after everything that they read; random draws keep their order.
    """
    forward: dict[fx.Node, int] = {}
    count = 0
    for node in joint.forward:
        if node in views:
            continue
        operation = operation_of(node)
        if operation is not node and operation in forward:
            forward[node] = forward[operation]
        elif is_inverse(node):  # at the latest with the backward of what it is rebuilt from
            forward[node] = forward[node.all_input_nodes[0]]
        else:
            forward[node] = count
            count += 1
    return Positions(forward, _locate_backward(joint, forward, count), count)


def _locate_backward(
    joint: JointGraph, forward: dict[fx.Node, int], count: int
) -> dict[fx.Node, int]:
    differentiates: dict[int, int] = {}
    for node, position in forward.items():
        number = torch_compat.sequence_number(node)
        if number is not None:
            differentiates[number] = position
    # The numbers of sums of gradients exceed those of all forward operations: any position will do.
    last = max(differentiates.values(), default=0)

    def latest(node: fx.Node) -> int:
        """Return the highest position of ``node``, whatever the gradients that it reads.

        It is that of the operation that ``node`` differentiates, and at least those of the forward
        operations that it reads.
        """
        number = torch_compat.sequence_number(node)
        differentiated = last if number is None else differentiates.get(number, last)
        return max([differentiated, *(forward[n] for n in node.all_input_nodes if n in forward)])

    located = dict.fromkeys(joint.tangents, max(count - 1, 0))
    free = gradient_free(joint)
    last_draw = count - 1
    for node in joint.backward:
        if node in free:
            continue
        sources = [located[n] for n in node.all_input_nodes if n in located]
        if operation_of(node) is not node:  # one position for all
            (located[node],) = sources
            continue
        position = min(*sources, latest(node))
        if rng.has_effect(node):
            position = last_draw = min(position, last_draw)
        located[node] = position
    # A node that depends on no gradient is computed where it is first read.
    for node in reversed(free):
        readers = [located[user] for user in node.users if user in located]
        located[node] = max(readers, default=latest(node))
    for node in free:
        if operation_of(node) is not node:
            located[node] = located[node.all_input_nodes[0]]
    for node in joint.backward:  # such a node may be above one that it reads
        located[node] = min(located[n] for n in (node, *node.all_input_nodes) if n in located)
    return {node: located[node] for node in joint.backward}


def gradient_free(joint: JointGraph) -> dict[fx.Node, None]:
    """Return the backward nodes that depend on no gradient, such as a mask, in graph order."""
    dependent = set(joint.tangents)
    free: dict[fx.Node, None] = {}
    for node in joint.backward:
        if dependent.isdisjoint(node.all_input_nodes):
            free[node] = None
        else:
            dependent.add(node)
    return free
