"""Formulas of positions have the values of the operations that they describe, at all sizes."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxremat.passes.joint.fixed_sizes import fix_sizes
from fxremat.passes.joint.masks.formulas import Formulas
from fxremat.passes.joint.masks.positions import Affine, Value
from fxremat.passes.joint.sizes import Sizes

SIZES = ((5, 7), (7, 7), (12, 3), (2, 30))

Function = Callable[[Tensor], Tensor]


def rows(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0])[:, None]


def columns(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1])[None, :]


def traced(function: Function) -> tuple[fx.Node, Sizes]:
    """The node of the result of ``function``, and the symbols of its graph."""
    graph = make_fx(function, tracing_mode="symbolic")(torch.zeros(5, 7))
    module, sizes = fix_sizes(graph)
    return module.graph.output_node().args[0], sizes  # type: ignore[return-value]


def formula(function: Function) -> Value | None:
    node, sizes = traced(function)
    return Formulas(sizes).of(node)


def values_of(value: Value, names: dict[str, int], shape: tuple[int, ...]) -> np.ndarray:
    """All elements that a formula describes, at some sizes."""

    def numbers(affine: Affine) -> np.ndarray:
        constant = affine.constant.subs({s: names[str(s)] for s in affine.constant.free_symbols})
        indices = np.indices(shape)
        slopes = zip(affine.slopes, indices, strict=True)
        return int(constant) + sum((a * i for a, i in slopes), np.zeros(shape, int))

    if isinstance(value, Affine):
        return numbers(value)
    inside = np.ones(shape, bool)
    for plane in value.area.planes:
        inside &= numbers(plane) >= 0
    return np.where(inside != value.area.is_outside, value.inside, value.outside)


def assert_holds(function: Function) -> bool:
    """A formula, if there is one, describes the values of ``function``; return if there is one."""
    node, sizes = traced(function)
    value = Formulas(sizes).of(node)
    if value is None:
        return False
    for shape in SIZES:
        real = function(torch.zeros(shape))
        names = sizes.named(tuple(shape[dim] for _, dim in sizes.sources))
        assert np.array_equal(values_of(value, names, tuple(real.shape)), real.numpy()), shape
    return True


def packed(x: Tensor) -> Tensor:
    """As transformers looks for sequences that follow each other in a row."""
    at = torch.arange(x.shape[1])[None].expand(x.shape[0], -1)
    before = torch.cat([at[:, :1] - 1, at], -1)
    return (torch.diff(before, dim=-1) != 1).cumsum(-1)


def as_transformers(x: Tensor) -> Tensor:
    """The indices of queries and keys are read from tensors."""
    at = torch.arange(x.shape[1]) + 0
    items = torch.arange(x.shape[0])[:, None, None, None]
    query, key = at[None, None, :, None], at[None, None, None, :]
    table = at[None].expand(x.shape[0], -1)
    segment = packed(x)
    same = segment[items, query] == segment[items, key]
    seen = table[items, key] <= table[items, query]
    mask = query.new_ones((), dtype=torch.bool) & seen & same
    mask = mask.expand(x.shape[0], -1, x.shape[1], x.shape[1])
    return torch.where(mask, torch.scalar_tensor(0.0), torch.scalar_tensor(-torch.inf))


DESCRIBED: dict[str, Function] = {
    "transformers": as_transformers,
    "packed": packed,
    "lower": lambda x: torch.ones(x.shape, dtype=torch.bool).tril(),
    "numbers": lambda x: torch.full(x.shape, -torch.inf).triu(1),
    "integers": lambda x: torch.ones(x.shape, dtype=torch.int64).tril(-1),
    "equal to": lambda x: torch.ones(x.shape).tril() == 0,
    "filled": lambda x: torch.zeros(x.shape).masked_fill(columns(x) > rows(x), -torch.inf),
    "half": lambda x: torch.full(x.shape, -1e9).half(),
    "window": lambda x: (columns(x) <= rows(x)) & (columns(x) > rows(x) - 3),
    "no window": lambda x: ~((columns(x) <= rows(x)) & (columns(x) > rows(x) - 3)),
    "window filled": lambda x: torch.zeros(x.shape).masked_fill(
        ~((columns(x) <= rows(x)) & (columns(x) > rows(x) - 3)), -torch.inf
    ),
    "diagonal": lambda x: columns(x) == rows(x),
    "no diagonal": lambda x: columns(x) != rows(x),
    "all": lambda x: (rows(x) >= 0) | (columns(x) > 3),
    "none": lambda x: rows(x) < 0,
    "half of it": lambda x: (columns(x) < x.shape[1] // 2).expand(x.shape[0], -1),
    "from the end": lambda x: torch.arange(x.shape[1])[-1:],
    "one": lambda x: torch.arange(x.shape[1])[1],
    "last": lambda x: torch.arange(x.shape[1])[-1],
    "every second": lambda x: torch.arange(x.shape[1])[1::2],
    "distances": lambda x: (columns(x) - rows(x)).t().to(torch.int32).unsqueeze(0).squeeze(0),
    "permuted": lambda x: (columns(x) - rows(x))[None].permute(2, 0, 1),
    "padded": lambda x: torch.nn.functional.pad((columns(x) <= rows(x)).float(), (0, 3)).narrow(
        1, 0, x.shape[1]
    ),
    "padding": lambda x: torch.nn.functional.pad((columns(x) <= rows(x)).float(), (2, 3, 0, 1)),
    "steps": lambda x: torch.arange(3, 3 + 2 * x.shape[0], 2),
    "counted": lambda x: torch.ones(x.shape, dtype=torch.bool).cumsum(1),
    "joined": lambda x: torch.cat(
        [torch.arange(x.shape[0]), torch.arange(x.shape[1]) + x.shape[0]]
    ),
    "two masks": lambda x: torch.where(
        columns(x) <= rows(x), torch.full(x.shape, -torch.inf).triu(4).mT.clone().mT, -torch.inf
    ),
}


@pytest.mark.parametrize("name", DESCRIBED)
def test_formulas_have_the_values_of_operations(name: str):
    assert assert_holds(DESCRIBED[name])


UNKNOWN: dict[str, Function] = {
    "input": lambda x: x,
    "of an input": lambda x: (rows(x) >= columns(x)) & (x > 0),
    "drawn": lambda x: torch.rand(x.shape) > 0.5,
    "allocated": lambda x: torch.empty(x.shape, dtype=torch.bool),
    "like allocated": torch.empty_like,
    "not joined": lambda x: torch.cat([torch.arange(x.shape[0]), torch.arange(x.shape[1])]),
    "sums": lambda x: (columns(x) + rows(x)).cumsum(1),
    "products": lambda x: columns(x) * rows(x),
    "small numbers": lambda x: (columns(x) + rows(x)).to(torch.int8),
    "beyond the end": lambda x: torch.arange(x.shape[1])[rows(x) - 1],
    "cut off": lambda x: torch.arange(x.shape[1])[-2:],
    "slopes": lambda x: (columns(x) - rows(x)).float(),
    "blocks": lambda x: columns(x) // 2 == rows(x) // 2,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_does_not_follow_from_positions_has_no_formula(name: str):
    assert formula(UNKNOWN[name]) is None


def random_mask(draw: random.Random, depth: int) -> Function:
    if depth == 0:
        compare = draw.choice([torch.le, torch.lt, torch.ge, torch.gt, torch.eq, torch.ne])
        shift, which = draw.randint(-3, 3), draw.randint(0, 3)
        pairs: list[Function] = [columns, rows]
        one = pairs[which % 2]
        other: Callable[[Tensor], Tensor | int] = pairs[1 - which % 2] if which > 1 else lambda x: 2
        return lambda x: compare(one(x) + shift, other(x)).expand(x.shape)
    one, two = (random_mask(draw, draw.randint(0, depth - 1)) for _ in range(2))
    kind = draw.randint(0, 4)
    if kind == 0:
        return lambda x: one(x) & two(x)
    if kind == 1:
        return lambda x: one(x).logical_or(two(x))
    if kind == 2:
        return lambda x: ~one(x)
    if kind == 3:
        three = random_mask(draw, 0)
        return lambda x: torch.where(three(x), one(x), two(x))
    return lambda x: one(x) ^ two(x)


def test_random_masks_have_no_wrong_formula():
    draw = random.Random(7)
    described = [assert_holds(random_mask(draw, draw.randint(1, 3))) for _ in range(120)]
    assert sum(described) > 50


def test_a_bound_of_a_size_makes_a_window_irrelevant():
    node, sizes = traced(lambda x: (columns(x) <= rows(x)) & (columns(x) > rows(x) - 100))
    free = Formulas(sizes).of(node)
    bounded = Formulas(Sizes(sizes.names, sizes.hints, sizes.sources, (100, 100))).of(node)
    small = Formulas(Sizes(sizes.names, sizes.hints, sizes.sources, (101, 101))).of(node)
    assert len(free.area.planes) == len(small.area.planes) == 2  # type: ignore[union-attr]
    assert len(bounded.area.planes) == 1  # type: ignore[union-attr]
