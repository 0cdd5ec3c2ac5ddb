"""What operations have to do at any size: bytes that they read and make, multiply-adds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx
from torch.utils.flop_counter import flop_registry

from fxremat.passes.joint.graph import JointGraph
from fxremat.passes.joint.sizes import Formulas, Layout, Values, layouts_of, product
from fxremat.passes.joint.storage import tensors_of
from fxremat.passes.stages.block import Mode, call_of, is_getitem

aten = torch.ops.aten

Floats = NDArray[np.float64]

_ALIKE: dict[Any, Any] = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        aten._scaled_dot_product_flash_attention_backward
    ),
}
"""Operations that torch's registry does not have, and those of it that take the same arguments."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """Stands for a shape: where it begins and ends among the numbers."""

    begin: int
    end: int


Flops = Callable[[list[int]], float]
"""Of one operation, from all numbers."""


def _counted(count: Callable[..., Any], shapes: Any, made: Any) -> Flops:
    """A formula of torch's registry, which takes shapes."""

    def flops(numbers: list[int]) -> float:
        return float(count(*_filled(shapes, numbers), out_val=_filled(made, numbers)))

    return flops


def _filled(value: Any, numbers: list[int]) -> Any:
    """``value`` with the shapes that stand in it."""
    if isinstance(value, _Shape):
        return tuple(numbers[value.begin : value.end])
    if isinstance(value, (tuple, list)):
        return [_filled(item, numbers) for item in value]
    return value


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What the nodes of a graph have to do at one size.

    Attributes:
        nbytes: of each node, by index: of the tensors that it reads and makes.
        flops: multiply-adds of each node, by index.
        each_bytes: of each tensor of each kind of operation.
    """

    nbytes: Floats
    flops: Floats
    each_bytes: Floats


def ratio(now: Floats, before: Floats) -> Floats:
    """How many times more there is; 1 where there was nothing."""
    return np.divide(now, before, out=np.ones_like(now), where=before > 0)


@dataclass(frozen=True, slots=True, eq=False)
class Works:
    """The work of each node of a graph; operations that are alike are looked at once.

    Attributes:
        formulas: shapes, then bytes of tensors.
        kind: of each node, by index; kind 0 does nothing.
        pairs: a kind, and one of the tensors that it reads or makes: rows of indices.
        flops: of kinds that multiply matrices.
    """

    formulas: Formulas
    kind: NDArray[np.int64]
    pairs: NDArray[np.int64]
    flops: tuple[tuple[int, Flops], ...]

    @staticmethod
    def of(joint: JointGraph) -> Works:
        """Those of a joint graph."""
        kinds = _Kinds(joint)
        kind = np.array([kinds.of(node) for node in joint.module.graph.nodes], dtype=np.int64)
        numbers = [*kinds.numbers, *kinds.nbytes]
        pairs = np.array(kinds.pairs, dtype=np.int64).reshape(-1, 2).T
        pairs[1] += len(kinds.numbers)
        return Works(joint.sizes.formulas(numbers), kind, pairs, tuple(kinds.flops))

    def at(self, values: Values) -> Work:
        """The work at sizes ``values``."""
        numbers = self.formulas(values)
        count = int(self.kind.max(initial=0)) + 1
        kinds, tensors = self.pairs
        each = numbers[tensors].astype(np.float64)
        nbytes: Floats = np.zeros(count)
        np.add.at(nbytes, kinds, each)
        flops, listed = np.zeros(count), numbers.tolist()
        for kind, count_flops in self.flops:
            flops[kind] = count_flops(listed)
        return Work(nbytes[self.kind], flops[self.kind], each)

    def growth(self, now: Work, before: Work) -> Floats:
        """How many times more each node has to do, of what has grown most: a tensor, or flops."""
        more = np.ones(int(self.kind.max(initial=0)) + 1)
        np.maximum.at(more, self.pairs[0], ratio(now.each_bytes, before.each_bytes))
        return np.maximum(more[self.kind], ratio(now.flops, before.flops))


@dataclass(slots=True)
class _Kinds:
    """Numbers the kinds of operations as they are met."""

    joint: JointGraph
    known: dict[object, int] = field(default_factory=dict)
    tensors: dict[object, int] = field(default_factory=dict)
    nbytes: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    pairs: list[tuple[int, int]] = field(default_factory=list)
    flops: list[tuple[int, Flops]] = field(default_factory=list)

    def of(self, node: fx.Node) -> int:
        """The kind of ``node``; 0 for what is no operation, or only looks at a tensor."""
        table = self.joint.storages
        if node.op != "call_function" or is_getitem(node):
            return 0
        sources = tuple(node.all_input_nodes)
        if frozenset(table.of_node[node]) <= table.of(sources):
            return 0
        target, args, kwargs = call_of(node, Mode.FIRST)
        layouts = [(layouts_of(n), [t.dtype for t in tensors_of(n)]) for n in (*sources, node)]
        plain = fx.map_arg((args, kwargs), lambda _node: None)
        key = (str(target), repr(layouts), repr(plain))
        if key not in self.known:
            self.known[key] = 1 + len(self.known)
            self._describe(self.known[key], node, target, args)
        return self.known[key]

    def _describe(self, kind: int, node: fx.Node, target: Any, args: tuple[Any, ...]) -> None:
        for source in (*node.all_input_nodes, node):
            for layout, tensor in zip(layouts_of(source), tensors_of(source), strict=True):
                self.pairs.append((kind, self._tensor(layout, tensor.element_size())))
        packet = getattr(target, "overloadpacket", None)
        registry: Any = flop_registry
        count = registry.get(_ALIKE.get(packet, packet))
        if count is not None:
            shapes = fx.map_arg(args, self._shapes)
            made = self._shapes(node)
            self.flops.append((kind, _counted(count, shapes, made)))

    def _tensor(self, layout: Layout, element_size: int) -> int:
        key = (repr(layout.shape), element_size)
        if key not in self.tensors:
            self.tensors[key] = len(self.nbytes)
            self.nbytes.append(product((*layout.shape, element_size)))
        return self.tensors[key]

    def _shapes(self, node: fx.Node) -> Any:
        """Stands for the shape of a node's tensor, or for those of several."""
        value, layouts = node.meta["val"], iter(layouts_of(node))

        def shape(item: object) -> _Shape | None:
            if not isinstance(item, torch.Tensor):
                return None
            begin = len(self.numbers)
            self.numbers.extend(next(layouts).shape)
            return _Shape(begin, len(self.numbers))

        return list(map(shape, value)) if isinstance(value, (tuple, list)) else shape(value)
