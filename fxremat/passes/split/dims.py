"""Dimensions of an operation's tensors that run together.

Each dimension has a label; dimensions with the same label run together. Dimensions of size 1 are
ignored: a tensor that is broadcast along a label does not have it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxremat.passes.joint.graph import is_tensor, tensors_of
from fxremat.passes.joint.sizes import layouts_of
from fxremat.passes.parts.rows import Shape

Labels = tuple[Hashable, ...]
"""The label of each dimension of a tensor; ``None`` if an operation cannot be split along it."""


@dataclass(frozen=True, slots=True)
class Call:
    """An operation with its arguments.

    Attributes:
        name: name of the overload, such as ``mm.default``.
        values: arguments by name, including defaults.
        tensors: shapes of the arguments that are tensors, by name.
        returns: shape of each value that it returns; ``None`` for values that are no tensors.
        has_floats: whether it reads or returns floating-point numbers.
        on_cpu: whether it runs on a CPU.
    """

    name: str
    values: Mapping[str, Any]
    tensors: Mapping[str, Shape]
    returns: tuple[Shape | None, ...]
    has_floats: bool
    on_cpu: bool

    @property
    def out(self) -> Shape:
        """Shape of the first result; ``()`` if that is no tensor."""
        return self.returns[0] or ()

    def of(self, name: str) -> torch.Tensor:
        """Return the fake tensor of the argument ``name``."""
        tensor: torch.Tensor = self.values[name].meta["val"]
        return tensor

    @property
    def is_backward(self) -> bool:
        """Whether the operator computes gradients, according to its name."""
        return "_backward" in self.name


@dataclass(frozen=True, slots=True)
class Dims:
    """Labels of the dimensions of an operation's tensors: which dimensions are split together.

    Attributes:
        inputs: labels by the name of the argument; a list for a list of tensors. A tensor that is
            not in it is read whole.
        outputs: labels of each value that it returns; ``None`` if nobody reads the numbers in it.
        summed: labels that can be split although a result lacks them: its parts are added up.
        exact: whether a row has the same bits however many rows are computed at a time.
        leading: whether rows must begin with the first label, because a kernel assumes that its
            inputs are dense, and only such parts are.
        grouped: labels of dimensions that may be a multiple of the smallest one: as many adjacent
            positions run together with each of its positions.
    """

    inputs: Mapping[str, Labels | list[Labels]]
    outputs: Sequence[Labels | None]
    summed: Set[Hashable] = frozenset()
    exact: bool = False
    leading: bool = False
    grouped: Set[Hashable] = frozenset()


def shape_of(node: fx.Node) -> Shape:
    """Return the shape of the tensor that ``node`` returns."""
    return layouts_of(node)[0].shape


def name_of(node: fx.Node) -> str:
    """Return the name of an aten operator without its namespace, such as ``mm.default``."""
    return str(node.target).removeprefix("aten.")


def call_of(node: fx.Node) -> Call | None:
    """Return ``node`` and its arguments as a :class:`Call`, or ``None`` if it cannot be split.

    It must call a functional aten operator on strided, real tensors of one device.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    if target._schema.is_mutable or not all(map(is_tensor, node.all_input_nodes)):
        return None
    tensors = [t for n in (node, *node.all_input_nodes) for t in tensors_of(n)]
    devices = {t.device.type for t in tensors if t.dim()} - {"meta"}  # attention has seeds on meta
    is_plain = all(t.layout is torch.strided and not t.is_complex() for t in tensors)
    if len(devices) > 1 or not is_plain:
        return None
    values = {
        a.name: node.args[i] if i < len(node.args) else node.kwargs.get(a.name, a.default_value)
        for i, a in enumerate(target._schema.arguments)
    }
    val = node.meta.get("val")
    items = val if isinstance(val, (tuple, list)) else (val,)
    shapes = iter(layout.shape for layout in layouts_of(node))
    returns = tuple(next(shapes) if isinstance(t, torch.Tensor) else None for t in items)
    read = {name: shape_of(v) for name, v in values.items() if isinstance(v, fx.Node)}
    has_floats = any(t.is_floating_point() for t in tensors)
    return Call(name_of(node), values, read, returns, has_floats, devices == {"cpu"})


def whole(shape: Shape | None) -> Labels:
    """Return the labels of a tensor that is not split: ``None`` for each dimension."""
    return (None,) * len(shape or ())


def axes(shape: Shape | None, *, without: Set[int] = frozenset()) -> Labels:
    """Return each dimension's index as its label; ``None`` for the dimensions in ``without``."""
    return tuple(None if i in without else i for i in range(len(shape or ())))


def broadcast_labels(shape: Shape | None, labels: Labels) -> Labels:
    """Return the labels of a tensor of ``shape`` that is broadcast to a tensor with ``labels``."""
    return labels[len(labels) - len(shape or ()) :]


def dims_of(dims: Any, shape: Shape) -> set[int]:
    """Return the dimensions that a ``dim`` argument names, as non-negative indices.

    It is an index, or a list of these; ``None`` or an empty list names all dimensions of ``shape``.
    """
    given = [dims] if isinstance(dims, int) else list(dims or range(len(shape)))
    return {dim % max(len(shape), 1) for dim in given}


Rule = Callable[[Call], Dims | None]
"""Returns the labels of an operation's tensors; ``None`` if it cannot be split."""
