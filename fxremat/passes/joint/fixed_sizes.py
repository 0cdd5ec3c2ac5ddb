"""Replace sizes that are symbols by numbers: those of the capture.

Dynamo may trace a step with symbols in place of sizes. Passes, planner and measurements work with
numbers, so every tensor gets the shape, strides and storage that it has at the sizes of the
capture. Each number keeps its expression (:mod:`fxremat.passes.joint.sizes`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.errors import CaptureError, DataSizesError, SizesError
from fxremat.passes.joint.graph import copy_of, replace_tensors
from fxremat.passes.joint.sizes import (
    LAYOUTS,
    PREFIX,
    Layout,
    Scale,
    Size,
    Sizes,
    evaluated,
    lay,
    layout_of,
    names_in,
    symbol,
)


def fix_sizes(module: fx.GraphModule) -> tuple[fx.GraphModule, Sizes]:
    """Return a joint graph with numbers in place of symbolic sizes, and the symbols.

    Args:
        module: AOTAutograd's joint graph; it is not changed.

    Ensures: in the returned graph each tensor is as large as at the capture, views share storages
        as before, and every node carries its layouts. Nodes that compute sizes do not exist any
        more; arguments have a :class:`Size` in place of each. Placeholders, including symbols, and
        results keep their order.

    Returns ``module`` itself where no size is a symbol.

    Raises:
        DataSizesError: a size depends on data.
        SizesError: a value that is not an integer depends on a size in a way that cannot be
            followed, or a symbol is not the size of an input.
    """
    if not any(map(is_symbolic, module.graph.nodes)):
        return module, Sizes()
    copier = _Copier()
    graph = fx.Graph()
    for node in module.graph.nodes:
        copier.copy(node, graph)
    graph.lint()
    primals = [n for n in graph.nodes if n.op == "placeholder" and not torch_compat.is_tangent(n)]
    return torch_compat.graph_module(module, graph), copier.sizes(primals)


def placed_on(module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """Return a copy of a graph whose dense traced tensors are on ``device``.

    Requires: no size is a symbol.
    Ensures: views share storages as before.
    """

    def on_device(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            return tensor
        layout = layout_of(tensor)
        storage = tensor.untyped_storage()
        return torch_compat.fake_tensor(
            tensor, storage, layout.shape, layout.stride, layout.offset, device=device
        )

    graph = copy_of(module.graph)
    replace_tensors(graph, on_device)
    return torch_compat.graph_module(module, graph)


def _symbols(*numbers: int | torch.SymInt) -> set[Any]:
    """Return the sympy symbols in the expressions of ``numbers``."""
    symbolic = (n for n in numbers if isinstance(n, torch.SymInt))
    return set().union(*(torch_compat.expression_of(n)[0].free_symbols for n in symbolic))


def _items(node: fx.Node) -> Iterator[object]:
    value = node.meta.get("val")
    yield from value if isinstance(value, (tuple, list)) else (value,)


def is_symbolic(node: fx.Node) -> bool:
    """Return whether ``node`` returns a symbolic number, or a tensor with a symbolic size."""
    for item in _items(node):
        if isinstance(item, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return True
        if isinstance(item, torch.Tensor) and torch_compat.has_symbols(item):
            return True
    return False


def _maker(number: torch.SymInt, node: fx.Node) -> fx.Node:
    """Return the first operation with a result that has ``number`` as a size.

    If there is none, returns ``node``, which has that size as well: it may be a tangent.
    """
    nodes: Iterable[fx.Node] = node.graph.nodes
    for other in nodes:
        shapes = (item.shape for item in _items(other) if isinstance(item, torch.Tensor))
        if other.op == "call_function" and any(str(number) in map(str, s) for s in shapes):
            return other
    return node


OPERATORS: Mapping[object, str] = {
    operator.add: "({} + {})",
    operator.sub: "({} - {})",
    operator.mul: "({} * {})",
    operator.truediv: "({} / {})",
    operator.pow: "({} ** {})",
    operator.neg: "(-{})",
    torch.sym_float: "torch.sym_float({})",
    torch.sym_max: "torch.sym_max({}, {})",
    torch.sym_min: "torch.sym_min({}, {})",
}
"""How Python computes a real number of sizes."""


@dataclass(slots=True)
class _Copier:
    """Copies nodes with numbers in place of symbolic sizes.

    Symbols are named in the order of their first use.
    """

    copied: dict[fx.Node, Any] = field(default_factory=dict)
    names: dict[Any, Any] = field(default_factory=dict)
    hints: dict[str, int] = field(default_factory=dict)
    most: dict[str, int | None] = field(default_factory=dict)
    numbers: dict[Any, int] = field(default_factory=dict)
    storages: dict[int, Any] = field(default_factory=dict)
    zeros: list[Any] = field(default_factory=list)

    def copy(self, node: fx.Node, graph: fx.Graph) -> None:
        """Copy ``node`` to ``graph``, unless it only computes a size."""
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
        if isinstance(value, (tuple, list)):  # attention on a GPU returns tensors and lengths
            new.meta["val"] = tuple(
                self._number(item, node) if isinstance(item, torch.SymInt) else item
                for item in value
            )
        tensors = [t for t in _items(node) if isinstance(t, torch.Tensor)]
        if node.op == "output" or not tensors:
            return
        if all(t.layout is torch.strided for t in tensors):
            lay(new, [self._layout(t, node) for t in tensors], self.storages)

    def _layout(self, tensor: torch.Tensor, node: fx.Node) -> Layout:
        """Return the layout of ``tensor``, with a :class:`Size` for each number that is symbolic.

        An input may be a view of a tensor whose sizes do not follow from the arguments of the
        forward. If it is all of that tensor in the capture, it is assumed to be all of it at every
        size.
        """
        nbytes = tensor.untyped_storage().nbytes()
        if node.op == "placeholder" and _symbols(nbytes) - _symbols(*tensor.shape):
            own_bytes = tensor.numel() * tensor.element_size()
            if torch_compat.hint_of(nbytes) == torch_compat.hint_of(own_bytes):
                nbytes = own_bytes
        return Layout(
            tuple(self._size(number, node) for number in tensor.shape),
            tuple(self._size(number, node) for number in tensor.stride()),
            self._size(tensor.storage_offset(), node),
            self._size(nbytes, node),
        )

    def _number(self, number: Any, node: fx.Node) -> float:
        """Return the symbolic ``number`` that ``node`` computes as a ``Size`` or a ``Scale``."""
        if isinstance(number, torch.SymInt):
            return self._size(number, node)
        if isinstance(number, torch.SymFloat) and node.target in OPERATORS and not node.kwargs:
            args = [self.copied.get(a, a) if isinstance(a, fx.Node) else a for a in node.args]
            if all(isinstance(a, (int, float)) for a in args):
                text = OPERATORS[node.target].format(*map(repr, args))
                names = names_in(args)
                return Scale(evaluated(Scale(0.0, text, names), names), text, names)
        raise SizesError(
            f"{node.name} ({node.target}) computes {number} from sizes, but only integers, and "
            "sums, products and quotients of integers, may depend on sizes"
            f"{torch_compat.described_lines(node)}"
        )

    def _size(self, number: Any, node: fx.Node) -> int:
        """Return ``number`` itself, or, if it is symbolic, its :class:`Size`."""
        if isinstance(number, int):
            return number
        if torch_compat.is_nested_size(number):
            raise CaptureError(
                f"{node.name} is a nested tensor, whose rows differ in length, but fxremat plans "
                "dense tensors only: compute with its values()",
                code="FXR310",
            )
        expression, hint = torch_compat.expression_of(number)
        if hint is None:
            maker = _maker(number, node)
            raise DataSizesError(
                f"the sizes {number} computed by {maker.target} depend on data"
                f"{torch_compat.described_lines(maker)}\n"
                "and lead out of the graph, or to an operation that waits for other processes. "
                "fxremat plans sizes that do not depend on data: return tensors of fixed sizes"
            )
        if expression not in self.numbers:
            self.numbers[expression] = self._named(number, expression, hint)
        return self.numbers[expression]

    def _named(self, number: torch.SymInt, expression: Any, hint: int) -> int:
        """Return ``number`` as a :class:`Size`, and give a name to each symbol that has none yet.

        Args:
            number: the symbolic number.
            expression: its sympy expression. If that has no symbols, the hint is returned.
            hint: its value at the capture.
        """
        if not expression.free_symbols:
            return hint
        for traced in sorted(expression.free_symbols, key=str):
            if traced not in self.names:
                name = f"{PREFIX}{len(self.names)}"
                self.names[traced] = symbol(name)
                traced_hint = torch_compat.symbol_hint(number, traced)
                assert traced_hint is not None  # the expression would have none either
                self.hints[name] = traced_hint
                self.most[name] = torch_compat.symbol_most(number, traced)
        self.zeros = self.zeros or torch_compat.equalities_of(number)
        return Size(hint, expression.xreplace(self.names), self.hints)

    def sizes(self, primals: Sequence[fx.Node]) -> Sizes:
        """Return the symbols of the copied graph, and the input dimension that gives each.

        Args:
            primals: the copied placeholders of the forward.

        Raises:
            SizesError: a symbol is not the size of an input.
        """
        sources: dict[str, tuple[int, int]] = {}
        for index, node in enumerate(primals):
            if isinstance(node.meta.get("val"), Size):
                sources.setdefault(repr(node.meta["val"]), (index, -1))
        for index, node in enumerate(primals):
            for layout in node.meta.get(LAYOUTS, ()):
                for dim, size in enumerate(layout.shape):
                    sources.setdefault(repr(size), (index, dim))
        missing = [name for name in self.hints if name not in sources]
        if missing:
            raise SizesError(
                f"the size {', '.join(missing)} of this step is not a dimension of an input, so "
                "it cannot be read at a call"
            )
        return Sizes(
            tuple(self.hints),
            tuple(self.hints.values()),
            tuple(sources[n] for n in self.hints),
            tuple(self.most.values()),
            tuple(
                Size(0, zero.xreplace(self.names), self.hints)
                for zero in self.zeros
                if zero.free_symbols and zero.free_symbols <= self.names.keys()
            ),
        )
