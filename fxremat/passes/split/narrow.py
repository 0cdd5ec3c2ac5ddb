"""Narrow places of a step: values that are all that is held of a phase while more is held around.

In a residual network these are the values of the residual stream, and in the backward their
gradients. A schedule that recomputes holds them whole in any case.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set

from torch import fx

from fxremat.passes.joint.graph import JointGraph

WIDER = 4
"""A place is narrow if on either side of it, before another place as narrow, this many times its
bytes are held, or the phase begins or ends."""

OTHERS = 8
"""A value is nearly all that is held if others take at most its bytes divided by this."""


def narrow_values(joint: JointGraph) -> frozenset[int]:
    """Return ids of the storages that are nearly all that is held at a narrow place of a phase.

    A phase, forward or backward, holds what it makes until it has read it for the last time. What
    the step is given, and the gradients that it returns, do not count.
    """
    phases = (joint.forward, joint.backward)
    return frozenset(storage for nodes in phases for storage in _narrow(joint, nodes))


def _narrow(joint: JointGraph, nodes: Sequence[fx.Node]) -> Iterator[int]:
    """Yield the storages that are nearly all that is held at a narrow place of ``nodes``."""
    table = joint.storages
    ignored = table.of((*joint.given, *joint.gradients))
    last = {s: i for i, node in enumerate(nodes) for s in table.of(node.all_input_nodes)}
    held: set[int] = set()
    held_bytes: list[int] = []
    single: dict[int, int] = {}
    for i, node in enumerate(nodes):
        made = {s for s in table.of_node.get(node, ()) if table.owner[s] is node} - ignored
        held |= made
        held_bytes.append(table.total(held))
        # What the other phase reads is held for a moment.
        left = {s for s in held if last.get(s, -1) > i or (s in made and s not in last)}
        most = max(left, key=lambda s: (table.nbytes[s], -s), default=None)
        if most is not None and table.total(left) * OTHERS <= table.nbytes[most] * (OTHERS + 1):
            single[i] = most
        held = {s for s in held if last.get(s, -1) > i}
    for i, storage in single.items():
        sides = (range(i, -1, -1), range(i + 1, len(nodes)))
        nbytes = table.nbytes[storage]
        others = {j: table.nbytes[s] for j, s in single.items() if s != storage}
        before = {j for j, other_bytes in others.items() if other_bytes <= nbytes}
        after = {j for j, other_bytes in others.items() if other_bytes < nbytes}
        pairs = zip(sides, (before, after), strict=True)
        if all(_is_wider(side, WIDER * nbytes, held_bytes, narrower) for side, narrower in pairs):
            yield storage


def _is_wider(
    side: Iterable[int], nbytes: int, held_bytes: Sequence[int], narrower: Set[int]
) -> bool:
    """Return whether ``nbytes`` are held at one of the places ``side``, before one of ``narrower``.

    The end of the phase counts as such a place. ``held_bytes`` are held while the operation of each
    place runs.
    """
    for place in side:
        if held_bytes[place] >= nbytes:
            return True
        if place in narrower:
            return False
    return True
