"""Where operations stand: at positions in the order of the forward, in segments of it.

A forward operation's position is its index. A backward node gets the position of the
forward operation that it differentiates; the stage it belongs to is then the one that
holds this position, wherever the cuts are put.

Segments are the forward as a tree: branches that meet, and within a branch others that met before.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import fx

from fxremat import torch_compat
from fxremat.passes.joint.batchnorm import is_inverse
from fxremat.passes.joint.graph import JointGraph, operation_of


@dataclass(frozen=True, slots=True)
class Segments:
    """Runs of places (operations or stages) between a fork and a meeting.

    A segment comes after all that flow into it and directly after the last of them, so
    whatever flows into it, together with it, is one run of places too. The last segment is
    the trunk: what comes after the outermost branches, or the whole line where there are none.

    Attributes:
        ends: the place after each segment's last, but for the trunk.
        into: for each of these segments the one that it flows into.
    """

    ends: tuple[int, ...] = ()
    into: tuple[int, ...] = ()

    @property
    def trunk(self) -> int:
        """The last segment."""
        return len(self.ends)

    @property
    def depth(self) -> int:
        """Most segments that a place flows through until the trunk; 0 on a line."""
        return max(map(self._depth_of, range(self.trunk)), default=0)

    def at(self, place: int) -> int:
        """The segment of a place."""
        return bisect_right(self.ends, place)

    def start(self, segment: int) -> int:
        """The first place of a segment."""
        return self.ends[segment - 1] if segment else 0

    def path(self, segment: int) -> tuple[int, ...]:
        """A segment and those that come after it, up to the trunk."""
        found = [segment]
        while found[-1] != self.trunk:
            found.append(self.into[found[-1]])
        return tuple(found)

    def meeting(self, segments: Iterable[int]) -> int:
        """The first segment that all of these flow into, or are."""
        first, *others = map(self.path, segments)
        return next(s for s in first if all(s in path for path in others))

    def outmost(self, segments: Iterable[int]) -> frozenset[int]:
        """The ones of ``segments`` that no other of these flows into."""
        found = frozenset(segments)
        return found.difference(*(self.path(s)[1:] for s in found))

    def branches(self, depth: int) -> tuple[range, ...]:
        """The line as branches of this depth, in places; what they flow into is left out.

        At depth 1 they are the outermost, each with all that flows into it; at the greatest
        depth those into which nothing flows.
        """
        found = []
        for segment in range(self.trunk):
            here = self._depth_of(segment)
            if here == depth or (here < depth and segment not in self.into):
                first = min(s for s in range(segment + 1) if segment in self.path(s))
                found.append(range(self.start(first), self.ends[segment]))
        return tuple(found)

    def name_of(self, segment: int) -> str:
        """For people and emitted code: a branch of a branch has two numbers."""
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
    """Positions of all operations of a joint graph.

    Attributes:
        forward: of each forward node but views of given tensors, which every stage makes
            for itself; values of one operation, and waits for it, share its position.
        backward: of each backward node; never above that of a backward node it reads. In
            branches it is in the segment of the gradients that the node reads, or in one that
            flows into it.
        count: how many positions there are.
        segments: of positions.
        sums: backward nodes that read gradients of several branches: those that add up the
            gradients of shared parameters, and what reads these. Their position is the
            lowest of those they read.
    """

    forward: dict[fx.Node, int]
    backward: dict[fx.Node, int]
    count: int
    segments: Segments = field(default_factory=Segments)
    sums: frozenset[fx.Node] = frozenset()

    def of(self, node: fx.Node) -> int | None:
        """The position of ``node``, if it has any."""
        return self.forward.get(node, self.backward.get(node))


def locate(joint: JointGraph, *, views: frozenset[fx.Node] = frozenset()) -> Positions:
    """Give every node its position, but the forward's ``views`` of given tensors.

    Requires: ``joint`` is verified.
    Ensures: running backward nodes by descending position, and in graph order where
        equal, runs each after all it reads; random draws keep their order.
    """
    forward: dict[fx.Node, int] = {}
    count = 0
    for node in joint.forward:
        if node in views:
            continue
        operation = operation_of(node)
        if operation is not node and operation in forward:
            forward[node] = forward[operation]
        elif is_inverse(node):  # no later than the backward of what it is computed from
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
    # Sums of gradients carry a number past every forward operation's: any place will do.
    anywhere = max(differentiates.values(), default=0)

    def natural(node: fx.Node) -> int:
        """The position that ``node`` would take if its gradients were there already; no less than
        that of what it reads of the forward.
        """
        number = torch_compat.sequence_number(node)
        own = anywhere if number is None else differentiates.get(number, anywhere)
        return max([own, *(forward[n] for n in node.all_input_nodes if n in forward)])

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
        position = min(*sources, natural(node))
        if torch_compat.draws_random_numbers(node):
            position = last_draw = min(position, last_draw)
        located[node] = position
    # What depends on no gradient is computed where it is first read.
    for node in reversed(free):
        readers = [located[user] for user in node.users if user in located]
        located[node] = max(readers, default=natural(node))
    for node in free:
        if operation_of(node) is not node:
            located[node] = located[node.all_input_nodes[0]]
    for node in joint.backward:  # such a one may stand above something that it reads
        located[node] = min(located[n] for n in (node, *node.all_input_nodes) if n in located)
    return {node: located[node] for node in joint.backward}


def gradient_free(joint: JointGraph) -> dict[fx.Node, None]:
    """Backward nodes that depend on no gradient, in order: a mask, a scale."""
    dependent = set(joint.tangents)
    free: dict[fx.Node, None] = {}
    for node in joint.backward:
        if dependent.isdisjoint(node.all_input_nodes):
            free[node] = None
        else:
            dependent.add(node)
    return free
