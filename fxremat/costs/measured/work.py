"""The work of operations at any size: bytes that they read and make, and multiply-adds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx
from torch.utils.flop_counter import flop_registry

from fxremat.passes.joint.graph import JointGraph, is_getitem, tensors_of
from fxremat.passes.joint.sizes import Layout, Values, layouts_of, product
from fxremat.passes.parts.parts import Parts
from fxremat.passes.stages.block import Mode, call_of

aten = torch.ops.aten

CALL_S = 1e-6
"""Least seconds of an operation, where none was measured that does nothing else."""

Floats = NDArray[np.float64]

_ALIKE: dict[Any, Any] = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        aten._scaled_dot_product_flash_attention_backward
    ),
}
"""For operations that torch's registry lacks, one in it that takes the same arguments."""


def _is_causal(node: fx.Node) -> bool:
    """Return whether ``node`` calls an attention of aten that is causal."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    if "is_causal" not in names:
        return False
    place = names.index("is_causal")
    return bool(node.args[place] if place < len(node.args) else node.kwargs.get("is_causal"))


@dataclass(frozen=True, slots=True)
class _Shape:
    """A placeholder for a shape: the range of its sizes in a list of numbers."""

    begin: int
    end: int


def _filled(value: Any, numbers: list[int]) -> Any:
    """Return ``value`` with each placeholder replaced by its shape, taken from ``numbers``."""
    if isinstance(value, _Shape):
        return tuple(numbers[value.begin : value.end])
    if isinstance(value, (tuple, list)):
        return [_filled(item, numbers) for item in value]
    return value


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """Bytes and multiply-adds of the nodes of a graph at one size.

    Attributes:
        nbytes: bytes of the tensors that each node reads and makes, by index.
        flops: multiply-adds of each node, by index.
        each_bytes: bytes of each tensor of each kind of operation.
    """

    nbytes: Floats
    flops: Floats
    each_bytes: Floats


def ratio(now: Floats, before: Floats) -> Floats:
    """Return ``now / before`` for each element, with 1 where ``before`` is 0."""
    return np.divide(now, before, out=np.ones_like(now), where=before > 0)


def rates_of(nbytes: Floats, flops: Floats, seconds: Floats) -> tuple[float, float, float]:
    """Fit seconds per call, per byte and per multiply-add to measured operations.

    Args:
        nbytes: bytes that each operation reads and makes.
        flops: multiply-adds of each operation.
        seconds: seconds of each operation. The fit minimizes errors relative to these.

    Returns:
        Seconds per call, per byte, and per multiply-add.
    """
    idle = seconds[(nbytes == 0) & (flops == 0)]
    call_s = float(np.median(idle)) if idle.size else CALL_S
    busy = (nbytes > 0) & (seconds > call_s)
    weight = 1 / np.maximum(seconds[busy], 1e-12)
    columns = np.stack([nbytes[busy], flops[busy]], axis=1) * weight[:, None]
    busy_s = (seconds[busy] - call_s) * weight
    best = (np.inf, 1e-10, 0.0)
    for used in ((0, 1), (0,), (1,)):
        rates, *_ = np.linalg.lstsq(columns[:, used], busy_s, rcond=None)
        all_rates = np.zeros(2)
        all_rates[list(used)] = rates
        error = float(np.sum((columns @ all_rates - busy_s) ** 2))
        if np.all(all_rates >= 0) and error < best[0]:
            best = (error, float(all_rates[0]), float(all_rates[1]))
    return call_s, *best[1:]


class Works:
    """Computes bytes and multiply-adds of each node of a graph at any size.

    Nodes of one kind call the same operation for the same layouts, and share their formulas.

    Attributes:
        kind: kind of each node, by index; a node of kind 0 does nothing.
    """

    def __init__(self, joint: JointGraph) -> None:
        self._joint = joint
        self._kind_of_key: dict[object, int] = {}
        self._tensors: dict[object, int] = {}
        self._nbytes: list[int] = []
        self._shapes: list[int] = []
        self._pairs: list[tuple[int, int]] = []
        self._flops: list[tuple[int, Callable[..., Any], Any, Any, float]] = []
        self.kind = np.array([self._kind_of(n) for n in joint.module.graph.nodes], dtype=np.int64)
        self._formulas = joint.sizes.formulas([*self._shapes, *self._nbytes])
        self._kinds, tensors = np.array(self._pairs, dtype=np.int64).reshape(-1, 2).T
        self._places = tensors + len(self._shapes)

    def at(self, values: Values) -> Work:
        """Return the bytes and multiply-adds of each node at the sizes ``values``."""
        numbers = self._formulas(values)
        each = numbers[self._places].astype(np.float64)
        count = len(self._kind_of_key) + 1
        nbytes: Floats = np.zeros(count)
        np.add.at(nbytes, self._kinds, each)
        flops, listed = np.zeros(count), numbers.tolist()
        for kind, formula, shapes, made, share in self._flops:
            counted = formula(*_filled(shapes, listed), out_val=_filled(made, listed))
            flops[kind] += share * counted
        return Work(nbytes[self.kind], flops[self.kind], each)

    def growth(self, now: Work, before: Work) -> Floats:
        """Return the factors by which the nodes' work has grown since ``before``; each at least 1.

        A node's factor is that of the tensor that has grown most, or that of its multiply-adds if
        that is larger.
        """
        more = np.ones(len(self._kind_of_key) + 1)
        np.maximum.at(more, self._kinds, ratio(now.each_bytes, before.each_bytes))
        return np.maximum(more[self.kind], ratio(now.flops, before.flops))

    def _kind_of(self, node: fx.Node) -> int:
        """Return the index of the kind of ``node``; 0 if it is not an operation, or is a view."""
        if node.op != "call_function" or is_getitem(node) or self._joint.storages.is_view(node):
            return 0
        sources = tuple(node.all_input_nodes)
        target, args, kwargs = call_of(node, Mode.FIRST)
        layouts = [(layouts_of(n), [t.dtype for t in tensors_of(n)]) for n in (*sources, node)]
        plain = fx.map_arg((args, kwargs), lambda _node: None)
        key = (str(target), repr(layouts), repr(plain))
        if key not in self._kind_of_key:
            self._kind_of_key[key] = 1 + len(self._kind_of_key)
            self._describe(self._kind_of_key[key], node, target, args)
        return self._kind_of_key[key]

    def _describe(self, kind: int, node: fx.Node, target: Any, args: tuple[Any, ...]) -> None:
        """Record the bytes and the formula of the multiply-adds of a new kind of operation."""
        if isinstance(target, Parts):
            for inner in target.whole:
                self._describe(kind, inner, inner.target, inner.args)
            return
        for source in (*node.all_input_nodes, node):
            for layout, tensor in zip(layouts_of(source), tensors_of(source), strict=True):
                self._pairs.append((kind, self._tensor(layout, tensor.element_size())))
        packet = getattr(target, "overloadpacket", None)
        registry: Any = flop_registry
        count = registry.get(_ALIKE.get(packet, packet))
        if count is not None:
            shapes = fx.map_arg(args, self._shapes_of)
            share = 0.5 if _is_causal(node) else 1.0  # kernels leave out what is masked
            self._flops.append((kind, count, shapes, self._shapes_of(node), share))

    def _tensor(self, layout: Layout, element_size: int) -> int:
        """Return the index of the formula of a tensor's bytes.

        Tensors of one shape and element size share a formula.
        """
        key = (repr(layout.shape), element_size)
        if key not in self._tensors:
            self._tensors[key] = len(self._nbytes)
            self._nbytes.append(product((*layout.shape, element_size)))
        return self._tensors[key]

    def _shapes_of(self, node: fx.Node) -> Any:
        """Return a placeholder for the shape of a node's tensor, or a list of several."""
        value, layouts = node.meta["val"], iter(layouts_of(node))

        def shape(item: object) -> _Shape | None:
            if not isinstance(item, torch.Tensor):
                return None
            begin = len(self._shapes)
            self._shapes.extend(next(layouts).shape)
            return _Shape(begin, len(self._shapes))

        return list(map(shape, value)) if isinstance(value, (tuple, list)) else shape(value)
