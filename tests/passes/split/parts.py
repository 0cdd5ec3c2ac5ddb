"""Operations alone in a graph, computed whole and in parts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxremat.passes.parts.rows import Result, Rows, Way, part_of
from fxremat.passes.split.ways import for_rows

FACTOR = 16
"""Parts may be off by so many roundings of the largest number that is there, and by so many times
what the whole is off by."""


@dataclass(frozen=True, slots=True)
class Alone:
    """An operation that is alone in a graph.

    Attributes:
        node: its metadata are real tensors.
        tensors: what it reads, each once, in order of ``all_input_nodes``.
        arguments: with the tensors in them.
        run: computes the operation.
    """

    node: fx.Node
    tensors: tuple[Tensor, ...]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    run: Callable[..., Any]

    @property
    def results(self) -> list[Tensor]:
        return tensors_in(self.node.meta["val"])

    def counts(self) -> list[int]:
        """Numbers of rows that one of the tensors may have."""
        shapes = {tuple(t.shape) for t in (*self.tensors, *self.results)}
        ranges = (s[a:b] for s in shapes for a, b in itertools.combinations(range(len(s) + 1), 2))
        return sorted({torch.Size(r).numel() for r in ranges})


def tensors_in(value: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]


def alone(target: Any, *args: Any, run: Any = None, **kwargs: Any) -> Alone:
    """``target`` on real tensors; what is to ``run`` in its place, if this machine lacks it."""
    run = asked(target, run or target)
    graph = fx.Graph()
    nodes: dict[int, fx.Node] = {}

    def lifted(tensor: Tensor) -> fx.Node:
        if id(tensor) not in nodes:
            node = nodes[id(tensor)] = graph.placeholder(f"x{len(nodes)}")
            node.meta["val"] = tensor
        return nodes[id(tensor)]

    args_of_node, kwargs_of_node = pytree.tree_map_only(Tensor, lifted, (args, kwargs))
    node = graph.call_function(target, tuple(args_of_node), kwargs_of_node)
    node.meta["val"] = run(*args, **kwargs)
    tensors = tuple(n.meta["val"] for n in node.all_input_nodes)
    return Alone(node, tensors, (args, kwargs), run)


def asked(target: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` without values that are not asked for: kernels may return something there, or not."""
    names = [a.name for a in target._schema.arguments]
    if "output_mask" not in names:
        return run
    place = names.index("output_mask")

    def masked(*args: Any, **kwargs: Any) -> Any:
        values = run(*args, **kwargs)
        return tuple(v if wanted else None for v, wanted in zip(values, args[place], strict=True))

    return masked


def in_parts(op: Alone, way: Way, sizes: Sequence[int]) -> Iterator[list[Tensor]]:
    """What the operation returns for each of several parts."""
    done = 0
    for rows in sizes:
        given = dict(zip(op.node.all_input_nodes, parts_read(op, way, done, rows), strict=True))
        args, kwargs = fx.node.map_arg(for_rows(op.node, way, rows), given.__getitem__)
        found = tensors_in(op.run(*args, **kwargs))
        for whole, part, where in zip(op.results, found, way.outputs, strict=True):
            is_rows = isinstance(where, Rows)
            shape = part_of(tuple(whole.shape), where, rows) if is_rows else tuple(whole.shape)
            assert tuple(part.shape) == shape, (part.shape, shape)
            assert part.dtype == whole.dtype
        yield found
        done += rows


def parts_read(op: Alone, way: Way, done: int, rows: int) -> Iterator[Tensor]:
    for tensor, where in zip(op.tensors, way.inputs, strict=True):
        yield tensor if where is None else narrowed(tensor, where, done, rows)


def narrowed(tensor: Tensor, where: Rows, done: int, rows: int) -> Tensor:
    count = torch.Size(tensor.shape[where.first : where.last]).numel() // where.width
    flat = tensor.reshape(part_of(tuple(tensor.shape), where, count))
    return flat.narrow(where.last - 1, done * where.width, rows * where.width)


def joined(op: Alone, way: Way, parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The parts' results as one."""
    found = []
    for i, (whole, where) in enumerate(zip(op.results, way.outputs, strict=True)):
        own = [part[i] for part in parts]
        if isinstance(where, Rows):
            found.append(torch.cat(own, where.last - 1).reshape(whole.shape))
        else:
            assert where in (Result.SUM, Result.UNREAD)
            found.append(sum(own[1:], own[0]) if where is Result.SUM else whole)
    return found


def precise(op: Alone) -> list[Tensor]:
    """What the operation returns for the numbers in float64."""

    def wide(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.double() if x.is_floating_point() else x
        return torch.float64 if isinstance(x, torch.dtype) and x.is_floating_point else x

    args, kwargs = pytree.tree_map(wide, op.arguments)
    return tensors_in(op.run(*args, **kwargs))


def differences(op: Alone, way: Way, sizes: Sequence[int]) -> list[str]:
    """What is wrong with ``way``, as parts of ``sizes`` rows show it."""
    found = joined(op, way, list(in_parts(op, way, sizes)))
    if way.same_bits:
        pairs = zip(op.results, found, strict=True)
        return [f"bits of value {i}" for i, (a, b) in enumerate(pairs) if not same_bits(a, b)]
    wrong = []
    for i, (one, exact) in enumerate(zip(found, precise(op), strict=True)):
        if way.outputs[i] is Result.UNREAD:
            continue
        if not one.is_floating_point():
            if not torch.equal(one, op.results[i]):
                wrong.append(f"value {i}")
            continue
        off = difference(one.double(), exact)
        most = max(largest(t) for t in (exact, *op.tensors))
        rounding = torch.finfo(one.dtype).eps * max(most, 1.0)
        if off > FACTOR * (rounding + difference(op.results[i].double(), exact)):
            wrong.append(f"value {i} is off by {off}")
    return wrong


def difference(one: Tensor, other: Tensor) -> float:
    """The largest; numbers that both are alike and not finite have none."""
    off = torch.where(one == other, 0.0, (one - other).abs())
    off = torch.where(one.isnan() & other.isnan(), 0.0, off)
    return off.nan_to_num(nan=float("inf")).max().item() if off.numel() else 0.0


def largest(tensor: Tensor) -> float:
    finite = tensor.double()[tensor.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are alike; what is not a number has any bits."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    zeros = torch.zeros_like(one)
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[one.element_size()]
    own, others = (torch.where(x.isnan(), zeros, x).contiguous().view(bits) for x in (one, other))
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(own, others)
