"""Losses of many rows: compute them row by row, with their gradients right after them."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxremat import torch_compat
from fxremat.passes.joint.graph import JointGraph, fake_result, is_getitem, is_tensor, tensors_of
from fxremat.passes.joint.sizes import LAYOUTS, Layout, layouts_of, product
from fxremat.passes.parts.early_gradients import EarlyGradients
from fxremat.passes.parts.parts import Parts
from fxremat.runtime.expected import Expected

aten = torch.ops.aten

_LOSS = aten.nll_loss_forward.default

NONE = 0
"""The reduction of a loss that returns a number for each row."""

IGNORED = -100
"""The class of rows that do not count."""


def has_losses(joint: JointGraph) -> bool:
    """Return whether the step's graph has a negative log likelihood loss (``nll_loss_forward``)."""
    return bool(joint.module.graph.find_nodes(op="call_function", target=_LOSS))


def by_rows(module: fx.GraphModule) -> fx.GraphModule:
    """Return the graph with each loss over classes computed row by row before it is reduced.

    The operation that reduced the loss then reads a matrix with one column: the log-likelihood of
    each row's own class. It adds up the same numbers in the same order, so no bit changes. Losses
    with weights of classes, and losses of images, stay as they are.
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
            picked = _call(graph, node, mode, operator.getitem, each, 0, rows=rows)
            negated = _call(graph, node, mode, aten.neg.default, picked, rows=rows)
            column = _call(graph, node, mode, aten.unsqueeze.default, negated, 1)
            out = _call(graph, node, mode, aten.eq.Scalar, target, ignored, rows=rows)
            classes = _call(graph, node, mode, aten.mul.Tensor, out, IGNORED, rows=rows)
        _set_layouts(column, (rows, 1))
        _set_layouts(each, (rows,), total.shape)
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
"""Operators with the argument that results are multiples of; for a product it is either one."""

PRODUCTS = (aten.mm.default, aten.bmm.default)


def early_gradient(early: Tensor, *_gradients: Tensor) -> Tensor:
    """Mark ``early`` in a graph under construction; :func:`gather_gradients` replaces the calls.

    ``early`` is a gradient that the forward computes for an expected gradient of a loss. The other
    arguments are the loss's real gradient, its expected one, and the gradients of the step's
    results from which these two follow: all real ones, then all expected ones.

    Returns an empty tensor like ``early``.
    """
    return torch.empty_like(early)


def gradients_with_losses(
    joint: JointGraph, most_bytes: int, expected: dict[str, Expected] | None
) -> fx.GraphModule:
    """Return the graph that computes large gradients of losses in the forward.

    The backward then recomputes neither these nor their inputs: only small values that follow from
    them, such as gradients of weights, are kept for it. With ``expected`` gradients of the step's
    results, :class:`~fxremat.passes.parts.early_gradients.EarlyGradients` returns them with their
    traced bits. Otherwise they are computed for a loss's gradient of 1, and multiplied in the
    backward by the real one, which rounds once more. Losses in ``float16``, whose range is too
    small for gradients of an unscaled loss, stay as they are.

    Args:
        joint: the step, its losses rewritten by :func:`by_rows`; it is not changed.
        most_bytes: gradients of losses that take more bytes are computed in the forward.
        expected: expected gradients, by name of the real one, which all graphs of the same step
            share; new ones are added.
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
        ancestors = () if expected is None else _with_ancestors([gradient])
        chain = sorted(n for n in ancestors if n in late)
        multiples = _multiples(node)
        small = any(n.meta["val"].dtype is torch.float16 for n in multiples)
        if (
            (small and expected is None)
            or not multiples
            or not all(map(_is_number, (gradient, *chain)))
        ):
            continue
        with graph.inserting_before(node):
            one, roots = _expected_gradient(graph, node, mode, gradient, chain, expected)
            counted = _row_count(graph, node, mode, total.args[0])
        node.args = (one, *given[1:-1], counted)
        for early in _with_ancestors(multiples):
            early.meta["partitioner_tag"] = "is_forward"
        for early in multiples:
            later = [user for user in early.users if user not in multiples]
            if later:
                with graph.inserting_after(early):
                    if expected is None:
                        scaled = _call(graph, early, mode, aten.mul.Tensor, early, gradient)
                    else:
                        gradients = (gradient, one, *roots, *roots.values())
                        scaled = _call(graph, early, mode, early_gradient, early, *gradients)
                scaled.meta["partitioner_tag"] = "is_backward"
                _set_layouts(scaled, layouts_of(early)[0].shape)
                for user in later:
                    user.replace_input_with(early, scaled)
                _move_views(scaled, early, mode)
    return torch_compat.graph_module(joint.module, graph)


def _move_views(base: fx.Node, before: fx.Node, mode: Any) -> None:
    """Let views of ``base`` lie in its storage; they were traced in that of ``before``."""
    keys = {torch_compat.storage_key(t) for t in tensors_of(before)}
    waiting = [*base.users]
    while waiting:
        node = waiting.pop()
        if node.op == "call_function" and any(
            torch_compat.storage_key(t) in keys for t in tensors_of(node)
        ):
            node.meta["val"] = fake_result((node.target, node.args, node.kwargs), mode)
            waiting.extend(node.users)


def gather_gradients(module: fx.GraphModule) -> bool:
    """Replace :func:`early_gradient` calls in ``module``: one :class:`EarlyGradients` for each run.

    Returns ``False``, without a change, if any of their gradients is not computed in parts.
    """
    graph = module.graph
    marks: dict[tuple[fx.Node, ...], list[fx.Node]] = {}
    for mark in graph.find_nodes(op="call_function", target=early_gradient):
        early, *gradients = mark.args
        run = early.args[0] if is_getitem(early) else early
        if not isinstance(run.target, Parts) or gradients[1] not in run.args:
            return False
        marks.setdefault((run, *gradients), []).append(mark)
    for (run, *gradients), of_run in marks.items():
        _replace_marks(graph, run, gradients, of_run)
    graph.lint()
    return True


def _replace_marks(
    graph: fx.Graph, run: fx.Node, gradients: Sequence[fx.Node], marks: Sequence[fx.Node]
) -> None:
    """Replace ``marks`` in ``graph`` by one :class:`EarlyGradients` operation.

    They are calls of :func:`early_gradient` on values that ``run`` has computed; ``gradients`` are
    their other arguments.
    """
    early: list[Any] = [mark.args[0] for mark in marks]
    results = [n.args[1] if is_getitem(n) else 0 for n in early]
    gradient, assumed, *others = gradients
    came, expected = others[: len(others) // 2], others[len(others) // 2 :]
    parts: Any = run.target
    targets: list[Any] = [node.target for node in expected]
    with graph.inserting_before(marks[0]):
        target = EarlyGradients(parts, run.args.index(assumed), results, targets)
        made = graph.call_function(target, (*run.args, gradient, *came, *early))
    made.meta = {k: v for k, v in marks[0].meta.items() if k != "tensor_meta"}
    if len(marks) == 1:
        marks[0].replace_all_uses_with(made)
    else:
        made.meta["val"] = tuple(mark.meta["val"] for mark in marks)
        made.meta[LAYOUTS] = tuple(layouts_of(mark)[0] for mark in marks)
        for place, mark in reversed([*enumerate(marks)]):
            with graph.inserting_after(made):
                pick = graph.call_function(operator.getitem, (made, place))
            pick.meta = dict(mark.meta)
            mark.replace_all_uses_with(pick)
    for mark in marks:
        graph.erase_node(mark)


def largest_gradient_bytes(joint: JointGraph) -> int:
    """Return the bytes of the largest gradient of a loss over classes, or 0 if there is none."""
    gradients = (n for n in joint.backward if n.target is aten.nll_loss_backward.default)
    return max((layouts_of(n)[0].storage_bytes for n in gradients), default=0)


def _is_number(node: fx.Node) -> bool:
    """Return whether ``node`` is a tensor with one element that is not drawn at random."""
    is_one = is_tensor(node) and math.prod(map(int, layouts_of(node)[0].shape)) == 1
    return is_one and not torch_compat.draws_random_numbers(node)


def _expected_gradient(
    graph: fx.Graph,
    loss: fx.Node,
    mode: Any,
    gradient: fx.Node,
    chain: Sequence[fx.Node],
    expected: dict[str, Expected] | None,
) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
    """Add operations that compute the expected gradient of a loss, and return their result.

    Args:
        graph: the graph to which they are added.
        loss: the operation whose metadata they get.
        mode: the fake mode of the graph.
        gradient: the loss's real gradient.
        chain: operations that compute it, in order. They are repeated for expected gradients of
            the step's results.
        expected: these gradients, by name; new ones are added. ``None``: all of them are 1.

    The second result maps the real gradients of the step's results to the expected ones; it is
    empty without ``expected``.
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
                root = expected.setdefault(node.name, Expected(f"expected_{node.name}"))
                values[node] = roots[node] = _call(graph, loss, mode, root, shape, *like.values())
        return values.get(node, node)

    for node in chain:
        args: Any = fx.node.map_arg(node.args, of)
        kwargs: Any = fx.node.map_arg(dict(node.kwargs), of)
        values[node] = _call(graph, loss, mode, node.target, *args, **kwargs)
    return of(gradient), roots


def _row_count(graph: fx.Graph, loss: fx.Node, mode: Any, mean: fx.Node) -> fx.Node:
    """Add operations that count the rows whose class is not ignored, and return the count's node.

    ``mean`` is the operation that reduces the rows of a loss after :func:`by_rows`. The new
    operations get the metadata of ``loss``.
    """
    given: Any = mean.args
    column, classes, *others = given
    (rows,) = layouts_of(classes)[0].shape
    dtype = column.meta["val"].dtype
    zeros = _call(graph, loss, mode, aten.zeros_like.default, classes, dtype=dtype)
    other = _call(graph, loss, mode, aten.unsqueeze.default, zeros, 1)
    counted = _call(graph, loss, mode, mean.target, other, classes, *others)
    _set_layouts(zeros, (rows,))
    _set_layouts(other, (rows, 1))
    return _call(graph, loss, mode, operator.getitem, counted, 1)


def _with_ancestors(nodes: Iterable[fx.Node]) -> dict[fx.Node, None]:
    """Return the operations among ``nodes`` and those they are computed from, as keys of a dict."""
    ancestors: dict[fx.Node, None] = {}
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node.op == "call_function" and node not in ancestors:
            ancestors[node] = None
            waiting.extend(node.all_input_nodes)
    return ancestors


def _multiples(loss: fx.Node) -> dict[fx.Node, None]:
    """Return ``loss``, the gradient of a loss, and later values linear in it, as keys of a dict.

    Only values with more than half as many elements are followed to the operations that read them.
    The result is empty if one of these operations is not linear, or if its result cannot be
    multiplied by a number without a change of layout.
    """

    def size(node: fx.Node) -> int:
        return int(product(layouts_of(node)[0].shape))

    multiples = {loss: None}
    node = loss.next
    while node.op != "root":
        read = [n for n in node.all_input_nodes if n in multiples and 2 * size(n) > size(loss)]
        if read:
            place = LINEAR.get(node.target)
            is_multiple = node.op == "call_function" and (
                node.target in PRODUCTS or (place is not None and node.args[place] is read[0])
            )
            others = len(multiples.keys() & {*node.all_input_nodes}) > 1
            if not is_multiple or others:
                return {}
            if 2 * size(node) <= size(loss) and not node.meta["val"].is_contiguous():
                return {}  # scaling it would change its layout
            multiples[node] = None
        node = node.next
    return multiples


def _call(
    graph: fx.Graph,
    loss: fx.Node,
    mode: Any,
    target: Any,
    *args: Any,
    rows: int | None = None,
    **kwargs: Any,
) -> fx.Node:
    """Add a call of ``target`` to ``graph``, with the metadata of ``loss``, and return its node.

    ``mode`` is the fake mode of the graph. If ``rows`` is given, the call returns a vector of as
    many elements, which may follow the sizes of the step.
    """
    made = graph.call_function(target, args, kwargs)
    made.meta = {k: v for k, v in loss.meta.items() if k not in ("val", LAYOUTS, "tensor_meta")}
    if is_getitem(made):
        made.meta["val"] = args[0].meta["val"][args[1]]
    else:
        made.meta["val"] = fake_result((target, args, kwargs), mode)
    if rows is not None:
        _set_layouts(made, (rows,))
    return made


def _set_layouts(node: fx.Node, *shapes: tuple[int, ...]) -> None:
    """Set the layouts in the metadata of ``node`` to those of dense tensors with these shapes."""
    node.meta[LAYOUTS] = tuple(
        Layout(
            tuple(shape),
            tuple(product(shape[i + 1 :]) for i in range(len(shape))),
            0,
            product((*shape, tensor.element_size())),
        )
        for shape, tensor in zip(shapes, tensors_of(node), strict=True)
    )
