"""Sizes that are symbols, and numbers that follow them.

In a graph that was settled (``passes.joint.settle``) such a number is a :class:`Size` or a
:class:`Scale`: it is the number of the capture, and still knows its expression. Emitted code
prints it as that; :meth:`Sizes.formulas` evaluates many of them at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy
import torch
from numpy.typing import NDArray
from torch import fx
from torch.utils import _pytree as pytree

from fxremat import torch_compat

LAYOUTS = "fxremat_layouts"
"""Metadata of a node of a settled graph: the :class:`Layout` of each tensor that it returns."""

PREFIX = "SIZE"
"""Symbols are named so, and numbered as they are first met. Names of nodes are in lower case."""

MODULES: Mapping[str, object] = {"math": math, "torch": torch}
"""Modules that expressions may name, besides symbols."""

Values = tuple[int, ...]
"""A number for each symbol."""

Formulas = Callable[[Values], NDArray[np.int64]]
"""Many numbers as a function of the sizes."""


class Following:
    """A number that follows the sizes of a step.

    As a number it is its value at the sizes of the capture. It is written as Python computes it,
    and two of them are equal if they are written alike, whatever their values.

    Attributes:
        names: the symbols in it and their values at the capture.
    """

    names: Mapping[str, int]
    _text: str

    def __repr__(self) -> str:
        return self._text

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and repr(other) == self._text

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._text)


class Size(Following, int):
    """A whole number that follows the sizes.

    Attributes:
        expression: of sympy.
    """

    expression: Any

    def __new__(cls, value: int, expression: Any, names: Mapping[str, int]) -> Size:
        """``value``, of an expression in which ``names`` may occur."""
        self = super().__new__(cls, value)
        self.expression = expression
        self.names = {str(s): names[str(s)] for s in sorted(expression.free_symbols, key=str)}
        self._text = torch_compat.python_text(expression)
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (int(self), self.expression, self.names)

    @staticmethod
    def named(name: str, value: int) -> Size:
        """A symbol of its own, whose value at another size is computed elsewhere."""
        return Size(value, symbol(name), {name: value})


class Scale(Following, float):
    """A real number that follows the sizes, such as one over a count.

    It is written in the order in which it was computed: another may round otherwise.
    """

    def __new__(cls, value: float, text: str, names: Mapping[str, int]) -> Scale:
        """``value``, which Python computes of ``names`` as ``text`` says."""
        self = super().__new__(cls, value)
        self._text, self.names = text, dict(names)
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (float(self), self._text, self.names)


def symbol(name: str) -> sympy.Symbol:
    """A size, by name."""
    return sympy.Symbol(name, positive=True, integer=True)


def product(factors: Iterable[int]) -> int:
    """The product of numbers, some of which may follow the sizes."""
    factors = list(factors)
    return _combined(math.prod(map(int, factors)), sympy.Mul, factors)


def difference(one: int, other: int) -> int:
    """The difference of numbers, which may follow the sizes."""
    return _combined(int(one) - int(other), lambda a, b: a - b, (one, other))


def _combined(value: int, combine: Callable[..., Any], numbers: Sequence[int]) -> int:
    names = names_in(numbers)
    if not names:
        return value
    found = combine(*(sympy.sympify(getattr(n, "expression", n)) for n in numbers))
    return Size(value, found, names) if found.free_symbols else value


def names_in(value: object) -> dict[str, int]:
    """The symbols in an argument of an operation, and their values at the capture."""
    found: dict[str, int] = {}
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, Following):
            found.update(item.names)
        elif isinstance(item, (tuple, list)):
            waiting.extend(reversed(item))
        elif isinstance(item, dict):
            waiting.extend(reversed(item.values()))
        elif isinstance(item, slice):
            waiting.extend((item.step, item.stop, item.start))
    return found


def number_at(number: int, sizes: Mapping[str, int]) -> int:
    """A number, which may follow the sizes, where these are ``sizes``."""
    return int(evaluated(number, sizes))


def evaluated(number: Any, sizes: Mapping[str, Any]) -> Any:
    """A number, which may follow the sizes, where these are ``sizes``, be they symbols."""
    follows = isinstance(number, Following)
    return eval(_code(repr(number)), {**MODULES, **sizes}) if follows else number


@functools.cache
def _code(text: str) -> Any:
    return compile(text, "<size>", "eval")


@dataclass(frozen=True, slots=True)
class Sizes:
    """The symbols of a step.

    Attributes:
        names: of each, as emitted code has them; none where all sizes are numbers.
        hints: their values at the capture.
        sources: where each is read: a primal and its dimension, -1 where it is the number itself.
        most: the largest value of each for which the graph holds; ``None``: any.
        zeros: numbers that are 0 at all sizes for which the graph holds, such as a remainder.
    """

    names: tuple[str, ...] = ()
    hints: Values = ()
    sources: tuple[tuple[int, int], ...] = ()
    most: tuple[int | None, ...] = ()
    zeros: tuple[Size, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.names)

    def values(self, primals: Sequence[Any]) -> Values:
        """The sizes of a call of the forward with ``primals``."""
        return tuple(
            int(primals[i] if dim < 0 else primals[i].shape[dim]) for i, dim in self.sources
        )

    def named(self, values: Values) -> dict[str, int]:
        """``values`` by the names that emitted code has."""
        return dict(zip(self.names, values, strict=True))

    def shaping(self, nodes: Iterable[fx.Node]) -> frozenset[int]:
        """Symbols that a tensor of ``nodes`` follows; the others are only computed with."""
        layouts = (layout for node in nodes for layout in layouts_of(node))
        names = {name for layout in layouts for name in names_in(layout.numbers)}
        return frozenset(i for i, name in enumerate(self.names) if name in names)

    def formulas(self, numbers: Iterable[int]) -> Formulas:
        """``numbers`` as a function of the sizes, which evaluates each distinct one once."""
        index: dict[str, int] = {}
        place = np.array([index.setdefault(repr(n), len(index)) for n in numbers], int)
        code = f"lambda {', '.join(self.names)}: ({''.join(f'{text}, ' for text in index)})"
        evaluate = eval(code, dict(MODULES))
        return lambda values: np.array(evaluate(*values), dtype=np.int64)[place]


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor lies in its storage; numbers that follow the sizes are :class:`Size`.

    Attributes:
        shape, stride, offset: in elements.
        storage_bytes: of the whole storage.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage_bytes: int

    @property
    def numbers(self) -> tuple[int, ...]:
        """All numbers of the layout."""
        return (*self.shape, *self.stride, self.offset, self.storage_bytes)


def layouts_of(node: fx.Node) -> tuple[Layout, ...]:
    """The layout of each tensor that ``node`` returns, in order."""
    found: tuple[Layout, ...] | None = node.meta.get(LAYOUTS)
    if found is not None:
        return found
    value = node.meta.get("val")
    items = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(layout_of(t) for t in items if isinstance(t, torch.Tensor))


def layout_of(tensor: torch.Tensor) -> Layout:
    """The layout of a tensor, in plain numbers."""
    return Layout(
        tuple(map(int, tensor.shape)),
        tuple(map(int, tensor.stride())),
        int(tensor.storage_offset()),
        int(tensor.untyped_storage().nbytes()),
    )


def lay(
    node: fx.Node, layouts: Sequence[Layout], storages: dict[int, torch.UntypedStorage]
) -> None:
    """Let the tensors that ``node`` returns lie as ``layouts`` say, without data.

    Args:
        node: its value is replaced.
        layouts: of each tensor, in order.
        storages: new ones by what they stand for, so that views share them as before; what is
            missing is added.
    """
    each = iter(layouts)

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        layout, key = next(each), torch_compat.storage_key(tensor)
        if key not in storages:
            storages[key] = torch_compat.meta_storage(layout.storage_bytes)
        return torch_compat.fake_tensor(
            tensor, storages[key], layout.shape, layout.stride, layout.offset
        )

    node.meta[LAYOUTS] = tuple(layouts)
    node.meta["val"] = pytree.tree_map_only(torch.Tensor, placed, node.meta["val"])


def describe_like(node: fx.Node, source: fx.Node, value: torch.Tensor) -> None:
    """Let ``node`` return ``value``, which has the shape of what ``source`` returns.

    Requires: ``value`` is dense, in a storage of its own.
    """
    node.meta["val"] = value
    if LAYOUTS in source.meta:
        (layout,) = source.meta[LAYOUTS]
        strides = value.stride()
        order = sorted(range(value.dim()), key=lambda i: (strides[i], -i))
        stride = [1] * value.dim()
        for place, dim in enumerate(order):
            stride[dim] = product(layout.shape[i] for i in order[:place])
        nbytes = product((*layout.shape, value.element_size()))
        node.meta[LAYOUTS] = (Layout(layout.shape, tuple(stride), 0, nbytes),)
