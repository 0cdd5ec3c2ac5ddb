"""Whether operations keep their bits in parts: found out by running them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fxremat.costs import bits
from fxremat.costs.bits import keeps_bits, same_bits_without_mask
from fxremat.costs.cache import CostCache
from fxremat.passes.joint.masks import BACKWARD, FORWARD
from fxremat.passes.joint.sizes import Layout
from fxremat.passes.split.parts import Output, Parts
from fxremat.passes.split.rules import Result, Rows

ROWS, WIDTH = 8, 4


def parts_of(*operations: Any, name: str, part_rows: int = 2, sums: bool = False) -> Parts:
    """A run of operations of one matrix each, rows of it or a sum over them."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    for operation in operations:
        value = graph.call_function(operation, (value,))
    graph.output((value,))
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
        part_bytes=0,
        whole=(),
    )


def answer(parts: Parts, cache: CostCache | None = None, **options: Any) -> bool:
    options = {"whole": None, **options}
    return keeps_bits(parts, [torch.empty(ROWS, WIDTH)], (), cache=cache or CostCache(), **options)


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
    parts = parts_of(torch.neg, name="neg")
    assert answer(parts, whole=lambda given: [-given[0]])
    assert not answer(parts, whole=lambda given: [given[0].exp()])


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

    assert not answer(parts_of(large, name="large"))


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
    parts.settle((), keeps_bits=keeps)
    x = torch.randn(ROWS, WIDTH)
    assert torch.equal(parts(x), x + 1)
    assert seen == ([2] * 4 if keeps else [ROWS])
    assert parts.count({}) == (4 if keeps else 1)


def test_they_are_one_where_bits_of_any_call_would_change():
    parts = parts_of(torch.neg, name="neg")
    for keeps, parts_now in ((True, 4), (False, 1), (True, 1)):
        parts.settle((), keeps_bits=keeps)
        assert parts.count({}) == parts_now


def attention(operation: Any, *, tokens: int, dtype: torch.dtype) -> fx.Node:
    """A node of attention that reads a mask of as many keys as queries."""
    graph = fx.Graph()
    shape = (2, 2, tokens, 8)

    def given(*sizes: int, of: torch.dtype = dtype) -> fx.Node:
        node = graph.placeholder("x")
        node.meta["val"] = torch.empty(sizes, dtype=of)
        return node

    args = [given(*shape) for _ in range(3)]
    if operation is BACKWARD:
        logsumexp = given(2, tokens, 2, of=torch.float32)
        logsumexp.meta["val"] = logsumexp.meta["val"].transpose(1, 2)
        args = [given(*shape), *args, given(*shape), logsumexp, 0.0, False]
    return graph.call_function(operation, tuple(args), {"attn_mask": given(tokens, tokens)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 33, 300])
@pytest.mark.parametrize("operation", [FORWARD, BACKWARD])
def test_attention_without_its_causal_mask_is_compared(
    operation: Any, tokens: int, dtype: torch.dtype
):
    node = attention(operation, tokens=tokens, dtype=dtype)
    state = torch.get_rng_state()
    found = same_bits_without_mask(node, cache=CostCache())
    assert torch.equal(torch.get_rng_state(), state)
    query, key, value = torch.randn(3, 2, 2, tokens, 8, dtype=dtype)
    mask = torch.full((tokens, tokens), -torch.inf, dtype=dtype).triu(1)
    results = list(FORWARD(query, key, value, 0.0, False, attn_mask=mask))
    of_causal = list(FORWARD(query, key, value, 0.0, True))
    if operation is BACKWARD:
        read = (torch.ones_like(query), query, key, value, *results, 0.0)
        results, of_causal = (
            list(BACKWARD(*read, False, attn_mask=mask)),
            list(BACKWARD(*read, True)),
        )
    assert all(map(torch.equal, results, of_causal)) or not found


def test_attention_that_differs_without_its_mask_keeps_it(monkeypatch: pytest.MonkeyPatch):
    node, cache = attention(FORWARD, tokens=33, dtype=torch.float32), CostCache()
    monkeypatch.setattr(bits, "causal_arguments", lambda operation, args: args)
    assert not same_bits_without_mask(node, cache=cache)
    monkeypatch.undo()
    assert not same_bits_without_mask(node, cache=cache), "compared once"
