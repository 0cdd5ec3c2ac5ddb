"""Where each backward node stands in the order of the forward.

A forward operation's position is its index. A backward node gets the position of the
forward operation that it differentiates; the stage it belongs to is then the one that
holds this position, wherever the cuts are put.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fxremat import torch_compat
from fxremat.passes.joint.batchnorm import is_inverse
from fxremat.passes.joint.graph import JointGraph, operation_of


@dataclass(frozen=True, slots=True)
class Positions:
    """Positions of all operations of a joint graph.

    Attributes:
        forward: of each forward node but views of given tensors, which every stage makes
            for itself; values of one operation, and waits for it, share its position.
        backward: of each backward node; never above that of a backward node it reads.
        count: how many positions there are.
    """

    forward: dict[fx.Node, int]
    backward: dict[fx.Node, int]
    count: int

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
        position = min(*sources, _natural(node, differentiates, forward))
        if torch_compat.draws_random_numbers(node):
            position = last_draw = min(position, last_draw)
        located[node] = position
    # What depends on no gradient is computed where it is first read.
    for node in reversed(free):
        readers = [located[user] for user in node.users if user in located]
        located[node] = max(readers, default=_natural(node, differentiates, forward))
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


def _natural(node: fx.Node, differentiates: dict[int, int], forward: dict[fx.Node, int]) -> int:
    """The position that ``node`` would take if its gradients were there already; no less than that
    of what it reads of the forward.

    Sums of gradients carry a number past every forward operation's: any place will do.
    """
    number = torch_compat.sequence_number(node)
    anywhere = max(differentiates.values(), default=0)
    natural = anywhere if number is None else differentiates.get(number, anywhere)
    return max([natural, *(forward[n] for n in node.all_input_nodes if n in forward)])
