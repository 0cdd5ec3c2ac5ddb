"""Seconds of an operation of a graph that somebody else has traced, measured by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.costs.cache import CostCache
from fxremat.costs.execute import Operations, undisturbed
from fxremat.costs.synthetic import made_up
from fxremat.passes.joint.graph import is_getitem, tensors_of
from fxremat.passes.stages.block import Block, Mode


def alone_s(node: fx.Node, cache: CostCache) -> float:
    """Seconds of an operation, of made-up numbers, at the sizes of its capture.

    A view, and whatever returns no tensor, takes none.

    Args:
        node: of a traced graph, which is not changed.
        cache: of such operations alone; new measurements are added.

    Ensures: the random generators are as before, and no symbol of a size is settled.

    Raises:
        CostError: it cannot be run alone.
        GraphError: it, or what it reads, was traced without a value.
    """
    keys = {torch_compat.storage_key(t) for n in node.all_input_nodes for t in tensors_of(n)}
    results = list(tensors_of(node))
    if is_getitem(node) or all(torch_compat.storage_key(t) in keys for t in results):
        return 0.0
    graph = fx.Graph()
    inputs: dict[fx.Node, Any] = {}

    def sized(given: fx.Node) -> Any:
        value = given.meta["val"]
        if not isinstance(value, torch.Tensor):
            return torch_compat.hint_of(value)
        if given not in inputs:
            inputs[given] = graph.placeholder(given.name)
            inputs[given].meta["val"] = _laid_out(value)
        return inputs[given]

    device = results[0].device
    with undisturbed(device):
        args: Any = fx.map_arg(node.args, sized)
        kwargs: Any = fx.map_arg(node.kwargs, sized)
        alone = graph.create_node(node.op, node.target, args, kwargs, name=node.name)
        alone.meta["val"] = tuple(_laid_out(t) for t in results)
        block = Block(0, Mode.FIRST, (alone,), tuple(inputs.values()))
        operations = Operations(cache, device=device)
        (key,) = operations.keys(block).values()
        if key not in cache.operation_s:
            values = {n: made_up(n.meta["val"]) for n in block.inputs}
            operations.run(block, values, again=block)
    return cache.operation_s[key]


def _laid_out(traced: torch.Tensor) -> torch.Tensor:
    """An empty tensor with the sizes and strides of ``traced`` at its capture."""
    shape, stride = (
        [torch_compat.hint_of(size) for size in sizes] for sizes in (traced.shape, traced.stride())
    )
    return torch.empty_strided(shape, stride, dtype=traced.dtype, device=traced.device)
