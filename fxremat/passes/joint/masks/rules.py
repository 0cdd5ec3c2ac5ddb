"""What operators of aten compute from tensors that follow from positions, without running them.

Each rule returns what an operator computes from affine and chosen tensors
(:mod:`fxremat.passes.joint.masks.positions`). What an operator without a rule computes is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.passes.joint.masks.cells import combined
from fxremat.passes.joint.masks.positions import (
    EVERYWHERE,
    Affine,
    Box,
    Chosen,
    Number,
    Value,
    expression_of,
)

INTEGERS = (torch.int64, torch.int32)
"""Dtypes whose numbers are exact for all positions."""


class Known(Protocol):
    """Formulas of the tensors of a graph."""

    def of(self, node: fx.Node) -> Value | None:
        """Return what the elements of the tensor that ``node`` returns are; ``None``: unknown."""

    def box(self, node: fx.Node) -> Box:
        """Return the positions of the tensor that ``node`` returns."""


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an operator's call by their names, with defaults."""
    schema = node.target._schema  # type: ignore[union-attr]
    return {
        a.name: node.args[i] if i < len(node.args) else node.kwargs.get(a.name, a.default_value)
        for i, a in enumerate(schema.arguments)
    }


class Call:
    """A call of an operator that returns a tensor, and reads tensors that have formulas.

    Args:
        node: the call.
        formulas: formulas of what it reads.

    Attributes:
        node, formulas: as given.
        name: name of the operator, without namespace and overload.
        arguments: its arguments by name, with defaults.
        box: the positions of the result.
        dtype: dtype of the result.
    """

    def __init__(self, node: fx.Node, formulas: Known) -> None:
        self.node, self.formulas = node, formulas
        self.name: str = node.target._schema.name.partition("::")[2]  # type: ignore[union-attr]
        self.arguments = arguments_of(node)
        self.box = formulas.box(node)
        self.dtype: torch.dtype = node.meta["val"].dtype

    def shape(self, name: str) -> tuple[Any, ...]:
        """Return the shape of the argument ``name``, as expressions."""
        return self.formulas.box(self.arguments[name]).shape

    def value(self, node: fx.Node) -> Value:
        """Return the formula of an input."""
        value = self.formulas.of(node)
        assert value is not None  # or nobody would ask for the formula of the result
        return value

    def read(self, name: str, indices: Sequence[Affine]) -> Value:
        """Return what the result is if it reads the argument ``name`` at ``indices``."""
        return self.box.read(self.value(self.arguments[name]), indices)

    def broadcast(self, node: fx.Node, box: Box | None = None) -> Value | None:
        """Return the formula of an input that is broadcast to the result, or to ``box``."""
        return broadcast(self.value(node), self.formulas.box(node), box or self.box)

    def dim(self, dim: int) -> int:
        """Return a dimension of the result that may be counted from the end."""
        return dim % max(len(self.box.shape), 1)


Rule = Callable[[Call], Value | None]


def broadcast(value: Value, old: Box, new: Box) -> Value | None:
    """Return ``value``, a tensor of the shape of ``old``, broadcast to the shape of ``new``."""
    ahead = len(new.shape) - len(old.shape)
    if ahead < 0:
        return None
    indices = []
    for dim, size in enumerate(old.shape):
        if size != 1 and size != new.shape[ahead + dim]:
            return None
        indices.append(new.index(ahead + dim) if size != 1 else Affine.of(0, len(new.shape)))
    return new.read(value, indices)


def _constant(number: Any, call: Call) -> Value | None:
    """Return a tensor like the result of ``call`` whose elements are all ``number``."""
    if call.dtype in INTEGERS:
        return Affine.of(int(number), len(call.box.shape)) if _is_whole(number) else None
    if getattr(number, "names", None):  # follows sizes
        return None
    with torch_compat.real_execution():
        return Chosen.of(torch.full((), number, dtype=call.dtype).item())


def _is_whole(number: object) -> bool:
    return isinstance(number, int)


def filled(call: Call) -> Value | None:
    """Describe ``full``, ``ones``, ``zeros`` and operators like them."""
    numbers = {"ones": 1, "zeros": 0, "new_ones": 1, "new_zeros": 0}
    numbers |= {"ones_like": 1, "zeros_like": 0}
    given = call.arguments.get("fill_value", call.arguments.get("s"))
    return _constant(numbers.get(call.name, given), call)


def _counted(call: Call) -> Value | None:
    """Describe ``arange`` and ``iota``."""
    start, step = call.arguments.get("start", 0), call.arguments.get("step", 1)
    if call.dtype not in INTEGERS or not _is_whole(start) or type(step) is not int:
        return None
    return call.box.index(0).scaled(step).plus(Affine.of(start, 1))


def _reshaped(call: Call) -> Value | None:
    """Describe views that only add or remove dimensions of size 1."""
    name = next(iter(call.arguments))
    box = call.box
    kept = [dim for dim, size in enumerate(box.shape) if size != 1]
    shape = call.shape(name)
    if [size for size in shape if size != 1] != [box.shape[dim] for dim in kept]:
        return None
    each = iter(kept)
    rank = len(box.shape)
    return call.read(name, [Affine.of(0, rank) if n == 1 else box.index(next(each)) for n in shape])


def _expanded(call: Call) -> Value | None:
    return call.broadcast(call.arguments["self"])


def _permuted(call: Call) -> Value | None:
    """Describe ``permute``, ``transpose`` and ``t``."""
    order = list(range(len(call.box.shape)))
    if "dims" in call.arguments:
        order = [call.dim(dim) for dim in call.arguments["dims"]]
    elif len(order) > 1:
        one = call.dim(call.arguments.get("dim0", 0))
        other = call.dim(call.arguments.get("dim1", 1))
        order[one], order[other] = order[other], order[one]
    box = call.box
    return call.read("self", [box.index(order.index(dim)) for dim in range(len(order))])


def _start(number: int | None, size: Any, box: Box) -> Affine | None:
    """Return where a slice of a dimension begins, or an index into it; ``None`` if unknown."""
    begin = expression_of(number or 0)
    if begin.is_number and begin < 0:
        begin = size + begin
    first = Affine(begin, (0,) * len(box.shape))
    return first if box.holds(first) else None


def _sliced(call: Call) -> Value | None:
    dim, step = call.dim(call.arguments["dim"]), call.arguments["step"]
    box = call.box
    start = _start(call.arguments["start"], call.shape("self")[dim], box)
    if start is None or type(step) is not int:
        return None
    indices = [box.index(i) for i in range(len(box.shape))]
    indices[dim] = indices[dim].scaled(step).plus(start)
    return call.read("self", indices)


def _padded(call: Call) -> Value | None:
    """Describe ``constant_pad_nd`` of a tensor that is one of two numbers."""
    box, pad, rank = call.box, call.arguments["pad"], len(call.box.shape)
    indices = list(map(box.index, range(rank)))
    planes: list[Affine] = []
    for place, size in enumerate(call.shape("self")[: -len(pad) // 2 - 1 : -1]):
        dim = rank - 1 - place
        indices[dim] = indices[dim].plus(Affine.of(pad[2 * place], rank), -1)
        last = Affine(size - 1, (0,) * rank)
        planes += [indices[dim], last.plus(indices[dim], -1)]
    value = _as_chosen(call.read("self", indices))
    added = _as_chosen(_constant(call.arguments["value"], call))
    if value is None or added is None:
        return None
    number = added.inside
    kept = Chosen(box.area(planes), True, False)
    return combined(box, [kept, value], lambda keeps, own: own if keeps else number)


def _selected(call: Call) -> Value | None:
    shape, box = call.shape("self"), call.box
    dim = call.arguments["dim"] % len(shape)
    index = _start(call.arguments["index"], shape[dim], box)
    if index is None:
        return None
    return call.read(
        "self", [*map(box.index, range(dim)), index, *map(box.index, range(dim, len(shape) - 1))]
    )


def _indexed(call: Call) -> Value | None:
    """Describe ``index`` by integers in the first dimensions, which must be within bounds."""
    given, shape, box = call.arguments["indices"], call.shape("self"), call.box
    if any(not isinstance(index, fx.Node) for index in given):
        return None
    behind = len(shape) - len(given)
    front = Box(box.shape[: len(box.shape) - behind], box.most)
    rank = len(front.shape)
    indices: list[Affine] = []
    for node, size in zip(given, shape, strict=False):
        index = call.broadcast(node, front)
        if not isinstance(index, Affine):
            return None
        beyond = Affine(size - 1, (0,) * rank).plus(index, -1)
        if not front.holds(index) or not front.holds(beyond):
            return None
        indices.append(Affine(index.constant, (*index.slopes, *(0,) * behind)))
    return call.read("self", [*indices, *map(box.index, range(rank, len(box.shape)))])


def _joined(call: Call) -> Value | None:
    """Describe ``cat`` of tensors that continue each other."""
    dim, box, nodes = call.dim(call.arguments["dim"]), call.box, call.arguments["tensors"]
    values = list(map(call.value, nodes))
    if all(isinstance(v, Chosen) and v.area == EVERYWHERE for v in values):
        return values[0] if len(set(map(repr, values))) == 1 else None
    indices = list(map(box.index, range(len(box.shape))))
    begin = expression_of(0)
    made: list[Affine] = []
    points: list[tuple[Affine, Affine]] = []
    for node, value in zip(nodes, values, strict=True):
        shape = call.formulas.box(node).shape
        if not isinstance(value, Affine) or len(shape) != len(box.shape):
            return None
        place = Affine(begin, (0,) * len(shape))
        if shape[dim] == 1:
            points.append((place, value))
        else:
            from_there = [*indices[:dim], indices[dim].plus(place, -1), *indices[dim + 1 :]]
            made.append(value.at(from_there, len(shape)))
        begin = begin + shape[dim]
    if not made or any(other != made[0] for other in made):
        return None
    for place, value in points:
        if made[0].at([*indices[:dim], place, *indices[dim + 1 :]], len(indices)) != value:
            return None
    return made[0]


def _summed(call: Call) -> Value | None:
    """Describe ``cumsum`` of equal numbers."""
    value = call.value(call.arguments["self"])
    if isinstance(value, Affine):
        each = int(value.constant) if value.is_constant else None
    else:
        each = int(value.inside) if value.area == EVERYWHERE and _is_whole(value.inside) else None
    if each is None or call.dtype not in INTEGERS:
        return None
    return call.box.index(call.dim(call.arguments["dim"])).scaled(each).shifted(each)


def _banded(call: Call) -> Value | None:
    """Describe ``tril`` and ``triu``."""
    value, box, diagonal = (
        _as_chosen(call.broadcast(call.arguments["self"])),
        call.box,
        call.arguments["diagonal"],
    )
    if value is None:
        return None
    rank = len(box.shape)
    above = box.index(rank - 1).plus(box.index(rank - 2), -1).plus(Affine.of(diagonal, rank), -1)
    kept = box.area([above.scaled(-1) if call.name == "tril" else above])
    zero = type(value.inside)(0)
    return combined(
        box, [Chosen(kept, True, False), value], lambda keeps, number: number if keeps else zero
    )


def _as_chosen(value: Value | None) -> Chosen | None:
    """Return equal integers as a chosen tensor; ``None`` for other affine tensors."""
    if isinstance(value, Affine):
        return Chosen.of(int(value.constant)) if value.is_constant else None
    return value


def pointwise(call: Call) -> Value | None:
    """Describe an operator that computes each element from elements at the same position."""
    values = {node: call.broadcast(node) for node in call.node.all_input_nodes}
    if any(isinstance(v, Affine) and not v.is_constant for v in values.values()):
        return _of_integers(call, values)
    chosen = [own for own in map(_as_chosen, values.values()) if own is not None]
    if len(chosen) < len(values):
        return None
    made = combined(call.box, chosen, lambda *numbers: _evaluated(call, numbers))
    if made is not None and made.area == EVERYWHERE:
        return _constant(made.inside, call)
    return made


_PLACEMENT = ("device", "layout", "pin_memory", "memory_format", "non_blocking")
"""Arguments of copies that have no influence on numbers."""


def _evaluated(call: Call, numbers: Sequence[Number]) -> Number:
    """Return what a pointwise operator computes from tensors whose elements are ``numbers``."""
    given = dict(zip(call.node.all_input_nodes, numbers, strict=True))

    def tensor(node: fx.Node) -> torch.Tensor:
        traced: torch.Tensor = node.meta["val"]
        # Types are promoted in another way for tensors without dimensions.
        return torch.full((1,) * min(traced.dim(), 1), given[node], dtype=traced.dtype)

    with torch_compat.real_execution(), torch.no_grad():
        args, kwargs = fx.map_arg((call.node.args, dict(call.node.kwargs)), tensor)
        kwargs = {name: kwargs[name] for name in kwargs if name not in _PLACEMENT}
        result: Number = call.node.target(*args, **kwargs).item()  # type: ignore[operator]
        return result


_COPIES = ("_to_copy", "clone", "alias", "detach", "lift_fresh_copy", "convert_element_type")


def _of_integers(call: Call, values: Mapping[fx.Node, Value | None]) -> Value | None:
    """Describe sums, differences, comparisons and copies of affine tensors."""
    rank = len(call.box.shape)
    operands: list[Affine] = []
    for name in ("self", "a", "other"):
        given = call.arguments.get(name)
        if given is None:
            continue
        value = values[given] if isinstance(given, fx.Node) else None
        if type(given) is int or getattr(given, "expression", None) is not None:
            value = Affine.of(given, rank)
        if isinstance(value, Chosen) or value is None:
            return None
        operands.append(value)
    if call.name in _COPIES:
        return operands[0] if call.dtype in INTEGERS else None
    if len(operands) != 2 or call.arguments.get("alpha", 1) != 1:
        return None
    one, other = operands
    if call.dtype in INTEGERS and call.name in ("add", "sub"):
        return one.plus(other, 1 if call.name == "add" else -1)
    return _compared(call, one, other) if call.dtype is torch.bool else None


def _compared(call: Call, one: Affine, other: Affine) -> Value | None:
    more = one.plus(other, -1)  # at least 0 where ``one`` is at least ``other``
    less = more.scaled(-1)
    planes = {
        "ge": [more], "gt": [more.shifted(-1)], "le": [less], "lt": [less.shifted(-1)],
        "eq": [more, less], "ne": [more, less],
    }.get(call.name)  # fmt: skip
    if planes is None:
        return None
    return call.box.chosen(call.box.area(planes, is_outside=call.name == "ne"), True, False)


_OPERATORS: Mapping[Rule, str] = {
    filled: "full ones zeros new_full new_ones new_zeros full_like ones_like zeros_like"
    " scalar_tensor",
    _counted: "arange iota",
    _reshaped: "view _unsafe_view reshape unsqueeze squeeze",
    _expanded: "expand",
    _permuted: "permute transpose t",
    _sliced: "slice",
    _padded: "constant_pad_nd",
    _selected: "select",
    _indexed: "index",
    _joined: "cat",
    _summed: "cumsum",
    _banded: "tril triu",
    pointwise: " ".join((*_COPIES, "where", "masked_fill")),
}

RULES = {name: rule for rule, names in _OPERATORS.items() for name in names.split()}
