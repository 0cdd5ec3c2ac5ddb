"""Sizes that are symbols: a graph traced for all sizes as one of those it was traced with.

Dynamo may trace a step with symbols in place of sizes. The passes, the planner and whoever
measures work with numbers, so a symbolic graph is settled first: every tensor gets the shape,
strides and storage that it has at the sizes of the capture, and a number that follows the sizes
stays in the arguments as a :class:`Size`, which is that number and still knows how it follows.
Emitted code prints it as its expression; :class:`Formulas` evaluates many of them at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import sympy
import torch
from numpy.typing import NDArray
from torch import fx

from fxremat import torch_compat
from fxremat.errors import CaptureError

LAYOUTS = "fxremat_layouts"
"""Metadata of a node of a settled graph: the :class:`Layout` of each tensor that it returns."""

PREFIX = "SIZE"
"""Symbols are named so, and numbered as they are first met. Names of nodes are in lower case."""

Values = tuple[int, ...]
"""A number for each symbol."""


class Size(int):
    """A number that follows the sizes of a step.

    As an ``int`` it is its value at the sizes of the capture. It is written as its expression,
    and two of them are equal if their expressions are, whatever their values.

    Attributes:
        expression: of sympy.
        names: the symbols in it and their values at the capture.
    """

    expression: Any
    names: Mapping[str, int]
    _text: str

    def __new__(cls, value: int, expression: Any, names: Mapping[str, int]) -> Size:
        """``value``, of an expression in which ``names`` may occur."""
        self = super().__new__(cls, value)
        self.expression = expression
        self.names = {str(s): names[str(s)] for s in sorted(expression.free_symbols, key=str)}
        self._text = torch_compat.python_text(expression)
        return self

    @staticmethod
    def named(name: str, value: int) -> Size:
        """A symbol of its own, for what is found out otherwise for each size."""
        return Size(value, _symbol(name), {name: value})

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (int(self), self.expression, self.names)

    def __repr__(self) -> str:
        return self._text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Size) and other._text == self._text

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._text)


def _symbol(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, positive=True, integer=True)


def product(factors: Iterable[int]) -> int:
    """Of numbers, some of which may follow the sizes."""
    factors = list(factors)
    names = {name: n for x in factors if isinstance(x, Size) for name, n in x.names.items()}
    value = math.prod(int(x) for x in factors)
    if not names:
        return value
    expressions = [x.expression if isinstance(x, Size) else sympy.Integer(x) for x in factors]
    return Size(value, sympy.Mul(*expressions), names)


def difference(one: int, other: int) -> int:
    """Of numbers, which may follow the sizes."""
    value = int(one) - int(other)
    names = {name: n for x in (one, other) if isinstance(x, Size) for name, n in x.names.items()}
    if not names:
        return value
    first, second = (getattr(x, "expression", x) for x in (one, other))
    found = sympy.sympify(first) - second
    return Size(value, found, names) if found.free_symbols else value


def names_in(value: object) -> dict[str, int]:
    """The symbols in an argument of an operation, and their values at the capture."""
    if isinstance(value, Size):
        return dict(value.names)
    if isinstance(value, (tuple, list)):
        return {name: n for item in value for name, n in names_in(item).items()}
    if isinstance(value, dict):
        return names_in(list(value.values()))
    if isinstance(value, slice):
        return names_in((value.start, value.stop, value.step))
    return {}


MODULES: Mapping[str, object] = {"math": math, "torch": torch}
"""What expressions may name beside symbols."""


def number_at(number: int, sizes: Mapping[str, int]) -> int:
    """A number, which may follow the sizes, where these are ``sizes``."""
    return int(evaluated(number, sizes))


def evaluated(number: int, sizes: Mapping[str, Any]) -> Any:
    """A number, which may follow the sizes, where these are ``sizes``, be they symbols."""
    return eval(_code(repr(number)), {**MODULES, **sizes}) if isinstance(number, Size) else number


@functools.cache
def _code(text: str) -> Any:
    return compile(text, "<size>", "eval")


class Formulas:
    """Many numbers as functions of the sizes: each distinct one is evaluated once.

    Args:
        names: of the symbols.
        numbers: plain ones, and :class:`Size`.
    """

    def __init__(self, names: Sequence[str], numbers: Iterable[int]) -> None:
        index: dict[str, int] = {}
        self._place = np.array([index.setdefault(repr(n), len(index)) for n in numbers], int)
        code = f"lambda {', '.join(names)}: ({''.join(f'{text}, ' for text in index)})"
        self._evaluate: Callable[..., tuple[int, ...]] = eval(code, dict(MODULES))

    def __call__(self, values: Values) -> NDArray[np.int64]:
        """All of them at sizes ``values``, in their order."""
        distinct = np.array(self._evaluate(*values), dtype=np.int64)
        found: NDArray[np.int64] = distinct[self._place]
        return found


@dataclass(frozen=True, slots=True)
class Sizes:
    """The symbols of a step.

    Attributes:
        names: of each, as emitted code has them; none where all sizes are numbers.
        hints: their values at the capture.
        sources: where each is read: a primal and its dimension, -1 where it is the number itself.
        most: the largest value of each for which the graph holds; ``None``: any.
    """

    names: tuple[str, ...] = ()
    hints: Values = ()
    sources: tuple[tuple[int, int], ...] = ()
    most: tuple[int | None, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.names)

    def values(self, primals: Sequence[Any]) -> Values:
        """Those of a call of the forward.

        Args:
            primals: what it takes.
        """
        return tuple(
            int(primals[i] if dim < 0 else primals[i].shape[dim]) for i, dim in self.sources
        )

    def named(self, values: Values) -> dict[str, int]:
        """``values`` by the names that emitted code has."""
        return dict(zip(self.names, values, strict=True))

    def shaping(self, nodes: Iterable[fx.Node]) -> frozenset[int]:
        """Symbols that a tensor of ``nodes`` follows; the others are only computed with."""
        numbers = (n for node in nodes for layout in layouts_of(node) for n in layout.numbers)
        names = {name for number in numbers if isinstance(number, Size) for name in number.names}
        return frozenset(i for i, name in enumerate(self.names) if name in names)

    def formulas(self, numbers: Iterable[int]) -> Formulas:
        """``numbers`` as functions of the sizes."""
        return Formulas(self.names, numbers)


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
        """All of them."""
        return (*self.shape, *self.stride, self.offset, self.storage_bytes)


def layouts_of(node: fx.Node) -> tuple[Layout, ...]:
    """Of each tensor that ``node`` returns, in order."""
    found: tuple[Layout, ...] | None = node.meta.get(LAYOUTS)
    if found is not None:
        return found
    value = node.meta.get("val")
    items = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(_layout(t, int) for t in items if isinstance(t, torch.Tensor))


def _layout(tensor: torch.Tensor, number: Callable[[Any], int]) -> Layout:
    return Layout(
        tuple(map(number, tensor.shape)),
        tuple(map(number, tensor.stride())),
        number(tensor.storage_offset()),
        number(tensor.untyped_storage().nbytes()),
    )


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


def settle(module: fx.GraphModule) -> tuple[fx.GraphModule, Sizes]:
    """A joint graph with symbols in place of sizes, as one of the sizes of its capture.

    Args:
        module: AOTAutograd's joint graph; it is not changed.

    Ensures: it is the graph itself where no size is a symbol. Else a copy in which each tensor
        is as large as at the capture, views share storages as before, and every node carries
        its layouts; what computes sizes is gone, and what read it has a :class:`Size` in its
        place. Placeholders, symbols among them, and results stay where they are.

    Raises:
        CaptureError: a size depends on data, or a value that is no integer depends on a size.
    """
    if not any(map(_is_symbolic, module.graph.nodes)):
        return module, Sizes()
    settler = _Settler()
    graph = fx.Graph()
    for node in module.graph.nodes:
        settler.copy(node, graph)
    graph.lint()
    primals = [n for n in graph.nodes if n.op == "placeholder" and not torch_compat.is_tangent(n)]
    return torch_compat.graph_module(module, graph), settler.sizes(primals)


def place(module: fx.GraphModule, device: torch.device) -> None:
    """Let the tensors of a settled graph lie on ``device``; the graph is changed.

    Views share storages as before.
    """

    def placed(item: object) -> object:
        if not isinstance(item, torch.Tensor) or item.layout is not torch.strided:
            return item
        layout = _layout(item, int)
        return torch_compat.fake_tensor(
            item,
            item.untyped_storage(),
            layout.shape,
            layout.stride,
            layout.offset,
            device=device,
        )

    for node in module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, (tuple, list)):
            node.meta["val"] = type(value)(map(placed, value))
        elif value is not None:
            node.meta["val"] = placed(value)


def _items(node: fx.Node) -> Iterator[object]:
    value = node.meta.get("val")
    yield from value if isinstance(value, (tuple, list)) else (value,)


def _is_symbolic(node: fx.Node) -> bool:
    for item in _items(node):
        if isinstance(item, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return True
        if isinstance(item, torch.Tensor) and torch_compat.has_symbols(item):
            return True
    return False


def _maker(number: torch.SymInt, node: fx.Node) -> fx.Node:
    """The operation whose result has a size; ``node``, which has it too, may be a tangent."""
    nodes: Iterable[fx.Node] = node.graph.nodes
    for other in nodes:
        shapes = (item.shape for item in _items(other) if isinstance(item, torch.Tensor))
        if other.op == "call_function" and any(str(number) in map(str, s) for s in shapes):
            return other
    return node


@dataclass(slots=True)
class _Settler:
    """Copies nodes; symbols get their names as they are met."""

    copied: dict[fx.Node, Any] = field(default_factory=dict)
    names: dict[Any, Any] = field(default_factory=dict)
    hints: dict[str, int] = field(default_factory=dict)
    most: dict[str, int | None] = field(default_factory=dict)
    numbers: dict[Any, int] = field(default_factory=dict)
    storages: dict[int, Any] = field(default_factory=dict)

    def copy(self, node: fx.Node, graph: fx.Graph) -> None:
        """Add ``node`` to ``graph``, unless it only computes a size."""
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            number = self._number(value, node)
            if node.op == "placeholder":
                new = graph.node_copy(node, self.copied.__getitem__)
                new.meta["val"] = number
            self.copied[node] = number
            return
        new = graph.node_copy(node, self.copied.__getitem__)
        self.copied[node] = new
        new.meta.pop("tensor_meta", None)
        tensors = [t for t in _items(node) if isinstance(t, torch.Tensor)]
        if node.op == "output" or not tensors:
            return
        if all(t.layout is torch.strided for t in tensors):
            new.meta[LAYOUTS] = tuple(
                _layout(t, lambda number: self._number(number, node)) for t in tensors
            )
            made = map(self._tensor, tensors, new.meta[LAYOUTS])
            values = [
                next(made) if isinstance(item, torch.Tensor) else item for item in _items(node)
            ]
            new.meta["val"] = type(value)(values) if isinstance(value, (tuple, list)) else values[0]

    def _number(self, number: Any, node: fx.Node) -> int:
        """A plain number, or a :class:`Size`."""
        if isinstance(number, int):
            return number
        if isinstance(number, (torch.SymFloat, torch.SymBool)):
            raise CaptureError(
                f"{node.name} ({node.target}) computes {number} from sizes: only whole numbers "
                f"may follow them\n{node.meta.get('stack_trace', '')}\n"
                "pass dynamic=False to torch.compile"
            )
        expression, hint = torch_compat.expression_of(number)
        if hint is None:
            maker = _maker(number, node)
            raise CaptureError(
                f"the sizes {number} computed by {maker.target} depend on data\n"
                f"{maker.meta.get('stack_trace', '')}\n"
                "fxremat plans shapes known before: replace the data-dependent operation"
            )
        if expression not in self.numbers:
            self.numbers[expression] = self._size(number, expression, hint)
        return self.numbers[expression]

    def _size(self, number: torch.SymInt, expression: Any, hint: int) -> int:
        if not expression.free_symbols:
            return hint
        for symbol in sorted(expression.free_symbols, key=str):
            if symbol not in self.names:
                name = f"{PREFIX}{len(self.names)}"
                self.names[symbol] = _symbol(name)
                self.hints[name] = torch_compat.symbol_hint(number, symbol)
                self.most[name] = torch_compat.symbol_most(number, symbol)
        return Size(hint, expression.xreplace(self.names), self.hints)

    def _tensor(self, traced: torch.Tensor, layout: Layout) -> torch.Tensor:
        """The tensor at the sizes of the capture; those of one storage share one."""
        key = torch_compat.storage_key(traced)
        if key not in self.storages:
            self.storages[key] = torch_compat.meta_storage(layout.storage_bytes)
        return torch_compat.fake_tensor(
            traced, self.storages[key], layout.shape, layout.stride, layout.offset
        )

    def sizes(self, primals: Sequence[fx.Node]) -> Sizes:
        """The symbols, and where they are read.

        Raises:
            CaptureError: one is no input's size.
        """
        found: dict[str, tuple[int, int]] = {}
        for index, node in enumerate(primals):
            if isinstance(node.meta.get("val"), Size):
                found.setdefault(repr(node.meta["val"]), (index, -1))
        for index, node in enumerate(primals):
            for layout in node.meta.get(LAYOUTS, ()):
                for dim, size in enumerate(layout.shape):
                    found.setdefault(repr(size), (index, dim))
        lost = [name for name in self.hints if name not in found]
        if lost:
            raise CaptureError(
                f"{', '.join(lost)} of this step is no dimension of an input, which its sizes "
                "could be read from: pass dynamic=False to torch.compile"
            )
        return Sizes(
            tuple(self.hints),
            tuple(self.hints.values()),
            tuple(found[n] for n in self.hints),
            tuple(self.most.values()),
        )
