"""Where each backward node stands in the order of the forward.

A forward operation's position is its index. A backward node gets the position of the
forward operation that it differentiates; the stage it belongs to is then the one that
holds this position, wherever the cuts are put.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from fxremat import torch_compat
from fxremat.passes.joint.graph import JointGraph
from fxremat.passes.joint.invert import is_inverse


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
        if node.target is operator.getitem and node.args[0] in forward:
            forward[node] = forward[node.args[0]]  # type: ignore[index]
        elif torch_compat.is_wait(node):
            forward[node] = forward[torch_compat.awaited(node)]
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
    waiting: list[fx.Node] = []
    last_draw = count - 1
    for node in joint.backward:
        sources = [located[n] for n in node.all_input_nodes if n in located]
        if not sources:
            waiting.append(node)
            continue
        if node.target is operator.getitem or torch_compat.is_wait(node):  # one position for all
            (located[node],) = sources
            continue
        position = min(*sources, _natural(node, differentiates, forward))
        if torch_compat.draws_random_numbers(node):
            position = last_draw = min(position, last_draw)
        located[node] = position
    # What depends on no gradient (a mask, a scale) is computed where it is first read.
    for node in reversed(waiting):
        readers = [located[user] for user in node.users if user in located]
        located[node] = max(readers, default=_natural(node, differentiates, forward))
    for node in waiting:
        if node.target is operator.getitem or torch_compat.is_wait(node):
            located[node] = located[node.all_input_nodes[0]]
    _settle(joint, located)
    return {node: located[node] for node in joint.backward}


def _natural(node: fx.Node, differentiates: dict[int, int], forward: dict[fx.Node, int]) -> int:
    """The position that ``node`` would take if its gradients were there already.

    Sums of gradients carry a number past every forward operation's: any place will do.
    """
    number = torch_compat.sequence_number(node)
    anywhere = max(differentiates.values(), default=0)
    natural = anywhere if number is None else differentiates.get(number, anywhere)
    return max(natural, _last_birth(node.all_input_nodes, forward))


def _last_birth(nodes: Iterable[fx.Node], forward: dict[fx.Node, int]) -> int:
    return max((forward[n] for n in nodes if n in forward), default=0)


def _settle(joint: JointGraph, located: dict[fx.Node, int]) -> None:
    """Lower whoever stands above something it reads (only what waited can)."""
    for node in joint.backward:
        sources = [located[n] for n in node.all_input_nodes if n in located]
        located[node] = min([located[node], *sources])
