"""Ways in which an operation can be computed for some rows at a time.

An operation can be taken apart along a run of labels (``passes.split.labels``) if each of its
tensors has the run unbroken, or has none of it. A tensor that has none of it is read whole, or is
a sum.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import fx

from fxremat.passes.joint.graph import is_tensor
from fxremat.passes.joint.sizes import product
from fxremat.passes.split import families
from fxremat.passes.split.labels import (
    Call,
    Dims,
    Labels,
    Rule,
    Shape,
    call_of,
    name_of,
    shape_of,
    whole,
)

Labelled = Sequence[tuple[Shape, Labels]]
Returned = Sequence[tuple[Shape, Labels | None]]


@dataclass(frozen=True, slots=True)
class Rows:
    """Dimensions of a tensor; their elements, in row-major order, are its rows.

    Neither end is a dimension of size 1.

    Attributes:
        first: the first of them.
        last: the one behind them.
    """

    first: int
    last: int


class Result(Enum):
    """Of a tensor that an operation returns, where it has no rows."""

    SUM = "sum"
    """What the parts give adds up to it."""
    UNREAD = "unread"
    """Nobody reads numbers in it, such as the seed of a dropout of nothing: any part's will do."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way in which an operation can be computed for some rows at a time.

    Attributes:
        inputs: of each tensor that it reads, each node once, in order of ``all_input_nodes``;
            ``None`` where each part reads it whole.
        outputs: of each tensor that it returns, in order of ``layouts_of``.
        same_bits: whether each row has the bits that it has when all are computed at once. Where
            that is up to the kernel, or anything is a sum, it is not said.
    """

    inputs: tuple[Rows | None, ...]
    outputs: tuple[Rows | Result, ...]
    same_bits: bool


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
"""Arguments that say the shape of what is returned."""


def ways(node: fx.Node, count: int) -> tuple[Way, ...]:
    """Ways in which ``node`` can be computed for some of ``count`` rows; none: no rule has one."""
    call = call_of(node)
    if call is None or int(count) < 2:
        return ()
    if call.name in VIEWS:
        return tuple(_views(call, count))
    rule = _rule_of(node)
    dims = rule(call) if rule else None
    return tuple(dict.fromkeys(_ways(node, call, dims, count))) if dims else ()


def _rule_of(node: fx.Node) -> Rule | None:
    tags = node.target.tags  # type: ignore[union-attr]
    is_pointwise = torch.Tag.pointwise in tags and SEEDED not in tags
    return families.RULES.get(name_of(node), families.pointwise if is_pointwise else None)


def is_pointwise(node: fx.Node) -> bool:
    """Whether an operator of aten computes each number from the numbers in its place."""
    return _rule_of(node) is families.pointwise


def reads_indices(node: fx.Node) -> bool:
    """Whether an operator of aten may read integers as indices."""
    return _rule_of(node) in families.BY_INDEX


def for_rows(node: fx.Node, way: Way, rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of ``node`` for a part of ``rows`` rows: nodes stay, sizes follow the part."""
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
    """Arguments that follow the number of rows, and what they are for a part."""
    name, where = name_of(node), way.outputs[0]
    if name in SHAPED and isinstance(where, Rows):
        yield SHAPED[name], list(part_of(shape_of(node), where, rows))
    if name.startswith("native_group_norm"):
        yield "N", rows
    if families.RULES.get(name) is families.sliced:
        call = call_of(node)
        if call is not None and families.is_all(call):
            yield "end", 2**63 - 1


def part_of(shape: Shape, where: Rows, rows: int) -> Shape:
    """Shape of a part of ``rows`` rows of a tensor of ``shape``."""
    ones = (1,) * (where.last - where.first - 1)
    return (*shape[: where.first], *ones, rows, *shape[where.last :])


def places(shape: Shape, count: int) -> Iterator[Rows]:
    """Where a tensor of ``shape`` has ``count`` rows."""
    for first, last in ((a, b) for b in range(len(shape) + 1) for a in range(b)):
        inner = shape[first:last]
        is_near = math.prod(map(int, inner)) == int(count)
        if is_near and inner[0] != 1 and inner[-1] != 1 and product(inner) == count:
            yield Rows(first, last)


def _views(call: Call, count: int) -> Iterator[Way]:
    """Ways of an operation that gives a tensor another shape."""
    self, out = call.tensors["self"], call.out
    if 0 in map(int, out):
        return
    for old in places(self, count):
        for new in places(out, count):
            before = product(self[: old.first]) == product(out[: new.first])
            if before and product(self[old.last :]) == product(out[new.last :]):
                yield Way((old,), (new,), True)


def _ways(node: fx.Node, call: Call, dims: Dims, count: int) -> Iterator[Way]:
    """Ways of an operation whose dimensions run together as ``dims`` says."""
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
            # The operation has them equal, be they written as the sizes of other tensors.
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
    """The way along ``run``, if there is one; ``inputs`` are of ``nodes``."""
    found: dict[fx.Node, Rows | None] = {}
    for read, (shape, labels) in zip(nodes, inputs, strict=True):
        where = _place(shape, labels, run)
        if where is None and not {*run}.isdisjoint(_labels(shape, labels)):
            return
        if found.setdefault(read, where) != where:
            return
    results: list[Rows | Result] = []
    for shape, own in outputs:
        where = _place(shape, own, run) if own is not None else None
        lacks = own is None or {*run}.isdisjoint(_labels(shape, own))
        if where is None and not (lacks and (own is None or dims.summed >= {*run})):
            return
        results.append(where or (Result.UNREAD if own is None else Result.SUM))
    read_by_it = tuple(found[n] for n in node.all_input_nodes if is_tensor(n))
    yield Way(read_by_it, tuple(results), dims.exact and Result.SUM not in results)


def _labels(shape: Shape, labels: Labels) -> Labels:
    return tuple(label for size, label in zip(shape, labels, strict=True) if size != 1)


def _place(shape: Shape, labels: Labels, run: Labels) -> Rows | None:
    """Where a tensor has all of ``run``, unbroken."""
    at = [i for i, size in enumerate(shape) if size != 1]
    own = _labels(shape, labels)
    start = own.index(run[0]) if run[0] in own else len(own)
    if own[start : start + len(run)] != run:
        return None
    return Rows(at[start], at[start + len(run) - 1] + 1)


def _inputs(call: Call, dims: Dims) -> Iterator[tuple[fx.Node, tuple[Shape, Labels]]]:
    """Shape and labels of each tensor among the arguments."""
    for name, value in call.values.items():
        given = dims.inputs.get(name)
        nodes = value if isinstance(value, (tuple, list)) else [value]
        labels = given if isinstance(given, list) else [given] * len(nodes)
        for node, own in zip(nodes, labels, strict=True):
            if isinstance(node, fx.Node):
                shape = shape_of(node)
                yield node, (shape, whole(shape) if own is None else own)
