"""Forms of a step: how its operations may be computed, and what tells forms apart."""

from __future__ import annotations

from collections.abc import Iterator

from fxremat.ir import Form
from fxremat.passes.joint.batchnorm import is_inverse
from fxremat.passes.joint.graph import JointGraph
from fxremat.passes.split.beside import parts_of
from fxremat.passes.split.losses import has_losses
from fxremat.passes.split.parts import Parts
from fxremat.passes.stages.linearize import Line

PART_SHARES = (2, 8, 32)
"""Of the largest value: those above so much of it are computed in parts, in one variant each."""


def parted(joint: JointGraph, *, exact: bool, beside: bool = True) -> Iterator[Form]:
    """Forms in which ever smaller values are computed in parts; see :class:`Form`.

    Gradients are ``beside`` losses only in a step that has some.
    """
    beside = beside and has_losses(joint)
    table, made = joint.storages, (*joint.forward, *joint.backward)
    largest_bytes = max((table.nbytes[i] for i in table.of(made)), default=0)
    for share in PART_SHARES:
        yield Form(exact, max(1, largest_bytes // share), beside)
    if exact and beside:  # logits made twice hold no gradients from forward to backward
        yield Form(exact, max(1, largest_bytes // PART_SHARES[-1]))


def way_of(line: Line) -> tuple[bool, frozenset[str]]:
    """What tells forms of a step apart: whether norms are undone, and runs in parts."""
    parts = frozenset(str(n.target) for n in line.nodes if isinstance(n.target, Parts))
    return any(map(is_inverse, line.joint.forward)), parts


def room_bytes(joint: JointGraph) -> int:
    """Most that an operation reads and makes, with the gradients of the step that are there."""
    table, given = joint.storages, joint.storages.of((*joint.given, *joint.tangents))
    returned = table.of(joint.gradients) - given
    there: frozenset[int] = frozenset()
    most_bytes = 0
    for node in (*joint.forward, *joint.backward):
        own = table.of((node, *node.all_input_nodes)) - given
        working = parts.part_bytes if (parts := parts_of(node)) else 0
        most_bytes = max(most_bytes, table.total(own | there) + working)
        there |= own & returned
    return most_bytes
