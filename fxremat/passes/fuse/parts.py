"""What is never one unit though it could be: each has its own reason to run again, or not to.

A unit runs whole. So what nothing runs again, and sums that take long and leave little to keep, are
apart from what may well be computed again: what a norm gives is, of its statistics, little work.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from torch import fx

from fxremat.passes.fuse.again import bases
from fxremat.passes.fuse.kinds import Kind
from fxremat.passes.fuse.levels import readers_of
from fxremat.passes.joint import batchnorm
from fxremat.passes.joint.graph import JointGraph
from fxremat.passes.joint.storage import is_tensor, tensors_of
from fxremat.passes.stages.linearize import is_old_value


class Part(IntEnum):
    """Of what a level computes; those that read another part's of it come a level later."""

    AGAIN = 0
    """Any operation."""
    SUMS = 1
    """A forward's sums over the first dimension, what leads to these alone, and small values
    computed of them alone. A kernel has read all of its inputs before it knows one; sums along
    rows are known while the row is still at hand."""
    ONCE = 2
    """New values of mutated inputs, what reads old ones, and what leads to these alone: the old
    values are gone by the time at which it could run again."""


def parts_of(joint: JointGraph, kinds: Mapping[fx.Node, Kind]) -> dict[fx.Node, Part]:
    """Of each operation that is not just any."""
    sums = dict.fromkeys(_sums(joint, kinds), Part.SUMS)
    return sums | dict.fromkeys(_once(joint, kinds), Part.ONCE)


def _once(joint: JointGraph, kinds: Mapping[fx.Node, Kind]) -> set[fx.Node]:
    """What a forward returns is kept, so who reads that reads no old value."""
    results = {n for n in joint.forward_outputs if isinstance(n, fx.Node)}
    count = len(joint.mutated)
    once = results.intersection(joint.forward_outputs[:count])
    old = set(joint.mutated)
    for node in joint.forward:
        copies = is_old_value(joint, node) or batchnorm.updates_statistics(node)
        if not copies and not old.isdisjoint(node.all_input_nodes):
            once.add(node)
            if node not in results:
                old.add(node)
    others = results.difference(joint.forward_outputs[:count])
    for node in reversed(joint.forward):
        users = [u for u in node.users if u.op != "output"]
        if users and once.issuperset(users) and node not in others:
            once.add(node)
    # Results of one operation are computed with it.
    apart = {n for n in once if kinds[n] is Kind.VALUE and n.all_input_nodes[0] not in once}
    return once - apart


def _sums(joint: JointGraph, kinds: Mapping[fx.Node, Kind]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in joint.forward:
        read = [n for n in bases(node.all_input_nodes, kinds) if n not in joint.given]
        if kinds[node] is Kind.REDUCTION:
            ours = _sums_over_first(node)
        else:
            small = kinds[node] is Kind.VALUE or _numel(node) <= max(map(_numel, read), default=0)
            fuses = kinds[node] in (Kind.VALUE, Kind.POINTWISE)
            ours = fuses and small and bool(read) and found.issuperset(read)
        if ours:
            found.add(node)
    forward = set(joint.forward)
    results = {n for n in joint.forward_outputs if isinstance(n, fx.Node)}
    for node in reversed(joint.forward):
        if (kinds[node].fuses or kinds[node] is Kind.VALUE) and node not in results:
            readers = forward.intersection(readers_of(node, kinds))
            if readers and found.issuperset(readers):
                found.add(node)
    return found


def _numel(node: fx.Node) -> int:
    return max((int(t.numel()) for t in tensors_of(node)), default=0)


def _sums_over_first(node: fx.Node) -> bool:
    """Whether a reduction is over the first dimension of what it reads, maybe among others."""
    source = node.all_input_nodes[0]
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    if not is_tensor(source) or "dim" not in names:
        return True
    place = names.index("dim")
    dims = node.kwargs.get("dim", node.args[place] if place < len(node.args) else None)
    rank = max(int(source.meta["val"].dim()), 1)
    given = [dims] if isinstance(dims, int) else list(dims or range(rank))  # type: ignore[arg-type]
    return any(dim % rank == 0 for dim in given)
