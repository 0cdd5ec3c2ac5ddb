"""Losses of many rows: each row by itself, and its gradient as soon as the row is there."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.passes.joint.graph import JointGraph, fake_result, is_getitem, is_tensor, tensors_of
from fxremat.passes.joint.sizes import LAYOUTS, Layout, layouts_of, product
from fxremat.passes.split.beside import beside
from fxremat.runtime.expected import Expected

aten = torch.ops.aten

_LOSS = aten.nll_loss_forward.default

NONE = 0
"""Of the reductions that a loss has: a number for each row."""

IGNORED = -100
"""The class of rows that do not count."""


def has_losses(joint: JointGraph) -> bool:
    """Whether the step has a loss over classes."""
    return bool(joint.module.graph.find_nodes(op="call_function", target=_LOSS))


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
    for node in graph.find_nodes(op="call_function", target=_LOSS):
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


def gradients_beside(
    joint: JointGraph, most_bytes: int, expected: dict[str, Expected] | None
) -> fx.GraphModule:
    """The graph with large gradients of losses computed in the forward.

    Neither they nor what they are computed from need be computed in the backward then, once more:
    what is smaller is kept. With ``expected`` gradients of the step's results it is what
    :class:`~fxremat.passes.split.beside.Beside` gives, with the bits that it has as traced. Without
    it is computed for a loss's gradient of 1, and multiplied in the backward by the real one, which
    rounds it once more; ``float16`` has no room for gradients of a loss that is not scaled: such a
    loss stays as it is.

    Args:
        joint: the step, its losses :func:`by_rows`; it is not changed.
        most_bytes: gradients of losses that take more are computed so.
        expected: by the gradient's name, of all forms of the step; further ones are added.
    """
    copied: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    graph.output(graph.graph_copy(joint.module.graph, copied))
    mode = torch_compat.fake_mode_of(t for n in graph.nodes for t in tensors_of(n))
    late = {copied[n] for n in (*joint.backward, *joint.tangents)}
    for node in graph.find_nodes(op="call_function", target=aten.nll_loss_backward.default):
        given: Any = node.args
        gradient, _, _, weight, reduction, _, total = given
        (layout,) = layouts_of(node)
        is_large = layout.storage_bytes > most_bytes and len(layout.shape) == 2
        if not is_large or gradient not in late or weight is not None or reduction == NONE:
            continue
        chain = [] if expected is None else sorted(n for n in _needed([gradient]) if n in late)
        multiples = _multiples(node)
        small = any(n.meta["val"].dtype is torch.float16 for n in multiples)
        if (
            (small and expected is None)
            or not multiples
            or not all(map(_is_number, (gradient, *chain)))
        ):
            continue
        with graph.inserting_before(node):
            one, roots = _foreseen(graph, node, mode, gradient, chain, expected)
            counted = _counted(graph, node, mode, total.args[0])
        node.args = (one, *given[1:-1], counted)
        for early in _needed(multiples):
            early.meta["partitioner_tag"] = "is_forward"
        for early in multiples:
            later = [user for user in early.users if user not in multiples]
            if later:
                with graph.inserting_after(early):
                    if expected is None:
                        scaled = _call(graph, early, mode, aten.mul.Tensor, early, gradient)
                    else:
                        gradients = (gradient, one, *roots, *roots.values())
                        scaled = _call(graph, early, mode, beside, early, *gradients)
                scaled.meta["partitioner_tag"] = "is_backward"
                _lay(scaled, layouts_of(early)[0].shape)
                for user in later:
                    user.replace_input_with(early, scaled)
    return torch_compat.graph_module(joint.module, graph)


def largest_gradient_bytes(joint: JointGraph) -> int:
    """Of the largest gradient of a loss over classes, that of its scores; 0: there is none."""
    found = (n for n in joint.backward if n.target is aten.nll_loss_backward.default)
    return max((layouts_of(n)[0].storage_bytes for n in found), default=0)


def _is_number(node: fx.Node) -> bool:
    """Whether it is computed, without chance, as one number, or given as one."""
    is_one = is_tensor(node) and math.prod(map(int, layouts_of(node)[0].shape)) == 1
    return is_one and not torch_compat.draws_random_numbers(node)


def _foreseen(
    graph: fx.Graph,
    loss: fx.Node,
    mode: Any,
    gradient: fx.Node,
    chain: Sequence[fx.Node],
    expected: dict[str, Expected] | None,
) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
    """What the gradient of ``loss`` is, as ``chain`` computes it, if gradients of the step's
    results are as expected, and these, by real ones; 1 where none are expected.
    """
    values: dict[fx.Node, fx.Node] = {}
    roots: dict[fx.Node, fx.Node] = {}

    def of(node: fx.Node) -> fx.Node:
        if node not in values and (torch_compat.is_tangent(node) or node is gradient):
            val = node.meta["val"]
            like = {"dtype": val.dtype, "device": val.device}
            shape, full = list(val.shape), aten.full.default
            if expected is None:
                values[node] = _call(graph, loss, mode, full, shape, 1.0, **like)
            else:
                own = expected.setdefault(node.name, Expected(f"expected_{node.name}"))
                values[node] = roots[node] = _call(graph, loss, mode, own, shape, *like.values())
        return values.get(node, node)

    for node in chain:
        args: Any = fx.node.map_arg(node.args, of)
        kwargs: Any = fx.node.map_arg(dict(node.kwargs), of)
        values[node] = _call(graph, loss, mode, node.target, *args, **kwargs)
    return of(gradient), roots


def _counted(graph: fx.Graph, loss: fx.Node, mode: Any, mean: fx.Node) -> fx.Node:
    """How many rows count, as ``mean`` counts them: it is of one column, see :func:`by_rows`."""
    given: Any = mean.args
    column, classes, *others = given
    (rows,) = layouts_of(classes)[0].shape
    dtype = column.meta["val"].dtype
    zeros = _call(graph, loss, mode, aten.zeros_like.default, classes, dtype=dtype)
    other = _call(graph, loss, mode, aten.unsqueeze.default, zeros, 1)
    counted = _call(graph, loss, mode, mean.target, other, classes, *others)
    _lay(zeros, (rows,))
    _lay(other, (rows, 1))
    return _call(graph, loss, mode, operator.getitem, counted, 1)


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
            if not is_multiple or others:
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
