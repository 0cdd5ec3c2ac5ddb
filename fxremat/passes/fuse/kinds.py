"""What an operation is to a compiler of kernels: part of a kernel, a view, or unfused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum, IntEnum

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.passes.joint import batchnorm, rng
from fxremat.passes.joint.constraints import may_run_again
from fxremat.passes.joint.graph import JointGraph, is_getitem, is_tensor, tensors_of

aten, prims = torch.ops.aten, torch.ops.prims


class Kind(Enum):
    """How an operation runs: in a kernel with others, by itself, or as a view or a value."""

    POINTWISE = "pointwise"
    """In a kernel with others. Elements are computed independently, so any kernel may repeat it."""
    REDUCTION = "reduction"
    """In a kernel with others, which reads all that it reduces over."""
    VIEW = "view"
    """A view of existing memory, or one of several views."""
    VALUE = "value"
    """One of several results of an operation."""
    ALONE = "alone"
    """As torch runs it: matrix products, convolutions, random draws, unknown operations."""

    @property
    def fuses(self) -> bool:
        """Whether operations of this kind can be in a kernel with others."""
        return self in (Kind.POINTWISE, Kind.REDUCTION)


POINTWISE = {
    aten._to_copy.default, aten.arange.start_step, aten.cat.default, aten.clone.default,
    aten.constant_pad_nd.default, aten.full.default, aten.full_like.default, aten.gather.default,
    aten.scalar_tensor.default, aten.select_scatter.default, aten.slice_scatter.default,
    aten.where.ScalarOther, aten.where.ScalarSelf, prims.iota.default,
    aten.as_strided_scatter.default, aten._unsafe_index.Tensor, aten.repeat.default,
    aten.flip.default,
}  # fmt: skip
"""Pointwise operations that torch does not tag as such."""

DTYPES = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
}  # fmt: skip


class Part(IntEnum):
    """Classes of operations that are never in the same kernel, although they could be.

    A unit runs as a whole, and each part has its own reason to be recomputed, or not to be. Within
    a level, an operation reads no value of a higher part.
    """

    AGAIN = 0
    """All other operations."""
    SUMS = 1
    """Sums of a forward over the first dimension, with operations that only lead to these, and
    small values that are computed from these only. They take long and leave little to keep. A
    kernel knows such a sum only after it has read all inputs, but a sum along rows while the row is
    still in cache."""
    ONCE = 2
    """New values of mutated inputs, with operations that read the old values or only lead to new
    ones. The old values no longer exist when they could be recomputed."""


Kinds = Mapping[fx.Node, Kind]


def kinds_of(joint: JointGraph) -> dict[fx.Node, Kind]:
    """Return the :class:`Kind` of each operation of the step: how it runs."""
    kinds: dict[fx.Node, Kind] = {}
    for node in (*joint.forward, *joint.backward):
        kinds[node] = _kind(node, joint, kinds)
    return kinds


def _kind(node: fx.Node, joint: JointGraph, earlier: Kinds) -> Kind:
    target = node.target
    views = joint.storages.of_node[node] and joint.storages.is_view(node)
    if is_getitem(node):
        is_view = views and earlier.get(node.all_input_nodes[0]) is Kind.VIEW
        return Kind.VIEW if is_view else Kind.VALUE
    if views:
        return Kind.VIEW
    if not isinstance(target, torch._ops.OpOverload):
        return Kind.ALONE
    kept = rng.is_state(node) or joint.is_old_value(node)  # it cannot be recomputed
    kept = kept or not may_run_again(node)  # nor may a unit that computes other values as well
    random = rng.is_draw(node) or torch.Tag.nondeterministic_seeded in target.tags
    tensors = [t for n in (node, *node.all_input_nodes) for t in tensors_of(n)]
    plain = all(t.dtype in DTYPES and t.device == joint.device for t in tensors)
    if kept or random or batchnorm.is_inverse(node) or not plain:
        return Kind.ALONE
    if target in POINTWISE or torch.Tag.pointwise in target.tags:
        return Kind.POINTWISE
    return Kind.REDUCTION if torch_compat.is_reduction(target) else Kind.ALONE


def is_fused(node: fx.Node, kinds: Kinds) -> bool:
    """Return whether ``node`` can be in a kernel with others, or picks a result of what can."""
    operation = node.all_input_nodes[0] if kinds[node] is Kind.VALUE else node
    return kinds[operation].fuses


def bases(nodes: Iterable[fx.Node], kinds: Kinds) -> Iterator[fx.Node]:
    """Yield ``nodes``, with each view replaced by the node that it is a view of."""
    for node in nodes:
        while kinds.get(node) is Kind.VIEW and node.all_input_nodes:
            node = node.all_input_nodes[0]
        yield node


def readers_of(node: fx.Node, kinds: Kinds) -> Iterator[fx.Node]:
    """Yield the nodes that read ``node`` or a view of it; views are not among them."""
    waiting = list(node.users)
    while waiting:
        user = waiting.pop()
        if kinds.get(user) is Kind.VIEW:
            waiting += user.users
        else:
            yield user


def parts_of(joint: JointGraph, kinds: Kinds) -> dict[fx.Node, Part]:
    """Return the :class:`Part` of each operation, except for those of ``Part.AGAIN``."""
    sums = dict.fromkeys(_sum_operations(joint, kinds), Part.SUMS)
    return sums | dict.fromkeys(_once_operations(joint, kinds), Part.ONCE)


def _once_operations(joint: JointGraph, kinds: Kinds) -> set[fx.Node]:
    """Return the operations that must not run again, because mutated inputs have changed by then.

    They compute new values of these inputs, or read old ones. Results are kept, so what reads a
    result reads no old value.
    """
    results = set(joint.results)
    once = results.intersection(joint.forward_outputs[: len(joint.mutated)])
    others = results - once
    old = set(joint.mutated)
    for node in joint.forward:
        copies = joint.is_old_value(node) or batchnorm.updates_statistics(node)
        if not copies and not old.isdisjoint(node.all_input_nodes):
            once.add(node)
            if node not in results:
                old.add(node)
    for node in reversed(joint.forward):
        users = [u for u in node.users if u.op != "output"]
        if users and once.issuperset(users) and node not in others:
            once.add(node)
    # A value belongs to the part of its operation.
    return {n for n in once if kinds[n] is not Kind.VALUE or n.all_input_nodes[0] in once}


def _sum_operations(joint: JointGraph, kinds: Kinds) -> set[fx.Node]:
    sums: set[fx.Node] = set()
    for node in joint.forward:
        read = [n for n in bases(node.all_input_nodes, kinds) if n not in joint.given]
        if kinds[node] is Kind.REDUCTION:
            belongs = _sums_over_first(node)
        else:
            small = kinds[node] is Kind.VALUE or _numel(node) <= max(map(_numel, read), default=0)
            fuses = kinds[node] in (Kind.VALUE, Kind.POINTWISE)
            belongs = fuses and small and bool(read) and sums.issuperset(read)
        if belongs:
            sums.add(node)
    forward, results = set(joint.forward), set(joint.results)
    for node in reversed(joint.forward):
        if (kinds[node].fuses or kinds[node] is Kind.VALUE) and node not in results:
            readers = forward.intersection(readers_of(node, kinds))
            if readers and sums.issuperset(readers):
                sums.add(node)
    return sums


def _numel(node: fx.Node) -> int:
    return max((int(t.numel()) for t in tensors_of(node)), default=0)


def _sums_over_first(node: fx.Node) -> bool:
    """Return whether a reduction includes the first dimension of what it reads."""
    source = node.all_input_nodes[0]
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    if not is_tensor(source) or "dim" not in names:
        return True
    place = names.index("dim")
    dims = node.kwargs.get("dim", node.args[place] if place < len(node.args) else None)
    rank = max(int(source.meta["val"].dim()), 1)
    given = [dims] if isinstance(dims, int) else list(dims or range(rank))  # type: ignore[arg-type]
    return any(dim % rank == 0 for dim in given)
