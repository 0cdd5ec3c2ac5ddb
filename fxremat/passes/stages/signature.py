"""What makes two blocks, or two operations, the same: code, shapes, dtypes, strides."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from fxremat.passes.joint.sizes import Following
from fxremat.passes.joint.storage import StorageTable
from fxremat.passes.stages.block import Block, call_of

Key = tuple[object, ...]


def tensor_key(tensor: object) -> Key:
    """Dtype, shape, strides, offset and device: all that a kernel's choice depends on."""
    if not isinstance(tensor, torch.Tensor):
        return (repr(tensor),)
    return (
        str(tensor.dtype),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.storage_offset(),
        int(tensor.untyped_storage().nbytes()),  # of a part, a symbol though its shape is none
        str(tensor.device),
    )


def node_key(node: fx.Node, block: Block) -> Key:
    """Of one operation as ``block`` runs it."""
    target, args, kwargs = call_of(node, block.mode_of(node))
    return _call_key(target, args, kwargs, lambda n: tensor_key(n.meta.get("val")))


def block_key(block: Block, storages: StorageTable) -> Key:
    """Of a block: equal keys mean that one piece of code can stand for both.

    Inputs that share a storage are told from inputs that do not.
    """
    index: dict[fx.Node, int] = {}
    shared: dict[tuple[int, ...], int] = {}
    inputs = []
    for node in block.inputs:
        index[node] = len(index)
        group = shared.setdefault(storages.of_node[node], len(shared))
        inputs.append((tensor_key(node.meta["val"]), group))
    lines = []
    for node in block.nodes:
        target, args, kwargs = call_of(node, block.mode_of(node))
        held = tuple(index[n] for n in block.waits.get(node, ()))
        lines.append((*_call_key(target, args, kwargs, lambda n: ("%", index[n])), held))
        index[node] = len(index)
    outputs = tuple(index[n] for n in block.outputs)
    return (block.mode, tuple(inputs), tuple(lines), outputs)


def _call_key(
    target: object,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    describe: Callable[[fx.Node], Key],
) -> Key:
    def freeze(value: object) -> object:
        if isinstance(value, fx.Node):
            return describe(value)
        if isinstance(value, (tuple, list)):
            return tuple(freeze(item) for item in value)
        if isinstance(value, slice):
            return ("slice", freeze(value.start), freeze(value.stop), freeze(value.step))
        if isinstance(value, Following):
            return (type(value).__name__, str(value), value.value)
        if isinstance(value, float):
            return ("float", value.hex())  # 0.0 and -0.0, 1 and 1.0 are not the same
        return (type(value).__name__, str(value))

    named = tuple((name, freeze(value)) for name, value in sorted(kwargs.items()))
    return (_target_name(target), freeze(args), named)


def _target_name(target: object) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    module = getattr(target, "__module__", "")
    return f"{module}.{getattr(target, '__qualname__', target)}"
