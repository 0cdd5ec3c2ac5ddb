"""Sizes that differ between calls, and numbers that follow them.

In a graph with fixed sizes (``passes.joint.fixed_sizes``) such a number is a :class:`Size` or a
:class:`Scale`: it has the value of the capture, and keeps its expression. Emitted code contains the
expression; :meth:`Sizes.formulas` evaluates many of them at once.
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
"""Key of a node's metadata: the :class:`Layout` of each tensor that it returns."""

PREFIX = "SIZE"
"""Prefix of the names of symbols, which are numbered in the order of their first use.

It is in upper case, so that no node has such a name."""

MODULES: Mapping[str, object] = {"math": math, "torch": torch}
"""Modules that expressions may name, besides symbols."""

Values = tuple[int, ...]
"""A number for each symbol."""

Formulas = Callable[[Values], NDArray[np.int64]]
"""Many numbers as a function of the sizes."""


class Following:
    """A number that depends on symbolic sizes.

    Its value as a number is that of the capture. Its text is the Python expression that computes
    it, and two such numbers are equal if their texts are, whatever their values.

    Attributes:
        names: the symbols in the expression, and their values at the capture.
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
    """A whole number that depends on symbolic sizes.

    Attributes:
        expression: the expression, as sympy has it.
    """

    expression: Any

    def __new__(cls, value: int, expression: Any, names: Mapping[str, int]) -> Size:
        """Return a whole number with the expression that computes it at other sizes.

        Args:
            value: at the sizes of the capture.
            expression: in symbols that ``names`` has.
            names: the values of symbols at the capture.
        """
        self = super().__new__(cls, value)
        self.expression = expression
        self.names = {str(s): names[str(s)] for s in sorted(expression.free_symbols, key=str)}
        self._text = torch_compat.python_text(expression)
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (int(self), self.expression, self.names)

    @staticmethod
    def named(name: str, value: int) -> Size:
        """Return ``value`` as a number whose expression is just the symbol ``name``.

        The value at other sizes is passed to emitted code by this name; it is not computed from
        inputs.
        """
        return Size(value, symbol(name), {name: value})


class Scale(Following, float):
    """A real number that depends on symbolic sizes, such as the inverse of a count.

    Its text has the order in which it was computed, because another order may round differently.
    """

    def __new__(cls, value: float, text: str, names: Mapping[str, int]) -> Scale:
        """Return a real number with the expression that computes it at other sizes.

        Args:
            value: at the sizes of the capture.
            text: the Python expression that computes it.
            names: the values of its symbols at the capture.
        """
        self = super().__new__(cls, value)
        self._text, self.names = text, dict(names)
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (float(self), self._text, self.names)


def symbol(name: str) -> sympy.Symbol:
    """Return the sympy symbol called ``name``, which stands for a positive integer."""
    return sympy.Symbol(name, positive=True, integer=True)


def product(factors: Iterable[int]) -> int:
    """Return the product of ``factors``, as a :class:`Size` if it depends on the sizes."""
    factors = list(factors)
    return _combined(math.prod(map(int, factors)), sympy.Mul, factors)


def difference(one: int, other: int) -> int:
    """Return ``one - other``, as a :class:`Size` if it depends on the sizes."""
    return _combined(int(one) - int(other), lambda a, b: a - b, (one, other))


def _combined(value: int, combine: Callable[..., Any], numbers: Sequence[int]) -> int:
    names = names_in(numbers)
    if not names:
        return value
    combined = combine(*(sympy.sympify(getattr(n, "expression", n)) for n in numbers))
    return Size(value, combined, names) if combined.free_symbols else value


def names_in(value: object) -> dict[str, int]:
    """Return the symbols in a number or in nested arguments, and their values at the capture."""
    names: dict[str, int] = {}
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, Following):
            names.update(item.names)
        elif isinstance(item, (tuple, list)):
            waiting.extend(reversed(item))
        elif isinstance(item, dict):
            waiting.extend(reversed(item.values()))
        elif isinstance(item, slice):
            waiting.extend((item.step, item.stop, item.start))
    return names


def number_at(number: int, sizes: Mapping[str, int]) -> int:
    """Return ``number``, which may be a :class:`Size`, as a plain integer at other sizes.

    Args:
        number: the number.
        sizes: the value of each symbol, by name.
    """
    return int(evaluated(number, sizes))


def evaluated(number: Any, sizes: Mapping[str, Any]) -> Any:
    """Return ``number`` at other sizes; unchanged if it does not depend on any.

    Args:
        number: a :class:`Size`, a :class:`Scale`, or any other number.
        sizes: the value of each symbol, by name. A value may be a symbol of torch.
    """
    follows = isinstance(number, Following)
    return eval(_code(repr(number)), {**MODULES, **sizes}) if follows else number


@functools.cache
def _code(text: str) -> Any:
    return compile(text, "<size>", "eval")


@dataclass(frozen=True, slots=True)
class Sizes:
    """The symbols of a step: sizes that may differ between its calls.

    Attributes:
        names: the name of each in emitted code; none where all sizes are the same in every call.
        hints: the value of each at the capture.
        sources: the primal and its dimension that give the value of each. The dimension is -1 where
            the primal is the number itself.
        most: the largest value of each for which the graph is valid; ``None`` where any is.
        zeros: numbers that are 0 at all sizes for which the graph is valid, such as a remainder.
    """

    names: tuple[str, ...] = ()
    hints: Values = ()
    sources: tuple[tuple[int, int], ...] = ()
    most: tuple[int | None, ...] = ()
    zeros: tuple[Size, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.names)

    def values(self, primals: Sequence[Any]) -> Values:
        """Return the value of each symbol in a call of the forward with ``primals``."""
        return tuple(
            int(primals[i] if dim < 0 else primals[i].shape[dim]) for i, dim in self.sources
        )

    def named(self, values: Values) -> dict[str, int]:
        """Return ``values``, one for each symbol, by the names of the symbols in emitted code."""
        return dict(zip(self.names, values, strict=True))

    def shaping(self, nodes: Iterable[fx.Node]) -> frozenset[int]:
        """Return the indices of the symbols that the layouts of results of ``nodes`` depend on.

        Other symbols are only operands of operations.
        """
        layouts = (layout for node in nodes for layout in layouts_of(node))
        names = {name for layout in layouts for name in names_in(layout.numbers)}
        return frozenset(i for i, name in enumerate(self.names) if name in names)

    def formulas(self, numbers: Iterable[int]) -> Formulas:
        """Return a function that computes ``numbers`` from a value for each symbol.

        It evaluates each distinct expression once.
        """
        index: dict[str, int] = {}
        place = np.array([index.setdefault(repr(n), len(index)) for n in numbers], int)
        code = f"lambda {', '.join(self.names)}: ({''.join(f'{text}, ' for text in index)})"
        evaluate = eval(code, dict(MODULES))
        return lambda values: np.array(evaluate(*values), dtype=np.int64)[place]


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a tensor in its storage. Numbers that depend on symbolic sizes are ``Size``.

    Attributes:
        shape, stride, offset: in elements.
        storage_bytes: bytes of the whole storage.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage_bytes: int

    @property
    def numbers(self) -> tuple[int, ...]:
        """All numbers of the layout: shape, strides, offset and bytes of the storage."""
        return (*self.shape, *self.stride, self.offset, self.storage_bytes)


def layouts_of(node: fx.Node) -> tuple[Layout, ...]:
    """Return the layout of each dense tensor that ``node`` returns, in order."""
    layouts: tuple[Layout, ...] | None = node.meta.get(LAYOUTS)
    if layouts is not None:
        return layouts
    value = node.meta.get("val")
    items = value if isinstance(value, (tuple, list)) else (value,)
    tensors = (item for item in items if isinstance(item, torch.Tensor))
    return tuple(layout_of(t) for t in tensors if t.layout is torch.strided)


def layout_of(tensor: torch.Tensor) -> Layout:
    """Return the layout of a tensor, in plain numbers."""
    return Layout(
        tuple(map(int, tensor.shape)),
        tuple(map(int, tensor.stride())),
        int(tensor.storage_offset()),
        int(tensor.untyped_storage().nbytes()),
    )


def lay(
    node: fx.Node, layouts: Sequence[Layout], storages: dict[int, torch.UntypedStorage]
) -> None:
    """Replace the fake tensors that ``node`` returns by ones with other layouts.

    Args:
        node: its metadata is changed.
        layouts: the layout of each tensor, in order.
        storages: the new storage by the key of the old one, so that views share storages as before.
            Those that are missing are added.
    """
    each = iter(layouts)

    def relaid(tensor: torch.Tensor) -> torch.Tensor:
        layout, key = next(each), torch_compat.storage_key(tensor)
        if key not in storages:
            storages[key] = torch_compat.meta_storage(layout.storage_bytes)
        return torch_compat.fake_tensor(
            tensor, storages[key], layout.shape, layout.stride, layout.offset
        )

    node.meta[LAYOUTS] = tuple(layouts)
    node.meta["val"] = pytree.tree_map_only(torch.Tensor, relaid, node.meta["val"])


def describe_like(node: fx.Node, source: fx.Node, value: torch.Tensor) -> None:
    """Set the traced value of ``node``, which has the shape of ``source`` at any sizes.

    Args:
        node: its metadata is changed.
        source: returns a tensor of the same shape. If it carries layouts,
            ``node`` gets its own layouts.
        value: what ``node`` returns, dense, in a new storage.
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
