"""What an operation is to a compiler of kernels: part of one, a look at memory, or on its own."""

from __future__ import annotations

from enum import Enum

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.passes.joint import rng
from fxremat.passes.joint.graph import JointGraph
from fxremat.passes.joint.invert import is_inverse
from fxremat.passes.joint.storage import tensors_of
from fxremat.passes.stages.block import is_getitem
from fxremat.passes.stages.linearize import is_old_value

aten, prims = torch.ops.aten, torch.ops.prims


class Kind(Enum):
    """How an operation may run."""

    POINTWISE = "pointwise"
    """In a kernel with others; each element is computed by itself, so any kernel may repeat it."""
    REDUCTION = "reduction"
    """In a kernel with others; what it sums over is read whole."""
    VIEW = "view"
    """It looks at memory that is there, or picks one of several such looks."""
    VALUE = "value"
    """It picks one result of an operation with several."""
    ALONE = "alone"
    """As torch runs it: products, convolutions, random draws, all that is not known."""

    @property
    def fuses(self) -> bool:
        """Whether it can be part of a kernel with others."""
        return self in (Kind.POINTWISE, Kind.REDUCTION)


POINTWISE = {
    aten._to_copy.default, aten.arange.start_step, aten.cat.default, aten.clone.default,
    aten.constant_pad_nd.default, aten.full.default, aten.full_like.default, aten.gather.default,
    aten.scalar_tensor.default, aten.select_scatter.default, aten.slice_scatter.default,
    aten.where.ScalarOther, aten.where.ScalarSelf, prims.iota.default,
    aten.as_strided_scatter.default, aten._unsafe_index.Tensor, aten.repeat.default,
    aten.flip.default,
}  # fmt: skip
"""Beside those that torch tags so."""

DTYPES = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
}  # fmt: skip


def kinds_of(joint: JointGraph) -> dict[fx.Node, Kind]:
    """Of all operations."""
    found: dict[fx.Node, Kind] = {}
    for node in (*joint.forward, *joint.backward):
        found[node] = _kind(node, joint, found)
    return found


def _kind(node: fx.Node, joint: JointGraph, known: dict[fx.Node, Kind]) -> Kind:
    table = joint.storages
    own = table.of_node[node]
    if own and table.of(node.all_input_nodes).issuperset(own):
        source = known.get(node.all_input_nodes[0])
        if not is_getitem(node) or source is Kind.VIEW:
            return Kind.VIEW
    if is_getitem(node):
        return Kind.VALUE
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return Kind.ALONE
    kept = rng.is_state(node) or is_old_value(joint, node)  # nothing can compute it again
    random = rng.is_draw(node) or torch.Tag.nondeterministic_seeded in target.tags
    if kept or random or is_inverse(node) or not _is_plain(node, joint):
        return Kind.ALONE
    if target in POINTWISE or torch.Tag.pointwise in target.tags:
        return Kind.POINTWISE
    return Kind.REDUCTION if torch_compat.is_reduction(target) else Kind.ALONE


def _is_plain(node: fx.Node, joint: JointGraph) -> bool:
    """Whether all its tensors are of usual dtypes and on the device of the step."""
    tensors = [t for n in (node, *node.all_input_nodes) for t in tensors_of(n)]
    return all(t.dtype in DTYPES and t.device == joint.device for t in tensors)
