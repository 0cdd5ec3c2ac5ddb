"""Ways in which an operation can be computed for some rows at a time.

An operation can be split along a sequence of labels (``passes.split.dims``) if each of its
tensors has the whole sequence, unbroken, or none of it. A tensor without it is read whole, or is a
sum.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fxremat.passes.joint.digest import written
from fxremat.passes.joint.graph import is_tensor, tensors_of
from fxremat.passes.joint.sizes import layouts_of, product
from fxremat.passes.parts.rows import Result, Rows, Shape, Way, part_of
from fxremat.passes.split import operators
from fxremat.passes.split.dims import Call, Dims, Labels, Rule, call_of, name_of, shape_of, whole

Labelled = Sequence[tuple[Shape, Labels]]
Returned = Sequence[tuple[Shape, Labels | None]]


SEEDED = torch.Tag.nondeterministic_seeded

VIEWS = ("view.default", "_unsafe_view.default", "reshape.default")

SHAPED = {
    "view.default": "size", "_unsafe_view.default": "size", "reshape.default": "shape",
    "expand.default": "size", "slice_backward.default": "input_sizes",
    "select_backward.default": "input_sizes", "upsample_nearest2d_backward.default": "input_size",
    "upsample_bilinear2d_backward.default": "input_size",
    "upsample_bicubic2d_backward.default": "input_size",
    "_upsample_nearest_exact2d_backward.default": "input_size",
}  # fmt: skip
"""Arguments that give the shape of the result."""


def ways(node: fx.Node, count: int) -> tuple[Way, ...]:
    """Return the ways to compute ``node`` for some of ``count`` rows at a time; ``()`` if none."""
    call = call_of(node)
    if call is None or int(count) < 2:
        return ()
    if call.name in VIEWS:
        return tuple(_views(call, count))
    rule = _rule_of(node)
    dims = rule(call) if rule else None
    return tuple(dict.fromkeys(_ways(node, call, dims, count))) if dims else ()


class Ways:
    """A cache of ways to compute operations for some rows at a time.

    Operations that differ only in the values that they read share an entry.
    """

    def __init__(self) -> None:
        self._cache: dict[tuple[object, ...], tuple[Way, ...]] = {}
        self._kinds: dict[fx.Node, str] = {}

    def of(self, node: fx.Node, count: int) -> tuple[Way, ...]:
        """Return the ways to compute ``node`` for some of ``count`` rows at a time."""
        if node not in self._kinds:
            self._kinds[node] = _kind_of(node)
        key = self._kinds[node], repr(count), int(count)
        if key not in self._cache:
            self._cache[key] = ways(node, count)
        return self._cache[key]


def _kind_of(node: fx.Node) -> str:
    """Return a text of operator, arguments and layouts: operations with equal texts share ways."""

    def described(read: fx.Node) -> str:
        tensors = [(t.dtype, t.device.type, t.layout) for t in tensors_of(read)]
        return f"%{index_of[read]} {[layout.shape for layout in layouts_of(read)]} {tensors}"

    index_of = {read: i for i, read in enumerate(node.all_input_nodes)}
    arguments = written((node.args, dict(node.kwargs)), described)
    return f"{node.target} {arguments} {[layout.shape for layout in layouts_of(node)]}"


def _rule_of(node: fx.Node) -> Rule | None:
    tags = node.target.tags  # type: ignore[union-attr]
    is_pointwise = torch.Tag.pointwise in tags and SEEDED not in tags
    return operators.RULES.get(name_of(node), operators.pointwise if is_pointwise else None)


def is_pointwise(node: fx.Node) -> bool:
    """Return whether ``node`` computes each element from the elements at the same position."""
    return _rule_of(node) is operators.pointwise


def reads_indices(node: fx.Node) -> bool:
    """Return whether an operator of aten may read integers as indices."""
    return _rule_of(node) in operators.BY_INDEX


def is_sum_of_products(node: fx.Node, way: Way) -> bool:
    """Return whether ``node``, computed in this way, is a sum of one matrix product per part."""
    return node.target is torch.ops.aten.mm.default and way.outputs == (Result.SUM,)


def for_rows(node: fx.Node, way: Way, rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of ``node`` for a part of ``rows`` rows.

    Nodes among them stay, and sizes are those of the part.
    """
    args, kwargs = list(node.args), dict(node.kwargs)
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    for name, value in _resized(node, way, rows):
        place = names.index(name)
        if place < len(args):
            args[place] = value
        else:
            kwargs[name] = value
    return tuple(args), kwargs


def _resized(node: fx.Node, way: Way, rows: int) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each argument of ``node`` that differs in a part of ``rows`` rows."""
    name, where = name_of(node), way.outputs[0]
    if name in SHAPED and isinstance(where, Rows):
        yield SHAPED[name], list(part_of(shape_of(node), where, rows))
    if name.startswith("native_group_norm"):
        yield "N", rows
    if operators.RULES.get(name) is operators.sliced:
        call = call_of(node)
        if call is not None and operators.is_all(call):
            yield "end", 2**63 - 1


def places(shape: Shape, count: int) -> Iterator[Rows]:
    """Yield each range of dimensions whose sizes multiply to ``count``, with no 1 at its ends."""
    for first, last in ((a, b) for b in range(len(shape) + 1) for a in range(b)):
        inner = shape[first:last]
        is_near = math.prod(map(int, inner)) == int(count)
        if is_near and inner[0] != 1 and inner[-1] != 1 and product(inner) == count:
            yield Rows(first, last)


def _views(call: Call, count: int) -> Iterator[Way]:
    """Yield the ways to compute a view or reshape for some of ``count`` rows at a time."""
    self, out = call.tensors["self"], call.out
    if 0 in map(int, out):
        return
    for old in places(self, count):
        for new in places(out, count):
            before = product(self[: old.first]) == product(out[: new.first])
            if before and product(self[old.last :]) == product(out[new.last :]):
                yield Way((old,), (new,), True)


def _ways(node: fx.Node, call: Call, dims: Dims, count: int) -> Iterator[Way]:
    """Yield the ways to compute ``node`` for some of ``count`` rows, given its labels ``dims``."""
    nodes, inputs = zip(*_inputs(call, dims), strict=True)
    given = zip(call.returns, dims.outputs, strict=True)
    outputs = [(shape, labels) for shape, labels in given if shape is not None]
    every: Labelled = [*inputs, *((s, labels) for s, labels in outputs if labels is not None)]
    if any(len(shape) != len(labels) for shape, labels in every):
        return
    sizes: dict[Hashable, int] = {}
    torn: set[Hashable] = {None}
    for shape, labels in every:
        for size, label in zip(shape, labels, strict=True):
            # Equal sizes may be different expressions.
            if size != 1 and int(sizes.setdefault(label, size)) != int(size):
                torn.add(label)
    first = next((label for label in sizes if label is not None), None)
    for shape, labels in every:
        for where in places(shape, count):
            run = tuple(labels[i] for i in range(where.first, where.last) if shape[i] != 1)
            if torn.isdisjoint(run) and (not dims.leading or run[0] == first):
                yield from _way(node, nodes, inputs, outputs, run, dims)


def _way(
    node: fx.Node,
    nodes: Sequence[fx.Node],
    inputs: Labelled,
    outputs: Returned,
    run: Labels,
    dims: Dims,
) -> Iterator[Way]:
    """Yield the way to split ``node`` along the dimensions labeled ``run``, if there is one.

    ``inputs`` are shapes and labels of ``nodes``, which it reads; ``outputs`` those of its results.
    """
    rows_of: dict[fx.Node, Rows | None] = {}
    for read, (shape, labels) in zip(nodes, inputs, strict=True):
        where = _place(shape, labels, run)
        if where is None and not {*run}.isdisjoint(_present_labels(shape, labels)):
            return
        if rows_of.setdefault(read, where) != where:
            return
    results: list[Rows | Result] = []
    for shape, given in outputs:
        where = _place(shape, given, run) if given is not None else None
        lacks = given is None or {*run}.isdisjoint(_present_labels(shape, given))
        if where is None and not (lacks and (given is None or dims.summed >= {*run})):
            return
        results.append(where or (Result.UNREAD if given is None else Result.SUM))
    read_rows = tuple(rows_of[n] for n in node.all_input_nodes if is_tensor(n))
    yield Way(read_rows, tuple(results), dims.exact and Result.SUM not in results)


def _present_labels(shape: Shape, labels: Labels) -> Labels:
    return tuple(label for size, label in zip(shape, labels, strict=True) if size != 1)


def _place(shape: Shape, labels: Labels, run: Labels) -> Rows | None:
    """Return the adjacent dimensions of a tensor that are labeled ``run``, or ``None``."""
    at = [i for i, size in enumerate(shape) if size != 1]
    present = _present_labels(shape, labels)
    start = present.index(run[0]) if run[0] in present else len(present)
    if present[start : start + len(run)] != run:
        return None
    return Rows(at[start], at[start + len(run) - 1] + 1)


def _inputs(call: Call, dims: Dims) -> Iterator[tuple[fx.Node, tuple[Shape, Labels]]]:
    """Yield each tensor among the arguments of ``call``: its node, shape and labels."""
    for name, value in call.values.items():
        given = dims.inputs.get(name)
        nodes = value if isinstance(value, (tuple, list)) else [value]
        labels = given if isinstance(given, list) else [given] * len(nodes)
        for node, of_node in zip(nodes, labels, strict=True):
            if isinstance(node, fx.Node):
                shape = shape_of(node)
                yield node, (shape, whole(shape) if of_node is None else of_node)
