"""Losses of many rows: each row by itself, and its gradient as soon as the row is there."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.passes.joint.graph import JointGraph, fake_result, is_getitem, tensors_of
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


LINEAR: Mapping[object, int] = {
    aten._log_softmax_backward_data.default: 0, aten.tanh_backward.default: 0,
    aten.mul.Tensor: 0, aten.mul.Scalar: 0, aten.div.Tensor: 0, aten.div.Scalar: 0,
    aten.neg.default: 0, aten._to_copy.default: 0, aten.clone.default: 0, aten.sum.dim_IntList: 0,
    aten.view.default: 0, aten._unsafe_view.default: 0, aten.reshape.default: 0, aten.t.default: 0,
    aten.transpose.int: 0, aten.permute.default: 0, aten.unsqueeze.default: 0,
    aten.squeeze.dim: 0, aten.squeeze.dims: 0, aten.slice.Tensor: 0, aten.slice_backward.default: 0,
}  # fmt: skip
"""Operators, and the argument of which their results are multiples; of a product it is either."""

PRODUCTS = (aten.mm.default, aten.bmm.default)


def gradients_beside(joint: JointGraph, most_bytes: int) -> fx.GraphModule:
    """The graph with large gradients of losses computed in the forward, as if the loss's were 1.

    Neither they nor what they are computed from need be computed in the backward then, once more:
    what is smaller is kept, and multiplied by the loss's gradient there, which rounds it once more.
    ``float16`` has no room for gradients of a loss that is not scaled: such a loss stays as it is.

    Args:
        joint: the step; it is not changed.
        most_bytes: gradients of losses that take more are computed so.
    """
    copied: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    graph.output(graph.graph_copy(joint.module.graph, copied))
    mode = torch_compat.fake_mode_of(t for n in graph.nodes for t in tensors_of(n))
    late = {copied[n] for n in (*joint.backward, *joint.tangents)}
    for node in graph.find_nodes(op="call_function", target=aten.nll_loss_backward.default):
        gradient, _, target, weight, reduction, ignored, _ = node.args
        is_large = layouts_of(node)[0].storage_bytes > most_bytes
        if not is_large or gradient not in late or weight is not None or reduction == NONE:
            continue
        multiples = _multiples(node)
        if not multiples:
            continue
        with graph.inserting_before(node):
            val = gradient.meta["val"]
            like = {"dtype": val.dtype, "device": val.device}
            one = _call(graph, node, mode, aten.full.default, [], 1.0, **like)
            counts = _call(graph, node, mode, aten.ne.Scalar, target, ignored)
            counted = _call(graph, node, mode, aten.sum.default, counts)
            total = _call(graph, node, mode, aten._to_copy.default, counted, dtype=val.dtype)
        _lay(counts, layouts_of(target)[0].shape)
        node.args = (one, *node.args[1:-1], total)
        for early in (one, counts, counted, total, *_needed(multiples)):
            early.meta["partitioner_tag"] = "is_forward"
        for early in multiples:
            later = [user for user in early.users if user not in multiples]
            if later:
                with graph.inserting_after(early):
                    scaled = _call(graph, early, mode, aten.mul.Tensor, early, gradient)
                scaled.meta["partitioner_tag"] = "is_backward"
                _lay(scaled, layouts_of(early)[0].shape)
                for user in later:
                    user.replace_input_with(early, scaled)
    return torch_compat.graph_module(joint.module, graph)


def _needed(nodes: Iterable[fx.Node]) -> dict[fx.Node, None]:
    """Nodes, and all that they are computed from."""
    found: dict[fx.Node, None] = {}
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node.op == "call_function" and node not in found:
            found[node] = None
            waiting.extend(node.all_input_nodes)
    return found


def _multiples(loss: fx.Node) -> dict[fx.Node, None]:
    """A loss's gradient, and its multiples, through those that are as large; none where something
    else reads such a one.
    """

    def size(node: fx.Node) -> int:
        return int(product(layouts_of(node)[0].shape))

    found = {loss: None}
    node = loss.next
    while node.op != "root":
        read = [n for n in node.all_input_nodes if n in found and 2 * size(n) > size(loss)]
        if read:
            place = LINEAR.get(node.target)
            is_multiple = node.op == "call_function" and (
                node.target in PRODUCTS or (place is not None and node.args[place] is read[0])
            )
            others = len(found.keys() & {*node.all_input_nodes}) > 1
            if not is_multiple or others or node.meta["val"].dtype is torch.float16:
                return {}
            if 2 * size(node) <= size(loss) and not node.meta["val"].is_contiguous():
                return {}  # what it is multiplied to would lie otherwise
            found[node] = None
        node = node.next
    return found


def _call(
    graph: fx.Graph,
    loss: fx.Node,
    mode: Any,
    target: Any,
    *args: Any,
    rows: int | None = None,
    **kwargs: Any,
) -> fx.Node:
    """A call for ``loss``, which returns a vector of ``rows`` where that is given."""
    made = graph.call_function(target, args, kwargs)
    made.meta = {k: v for k, v in loss.meta.items() if k not in ("val", LAYOUTS, "tensor_meta")}
    if is_getitem(made):
        made.meta["val"] = args[0].meta["val"][args[1]]
    else:
        made.meta["val"] = fake_result((target, args, kwargs), mode)
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
