"""Losses whose results for all rows follow from one number a row."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.passes.joint.graph import fake_result, is_getitem, tensors_of
from fxremat.passes.joint.sizes import LAYOUTS, Layout, layouts_of, product

aten = torch.ops.aten

NONE = 0
"""Of the reductions that a loss has: a number for each row."""

IGNORED = -100
"""The class of rows that do not count."""


def by_rows(module: fx.GraphModule) -> fx.GraphModule:
    """The graph with the likelihood of each row's own class as a value in place of all classes'.

    Their mean is made of a matrix of one column then, by the same operation, which adds up the same
    numbers in the same order: no bit changes. A loss with weights of its classes, or of images,
    stays as it is.
    """
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, values))
    mode = torch_compat.fake_mode_of(t for n in graph.nodes for t in tensors_of(n))
    for node in graph.find_nodes(op="call_function", target=aten.nll_loss_forward.default):
        scores, target, weight, reduction, ignored = node.args
        if weight is not None or reduction == NONE or len(layouts_of(scores)[0].shape) != 2:
            continue
        with graph.inserting_before(node):
            each = _call(graph, node, mode, node.target, scores, target, None, NONE, ignored)
            (_, total) = each.meta["val"]
            (rows,) = layouts_of(target)[0].shape
            own = _call(graph, node, mode, operator.getitem, each, 0, rows=rows)
            negated = _call(graph, node, mode, aten.neg.default, own, rows=rows)
            column = _call(graph, node, mode, aten.unsqueeze.default, negated, 1)
            out = _call(graph, node, mode, aten.eq.Scalar, target, ignored, rows=rows)
            classes = _call(graph, node, mode, aten.mul.Tensor, out, IGNORED, rows=rows)
        _lay(column, (rows, 1))
        _lay(each, (rows,), total.shape)
        node.args = (column, classes, None, reduction, IGNORED)
    return torch_compat.graph_module(module, graph)


def _call(
    graph: fx.Graph, loss: fx.Node, mode: Any, target: Any, *args: Any, rows: int | None = None
) -> fx.Node:
    """A call for ``loss``, which returns a vector of ``rows`` where that is given."""
    made = graph.call_function(target, args)
    made.meta = {k: v for k, v in loss.meta.items() if k not in ("val", LAYOUTS, "tensor_meta")}
    if is_getitem(made):
        made.meta["val"] = args[0].meta["val"][args[1]]
    else:
        made.meta["val"] = fake_result((target, args, {}), mode)
    if rows is not None:
        _lay(made, (rows,))
    return made


def _lay(node: fx.Node, *shapes: tuple[int, ...]) -> None:
    """Let the tensors that a node returns, of these shapes, be dense."""
    node.meta[LAYOUTS] = tuple(
        Layout(
            tuple(shape),
            tuple(product(shape[i + 1 :]) for i in range(len(shape))),
            0,
            product((*shape, tensor.element_size())),
        )
        for shape, tensor in zip(shapes, tensors_of(node), strict=True)
    )
