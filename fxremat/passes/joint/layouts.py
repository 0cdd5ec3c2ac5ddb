"""Tensors lie as kernels really leave them, and not as their traces say.

A fake kernel may lay its result otherwise than the real one does: that of ``layer_norm``'s backward
keeps the strides of its gradient, where the real one is contiguous. What runs later then reads
another layout than was traced: it takes another kernel, a view of it may not exist, and what is
measured by the trace is not what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.passes.joint.graph import copy_of, copy_origin, fake_result, tensors_of
from fxremat.passes.joint.sizes import Layout

aten = torch.ops.aten

Left = Callable[[Any, Sequence[Any], dict[str, Any]], Sequence[Layout] | None]
"""How the real kernel of an operation leaves its results for such arguments, tensors without data
among them, at the sizes of the capture; ``None``: as the fake one does."""


def as_kernels_leave(module: fx.GraphModule, left: Left) -> fx.GraphModule:
    """``module``, a joint graph, in which each tensor lies as its kernel leaves it.

    Args:
        module: it is not changed.
        left: asked of each operation.

    Ensures: inputs lie as they did; views share storages as before. It is ``module`` itself where
        all lie as traced, or where the operations cannot be traced again.
    """
    graph = copy_of(module.graph)
    given = graph.find_nodes(op="placeholder")
    mode = torch_compat.fake_mode_of(t for n in given for t in tensors_of(n))
    moved: set[fx.Node] = set()
    for node in graph.nodes:
        reads_moved = not moved.isdisjoint(node.all_input_nodes)
        if not (reads_moved or isinstance(node.target, torch._ops.OpOverload)):
            continue  # others may have no value
        if node.op != "call_function":
            continue
        try:
            value = node.meta["val"]
            if reads_moved:
                value = _traced_again(node, mode)
            now = _as_left(node, value, left, mode)
        except (RuntimeError, ValueError, TypeError, KeyError):
            return module
        if reads_moved or now is not value:
            node.meta["val"] = now
            node.meta.pop("tensor_meta", None)
            moved.add(node)
    return torch_compat.graph_module(module, graph) if moved else module


def _traced_again(node: fx.Node, mode: Any) -> Any:
    """What ``node`` returns, without data, for arguments that lie otherwise than they did.

    Where these have no such view any more, it becomes one of a copy, as ``reshape`` makes it.
    """
    try:
        return fake_result((node.target, node.args, node.kwargs), mode)
    except (RuntimeError, ValueError):
        if node.target is not aten.view.default:
            raise
    (source,) = node.all_input_nodes[:1]
    with node.graph.inserting_before(node):
        options: dict[str, Any] = {"memory_format": torch.contiguous_format}
        dense = node.graph.call_function(aten.clone.default, (source,), options)
    copy_origin(node, dense)
    dense.meta["val"] = fake_result((dense.target, dense.args, dense.kwargs), mode)
    node.replace_input_with(source, dense)
    return fake_result((node.target, node.args, node.kwargs), mode)


def _as_left(node: fx.Node, value: Any, left: Left, mode: Any) -> Any:
    """``value``, what ``node`` returns without data, as its kernel leaves it."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return value
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    layouts = left(node.target, args, kwargs)
    tensors = [t for t in _items(value) if isinstance(t, torch.Tensor)]
    if layouts is None or len(layouts) != len(tensors):
        return value
    each = iter(layouts)

    def laid(item: Any) -> Any:
        return _laid(item, next(each), mode) if isinstance(item, torch.Tensor) else item

    moved = list(map(laid, _items(value)))
    if all(one is other for one, other in zip(moved, _items(value), strict=True)):
        return value
    return type(value)(moved) if isinstance(value, (tuple, list)) else moved[0]


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else (value,)


def _laid(tensor: torch.Tensor, layout: Layout, mode: Any) -> torch.Tensor:
    """``tensor``, or one with a new storage in this layout.

    Raises:
        ValueError: its sizes are symbols, of which such strides are no products.
    """
    shape = tuple(map(torch_compat.hint_of, tensor.shape))
    traced = tuple(map(torch_compat.hint_of, tensor.stride()))
    if layout.shape != shape or _counted_strides(shape, layout.stride) == _counted_strides(
        shape, traced
    ):
        return tensor
    if not torch_compat.has_symbols(tensor):
        storage = torch_compat.meta_storage(layout.storage_bytes)
        return torch_compat.fake_tensor(tensor, storage, shape, layout.stride, layout.offset)
    order = sorted(range(len(shape)), key=lambda dim: (-layout.stride[dim], dim))
    with mode, torch.no_grad():
        dense = torch.empty(
            [tensor.shape[dim] for dim in order], dtype=tensor.dtype, device=tensor.device
        )
        found = dense.permute([order.index(dim) for dim in range(len(shape))])
    strides = tuple(map(torch_compat.hint_of, found.stride()))
    if _counted_strides(shape, strides) != _counted_strides(shape, layout.stride):
        raise ValueError(f"{strides} are not {layout.stride}")
    return found


def _counted_strides(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The strides of dimensions that have a second element."""
    if 0 in shape:
        return ()
    return tuple(s for n, s in zip(shape, stride, strict=True) if n != 1)
