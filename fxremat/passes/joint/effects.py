"""Make an operation that runs exactly once of each operator with an ordered effect.

AOTAutograd passes such operators a token, and has each return a token for the next one. The first
token of a graph is one of its inputs, whose value is ``None`` in calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.passes.joint.graph import copy_of
from fxremat.passes.joint.sizes import layouts_of
from fxremat.runtime.effects import Effect


def with_effects(module: fx.GraphModule) -> fx.GraphModule:
    """Return a joint graph in which each operator with an ordered effect is an ``Effect`` node.

    Args:
        module: the joint graph; it is not changed.

    Requires: no size is a symbol.
    Ensures: an ``Effect`` reads the token of the previous one, and the first reads none.

    Returns ``module`` itself where no operator has an effect.
    """
    if not any(map(has_ordered_effect, module.graph.nodes)):
        return module
    graph = copy_of(module.graph)
    for node in filter(has_ordered_effect, graph.nodes):
        token, *args = node.args
        is_first = isinstance(token, fx.Node) and token.op == "placeholder"
        node.target = Effect(node.target, _results(node))
        node.args = (None if is_first else token, *args)
    graph.lint()
    return torch_compat.graph_module(module, graph)


def _results(node: fx.Node) -> list[tuple[Any, ...] | None]:
    """Return shape, strides, dtype and device of each result of an effect, without the token."""
    layouts = iter(layouts_of(node)[1:])
    described: list[tuple[Any, ...] | None] = []
    for value in node.meta["val"][1:]:
        if isinstance(value, torch.Tensor):
            layout = next(layouts)
            shape, stride = tuple(map(int, layout.shape)), tuple(map(int, layout.stride))
            described.append((shape, stride, value.dtype, value.device))
        else:
            described.append(None)
    return described


def has_ordered_effect(node: fx.Node) -> bool:
    """Return whether ``node`` calls torch's operator for ordered effects, as it was traced."""
    return torch_compat.has_ordered_effect(getattr(node.target, "function", node.target))


def is_effect(node: fx.Node) -> bool:
    """Return whether ``node`` is an operation that :func:`with_effects` has made."""
    return isinstance(node.target, Effect)
