"""Ways in which an operation can be computed for some rows at a time.

An operation can be split along a sequence of labels (``passes.split.dims``) if each of its
tensors has the whole sequence, unbroken, or none of it. A tensor without it is read whole, or is a
sum.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxremat.passes.joint.digest import written
from fxremat.passes.joint.graph import is_tensor, tensors_of
from fxremat.passes.joint.sizes import layouts_of, names_in, product
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

    def of(self, node: fx.Node, count: int, width: int = 1) -> tuple[Way, ...]:
        """Return the ways to compute ``node`` for some of ``count`` rows at a time.

        The rows of its tensors have ``width`` positions, or a multiple of that.
        """
        if node not in self._kinds:
            self._kinds[node] = _kind_of(node)
        key = self._kinds[node], repr(count), int(count), width
        if key not in self._cache:
            made = ways(node, product((count, width)))
            self._cache[key] = made if width == 1 else tuple(_wider(node, made, width))
        return self._cache[key]


def _wider(node: fx.Node, narrow: Iterable[Way], width: int) -> Iterator[Way]:
    """Yield each of ``narrow`` with rows that are ``width`` times as wide, if that is possible.

    The last dimension of the rows must be a multiple of ``width`` at all sizes.
    """
    shapes = [shape_of(n) for n in node.all_input_nodes if is_tensor(n)]
    shapes += [layout.shape for layout in layouts_of(node)]
    for way in narrow:
        pairs = zip(shapes, (*way.inputs, *way.outputs), strict=True)
        sizes = [shape[where.last - 1] for shape, where in pairs if isinstance(where, Rows)]
        if not names_in(sizes) and all(int(size) % width == 0 for size in sizes):
            yield way.wider(width)


def _kind_of(node: fx.Node) -> str:
    """Return a text of operator, arguments and layouts: operations with equal texts share ways."""

    def described(read: fx.Node) -> str:
        tensors = [(t.dtype, t.device.type, t.layout) for t in tensors_of(read)]
        return f"%{index_of[read]} {[layout.shape for layout in layouts_of(read)]} {tensors}"

    index_of = {read: i for i, read in enumerate(node.all_input_nodes)}
    arguments = written((node.args, dict(node.kwargs)), described)
    return f"{node.target} {arguments} {[layout.shape for layout in layouts_of(node)]}"


def _rule_of(node: fx.Node) -> Rule | None:
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    tags = node.target.tags
    is_pointwise = torch.Tag.pointwise in tags and SEEDED not in tags
    return operators.RULES.get(name_of(node), operators.pointwise if is_pointwise else None)


def is_pointwise(node: fx.Node) -> bool:
    """Return whether ``node`` computes each element from the elements at the same position."""
    return _rule_of(node) is operators.pointwise


def reads_indices(node: fx.Node) -> bool:
    """Return whether an operator of aten may read integers as indices."""
    return _rule_of(node) in operators.BY_INDEX


def heads_of(node: fx.Node) -> tuple[int, ...]:
    """Return the numbers of heads, of one item and of all, that an attention computes separately.

    The result is empty for other operations. Heads of queries that share keys are one.
    """
    if _rule_of(node) is not operators.attention:
        return ()
    call = call_of(node)
    key = call.tensors.get("key", ()) if call else ()
    return (key[1], product(key[:2])) if len(key) > 1 else ()


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
        yield "N", part_of(shape_of(node), where, rows)[0] if isinstance(where, Rows) else rows
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
    for old in _wide_places(self, count):
        for new in _wide_places(out, count):
            before = product(self[: old.first]) == product(out[: new.first])
            if before and _row_size(self, old) == _row_size(out, new):
                yield Way((old,), (new,), True)


def _wide_places(shape: Shape, count: int) -> Iterator[Rows]:
    """Yield each range of dimensions that has ``count`` rows, with no 1 at its ends.

    Rows may be a part of the last dimension, such as the heads of a hidden state.
    """
    yield from places(shape, count)
    for last, size in enumerate(shape, 1):
        for first in range(last):
            inner = product(shape[first : last - 1])
            others, rest = divmod(int(count), int(inner))
            if rest or names_in((count, inner, size)) or shape[first] == 1:
                continue
            if 1 < others < int(size) and int(size) % others == 0:
                yield Rows(first, last, int(size) // others)


def _row_size(shape: Shape, where: Rows) -> int:
    """Return how many elements one row has in the dimensions from its last one on."""
    return product((where.width, *shape[where.last :]))


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
    for size, label in _labelled(every):
        if label in dims.grouped:
            sizes[label] = min(sizes.get(label, size), size, key=int)
    for size, label in _labelled(every):
        # Equal sizes may be different expressions.
        smallest = sizes.setdefault(label, size)
        is_group = label in dims.grouped and int(size) % int(smallest) == 0
        if int(size) != int(smallest) and not (is_group and not names_in((size, smallest))):
            torn.add(label)
    first = next((label for label in sizes if label is not None), None)
    for shape, labels in every:
        for where in places(shape, count):
            dimensions = [i for i in range(where.first, where.last) if shape[i] != 1]
            run = tuple(labels[i] for i in dimensions)
            is_whole = all(int(sizes[labels[i]]) == int(shape[i]) for i in dimensions)
            if torn.isdisjoint(run) and is_whole and (not dims.leading or run[0] == first):
                yield from _way(node, nodes, inputs, outputs, run, dims, sizes)


def _labelled(every: Labelled) -> Iterator[tuple[int, Hashable]]:
    """Yield size and label of each dimension that is not of size 1."""
    for shape, labels in every:
        yield from ((n, label) for n, label in zip(shape, labels, strict=True) if n != 1)


def _way(
    node: fx.Node,
    nodes: Sequence[fx.Node],
    inputs: Labelled,
    outputs: Returned,
    run: Labels,
    dims: Dims,
    sizes: Mapping[Hashable, int],
) -> Iterator[Way]:
    """Yield the way to split ``node`` along the dimensions labeled ``run``, if there is one.

    Args:
        node: the operation.
        nodes: the tensors that it reads.
        inputs: their shapes and labels.
        outputs: shapes and labels of its results.
        run: the labels.
        dims: how dimensions run together.
        sizes: the size of the smallest dimension of each label.
    """
    rows_of: dict[fx.Node, Rows | None] = {}
    for read, (shape, labels) in zip(nodes, inputs, strict=True):
        where = _place(shape, labels, run, sizes)
        if where is None and not {*run}.isdisjoint(_present_labels(shape, labels)):
            return
        if rows_of.setdefault(read, where) != where:
            return
    results: list[Rows | Result] = []
    for shape, given in outputs:
        where = _place(shape, given, run, sizes) if given is not None else None
        lacks = given is None or {*run}.isdisjoint(_present_labels(shape, given))
        if where is None and not (lacks and (given is None or dims.summed >= {*run})):
            return
        results.append(where or (Result.UNREAD if given is None else Result.SUM))
    read_rows = tuple(rows_of[n] for n in node.all_input_nodes if is_tensor(n))
    yield Way(read_rows, tuple(results), dims.exact and Result.SUM not in results)


def _present_labels(shape: Shape, labels: Labels) -> Labels:
    return tuple(label for size, label in zip(shape, labels, strict=True) if size != 1)


def _place(shape: Shape, labels: Labels, run: Labels, sizes: Mapping[Hashable, int]) -> Rows | None:
    """Return the adjacent dimensions of a tensor that are labeled ``run``, or ``None``.

    ``sizes`` are those of the rows; the last dimension may be a multiple of its size.
    """
    at = [i for i, size in enumerate(shape) if size != 1]
    present = _present_labels(shape, labels)
    start = present.index(run[0]) if run[0] in present else len(present)
    if present[start : start + len(run)] != run:
        return None
    *others, last = (at[start + i] for i in range(len(run)))
    if any(int(shape[i]) != int(sizes[labels[i]]) for i in others):
        return None
    return Rows(at[start], last + 1, int(shape[last]) // int(sizes[labels[last]]))


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
