"""Measures single operations of graphs that fxremat has not traced itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.costs.measured.cache import CostCache
from fxremat.costs.measured.execute import Operations, undisturbed
from fxremat.costs.measured.synthetic import made_up
from fxremat.passes.joint.graph import is_getitem, tensors_of
from fxremat.passes.stages.block import Block, Mode


def alone_s(node: fx.Node, cache: CostCache) -> float:
    """Return the seconds of an operation, measured by itself with made-up values.

    Sizes are those of the capture. A view, or an operation that returns no tensor, takes 0 seconds.

    Args:
        node: node of a traced graph, which is not changed.
        cache: measurements of such operations. New ones are added.

    Ensures:
        The random generators are as before, and no symbol of a size is specialized.

    Raises:
        CostError: the operation cannot be run by itself.
        GraphError: the operation or one of its inputs was traced without a value.
    """
    keys = {torch_compat.storage_key(t) for n in node.all_input_nodes for t in tensors_of(n)}
    results = list(tensors_of(node))
    if is_getitem(node) or all(torch_compat.storage_key(t) in keys for t in results):
        return 0.0
    graph = fx.Graph()
    inputs: dict[fx.Node, Any] = {}

    def sized(source: fx.Node) -> Any:
        value = source.meta["val"]
        if not isinstance(value, torch.Tensor):
            return torch_compat.hint_of(value)
        if source not in inputs:
            inputs[source] = graph.placeholder(source.name)
            inputs[source].meta["val"] = _empty_like(value)
        return inputs[source]

    device = results[0].device
    with undisturbed(device):
        args: Any = fx.map_arg(node.args, sized)
        kwargs: Any = fx.map_arg(node.kwargs, sized)
        copy = graph.create_node(node.op, node.target, args, kwargs, name=node.name)
        copy.meta["val"] = tuple(_empty_like(t) for t in results)
        block = Block(0, Mode.FIRST, (copy,), tuple(inputs.values()))
        operations = Operations(cache, device=device)
        (key,) = operations.keys(block).values()
        if key not in cache.operation_s:
            values = {n: made_up(n.meta["val"]) for n in block.inputs}
            operations.run(block, values, again=block)
    return cache.operation_s[key]


def _empty_like(traced: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor with the sizes and strides that ``traced`` has at its capture."""
    shape, stride = (
        [torch_compat.hint_of(size) for size in sizes] for sizes in (traced.shape, traced.stride())
    )
    return torch.empty_strided(shape, stride, dtype=traced.dtype, device=traced.device)
