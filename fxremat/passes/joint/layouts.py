"""Give tensors the layouts in which kernels really leave them, where traces are wrong.

A fake kernel may return another layout than the real one. That of ``layer_norm``'s backward keeps
the strides of the gradient, where the result of the real one is contiguous. A later operation then
reads another layout than was traced: it takes another kernel, a view of it may not exist, and what
is measured by the trace is not what runs.
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
"""Returns how the real kernel of an operation leaves its results, at the sizes of the capture.

It is given the operation, its arguments and its keywords, with tensors without data among them.
``None`` stands for the layouts of the fake kernel."""


def as_kernels_leave(module: fx.GraphModule, left: Left) -> fx.GraphModule:
    """Return a joint graph whose traced tensors have the layouts in which kernels leave them.

    Args:
        module: the joint graph; it is not changed.
        left: returns how the kernel of an operation leaves its results, see :data:`Left`.

    Ensures: inputs keep their layouts; views share storages as before.

    Returns ``module`` itself where every layout is as traced, or where the operations cannot be
    traced again.
    """
    graph = copy_of(module.graph)
    inputs = graph.find_nodes(op="placeholder")
    mode = torch_compat.fake_mode_of(t for n in inputs for t in tensors_of(n))
    relaid: set[fx.Node] = set()
    for node in graph.nodes:
        reads_relaid = not relaid.isdisjoint(node.all_input_nodes)
        if not (reads_relaid or isinstance(node.target, torch._ops.OpOverload)):
            continue  # other nodes may have no value
        if node.op != "call_function":
            continue
        try:
            value = node.meta["val"]
            if reads_relaid:
                value = _traced_again(node, mode)
            actual = _as_left(node, value, left, mode)
        except (RuntimeError, ValueError, TypeError, KeyError):
            return module
        if reads_relaid or actual is not value:
            node.meta["val"] = actual
            node.meta.pop("tensor_meta", None)
            relaid.add(node)
    return torch_compat.graph_module(module, graph) if relaid else module


def _traced_again(node: fx.Node, mode: Any) -> Any:
    """Return the fake result of ``node``, traced again because layouts of its arguments changed.

    A ``view`` that does not exist in the new layout becomes a view of a copy, as ``reshape`` makes
    it; the copy is added to the graph.
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
    """Return ``value``, the fake result of ``node``, in the layouts in which the kernel leaves it.

    Returns ``value`` itself where they are as traced.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return value
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    layouts = left(node.target, args, kwargs)
    tensors = [t for t in _items(value) if isinstance(t, torch.Tensor)]
    if layouts is None or len(layouts) != len(tensors):
        return value
    each = iter(layouts)

    def relaid(item: Any) -> Any:
        return _relaid(item, next(each), mode) if isinstance(item, torch.Tensor) else item

    items = list(map(relaid, _items(value)))
    if all(one is other for one, other in zip(items, _items(value), strict=True)):
        return value
    return type(value)(items) if isinstance(value, (tuple, list)) else items[0]


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else (value,)


def _relaid(tensor: torch.Tensor, layout: Layout, mode: Any) -> torch.Tensor:
    """Return ``tensor`` if it has ``layout``, otherwise a fake tensor that has, in a new storage.

    Raises:
        ValueError: sizes are symbols, and the strides are not those of a dense tensor.
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
        permuted = dense.permute([order.index(dim) for dim in range(len(shape))])
    strides = tuple(map(torch_compat.hint_of, permuted.stride()))
    if _counted_strides(shape, strides) != _counted_strides(shape, layout.stride):
        raise ValueError(f"{strides} are not {layout.stride}")
    return permuted


def _counted_strides(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of dimensions with more than one element; the others mean nothing."""
    if 0 in shape:
        return ()
    return tuple(s for n, s in zip(shape, stride, strict=True) if n != 1)
