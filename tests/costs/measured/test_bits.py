"""Whether operations keep their bits in parts: found out by running them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fxremat.costs.measured.bits import other_bits
from fxremat.costs.measured.cache import CostCache
from fxremat.costs.measured.contrast import contrasts
from fxremat.passes.joint.sizes import Layout
from fxremat.passes.parts.bits import are_equal
from fxremat.passes.parts.parts import Integers, Output, Parts
from fxremat.passes.parts.rows import Result, Rows

ROWS, WIDTH = 8, 4


def graph_of(*operations: Any) -> fx.Graph:
    """One part, and all parts at once."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    for operation in operations:
        value = graph.call_function(operation, (value,))
    graph.output((value,))
    return graph


def parts_of(
    *operations: Any,
    name: str,
    part_rows: int = 2,
    sums: bool = False,
    at_once: Any = None,
    integers: Integers | None = None,
) -> Parts:
    """A run of operations of one matrix each, rows of it or a sum over them."""
    graph = graph_of(*operations)
    shape = (WIDTH,) if sums else (ROWS, WIDTH)
    stride = (1,) if sums else (WIDTH, 1)
    way = Result.SUM if sums else Rows(0, 1)
    layout = Layout(shape, stride, 0, 4 * ROWS * WIDTH)
    return Parts(
        name,
        graph,
        [Rows(0, 1)],
        [Output(way, layout, torch.float32)],
        ROWS,
        part_rows,
        {},
        torch.device("cpu"),
        exact=True,
        certain=False,
        part_bytes=0,
        whole=(),
        at_once=graph_of(at_once) if at_once else graph,
        integers=integers,
    )


def answer(parts: Parts, cache: CostCache | None = None) -> bool:
    return not other_bits(parts, [torch.empty(ROWS, WIDTH)], (), cache=cache or CostCache())


def uneven(x: Tensor) -> Tensor:
    """A kernel that rounds otherwise where it is given few rows."""
    return x * 3 if len(x) == ROWS else x * 3 * (1 + 1e-6)


def test_pointwise_operations_do():
    assert answer(parts_of(torch.neg, torch.relu, name="neg"))


def test_what_rounds_otherwise_does_not():
    assert not answer(parts_of(uneven, name="uneven"))


def test_what_is_no_number_says_nothing():
    assert not answer(parts_of(lambda x: x / 0 - x / 0, name="none"))


def test_sums_over_rows_that_are_added_up_otherwise_do_not():
    assert not answer(parts_of(torch.exp, lambda x: x.sum(0), name="sum", part_rows=3, sums=True))


def test_it_is_compared_with_the_operation_itself():
    assert answer(parts_of(torch.neg, name="neg", at_once=lambda x: -x))
    assert not answer(parts_of(torch.neg, name="neg", at_once=torch.exp))


def test_an_answer_is_known_the_second_time():
    calls = []

    def counted(x: Tensor) -> Tensor:
        calls.append(len(x))
        return -x

    cache = CostCache()
    parts = parts_of(counted, name="counted")
    assert answer(parts, cache)
    before = len(calls)
    assert before >= 2 * (1 + ROWS // 2)  # twice at least
    assert answer(parts, cache)
    assert len(calls) == before


def test_no_memory_to_compare_is_no_promise():
    def large(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("there is none")

    for _ in range(2):  # nothing is cached: there may be memory another time
        with pytest.raises(torch.OutOfMemoryError, match="there is none"):
            answer(parts_of(large, name="large"))


def test_what_takes_no_made_up_numbers_is_no_promise():
    def picky(x: Tensor) -> Tensor:
        raise RuntimeError("all elements should be between 0 and 1")

    assert not answer(parts_of(picky, name="picky"))


def test_generators_are_left_as_they_were():
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    answer(parts_of(torch.neg, name="neg"))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("keeps", [True, False])
def test_parts_are_one_where_bits_would_change(keeps: bool):
    seen = []

    def noted(x: Tensor) -> Tensor:
        seen.append(len(x))
        return x + 1

    parts = parts_of(noted, name="noted")
    parts.confirm_bits((), keeps_bits=keeps)
    x = torch.randn(ROWS, WIDTH)
    assert torch.equal(parts(x), x + 1)
    assert seen == ([2] * 4 if keeps else [ROWS])
    assert parts.count({}) == (4 if keeps else 1)


def test_they_are_one_where_bits_of_any_call_would_change():
    parts = parts_of(torch.neg, name="neg")
    for keeps, parts_now in ((True, 4), (False, 1), (True, 1)):
        parts.confirm_bits((), keeps_bits=keeps)
        assert parts.count({}) == parts_now


def test_zeros_of_another_sign_are_other_bits():
    assert not answer(parts_of(lambda x: x + 0.0, name="zeros", at_once=lambda x: x.clone()))


def test_nan_of_any_bits_are_equal():
    negated = parts_of(lambda x: torch.where(x.isnan(), -x, x), name="nan", at_once=torch.clone)
    assert answer(negated)


def call_of(target: Any, *tensors: Tensor) -> fx.Node:
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{i}") for i in range(len(tensors))]
    for node, tensor in zip(nodes, tensors, strict=True):
        node.meta["val"] = tensor
    return graph.call_function(target, tuple(nodes))


def test_numbers_that_a_vector_computes_otherwise():
    aten = torch.ops.aten
    assert contrasts(call_of(aten.neg.default, torch.empty(3, 4)), CostCache()) == []
    for (number,) in contrasts(call_of(aten.gelu.default, torch.empty(3, 4)), CostCache()) or []:
        dense = number.repeat(256)
        apart = number.repeat(512)[::2]
        assert not are_equal(aten.gelu(dense), aten.gelu(apart))


def uneven_thirds(x: Tensor) -> Tensor:
    """Thirds of integers, rounded otherwise where there are few rows."""
    return x / 3 if len(x) == ROWS else x * (1 / 3)


@pytest.mark.parametrize("indices", [frozenset(), frozenset({0})])
def test_integers_that_become_floats_are_no_zeros(indices: frozenset[int]):
    integers = Integers(indices, frozenset({0}))
    given = [torch.empty(ROWS, WIDTH, dtype=torch.int64)]
    parts = parts_of(uneven_thirds, name=f"thirds{len(indices)}", integers=integers)
    assert other_bits(parts, given, (), cache=CostCache())


def test_integers_that_are_indices_are_valid():
    parts = parts_of(
        lambda x: torch.zeros(1).index_select(0, x.flatten()).view(x.shape),
        name="selected",
        integers=Integers(indices=frozenset({0})),
    )
    given = [torch.empty(ROWS, WIDTH, dtype=torch.int64)]
    assert not other_bits(parts, given, (), cache=CostCache())
