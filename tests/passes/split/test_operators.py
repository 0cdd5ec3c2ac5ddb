"""Operations computed for some rows at a time are what they are for all."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st
from torch import Tensor

import tests.passes.split.layers  # noqa: F401
from fxremat.passes.joint.sizes import LAYOUTS, Layout, Size, product
from fxremat.passes.parts.rows import Result, Rows, Way, part_of
from fxremat.passes.split.operators import EXACT, RULES, overload
from fxremat.passes.split.ways import VIEWS, Ways, for_rows, ways
from tests.examples import examples
from tests.passes.split.cases import CASES, STAND_INS, Draws, drawn, operator_of
from tests.passes.split.parts import FACTOR, Alone, alone, differences, largest

SUM, UNREAD = Result.SUM, Result.UNREAD
KNOWN = [name for name in CASES if operator_of(name) is not None]


@pytest.mark.parametrize("name", KNOWN)
@examples(0.4)
@given(data=st.data())
def test_parts_are_the_whole(name: str, data: st.DataObject) -> None:
    d = Draws.of(data)
    op = drawn(name, d)
    for count in op.counts():
        for way in ways(op.node, count):
            sizes = d.parts(count)
            note(f"{op.node.format_node()} {[t.shape for t in op.tensors]} {way} {sizes}")
            assert not differences(op, way, sizes)


@pytest.mark.parametrize("name", KNOWN)
@examples(0.2)
@given(data=st.data())
def test_wide_parts_are_the_whole(name: str, data: st.DataObject) -> None:
    d = Draws.of(data)
    op = drawn(name, d)
    for count, width in itertools.product(op.counts(), (2, 3)):
        rows = count // width
        for way in Ways().of(op.node, rows, width) if rows * width == count and rows > 1 else ():
            sizes = d.parts(rows)
            note(f"{op.node.format_node()} {[t.shape for t in op.tensors]} {way} {sizes}")
            assert not differences(op, way, sizes)


def test_each_rule_has_a_case() -> None:
    assert {*RULES, *VIEWS} - {*CASES} == {"empty_like.default"}  # which has no numbers
    assert not EXACT - {*CASES}


def real(*shape: int) -> Tensor:
    return torch.randn(shape)


def whole(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


CAT = [real(2, 3, 4), real(2, 5, 4)]
HEADS = [real(2, 3, 5, 4), real(2, 3, 7, 4), real(2, 3, 7, 4)]
LOSS = [real(6, 3), whole(6), None]
NORM = [real(2, 3, 4), [4], real(2, 3, 1), real(2, 3, 1), real(4), real(4)]
CONV = [[1, 1], [0, 0], [1, 1], False, [0, 0], 1]
ALL, NO_BIAS = [True, True, True], [True, True, False]
FLASH = "_scaled_dot_product_flash_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"

GROUPS = [real(2, 6, 5, 4), real(2, 3, 7, 4), real(2, 3, 7, 4)]

Place = tuple[int, ...] | None

FOUND: list[tuple[str, list[Any], int, list[Place], list[Any]]] = [
    ("add.Tensor", [real(2, 3, 4), real(3, 4)], 12, [(1, 3), (0, 2)], [(1, 3)]),
    ("add.Tensor", [real(2, 3, 4), real(4)], 6, [(0, 2), None], [(0, 2)]),
    ("mul.Tensor", [real(2, 1, 4), real(2, 3, 1)], 4, [(2, 3), None], [(2, 3)]),
    ("mul.Tensor", [real(5, 4), real()], 20, [(0, 2), None], [(0, 2)]),
    ("gelu_backward", [real(5, 4), real(5, 4)], 5, [(0, 1), (0, 1)], [(0, 1)]),
    ("where.self", [whole(5, 1) == 0, real(5, 4), real(4)], 5, [(0, 1), (0, 1), None], [(0, 1)]),
    ("_to_copy", [real(5, 4)], 5, [(0, 1)], [(0, 1)]),
    ("view", [real(2, 3, 4), [6, 4]], 6, [(0, 2)], [(0, 1)]),
    ("view", [real(6, 8), [1, 2, 3, 8]], 6, [(0, 1)], [(1, 3)]),
    ("reshape", [real(6, 8), [6, 2, 4]], 8, [(1, 2)], [(1, 3)]),
    ("permute", [real(2, 3, 4), [2, 0, 1]], 6, [(0, 2)], [(1, 3)]),
    ("transpose.int", [real(2, 3), 0, 1], 2, [(0, 1)], [(1, 2)]),
    ("t", [real(2, 3)], 2, [(0, 1)], [(1, 2)]),
    ("unsqueeze", [real(2, 3), 0], 6, [(0, 2)], [(1, 3)]),
    ("squeeze.dim", [real(2, 1, 3), 1], 6, [(0, 3)], [(0, 2)]),
    ("expand", [real(3, 1), [2, 3, 4]], 3, [(0, 1)], [(1, 2)]),
    ("slice.Tensor", [real(5, 4), 1, 0, 2], 5, [(0, 1)], [(0, 1)]),
    ("slice.Tensor", [real(5, 4), 1, 0, 2**63 - 1], 20, [(0, 2)], [(0, 2)]),
    ("slice_backward", [real(5, 2), [5, 4], 1, 0, 2, 1], 5, [(0, 1)], [(0, 1)]),
    ("select.int", [real(2, 5, 4), 0, 1], 5, [(1, 2)], [(0, 1)]),
    ("split.Tensor", [real(5, 4), 3, 1], 5, [(0, 1)], [(0, 1), (0, 1)]),
    ("unbind.int", [real(2, 5), 0], 5, [(1, 2)], [(0, 1), (0, 1)]),
    ("mm", [real(4, 3), real(3, 5)], 4, [(0, 1), None], [(0, 1)]),
    ("mm", [real(4, 3), real(3, 5)], 5, [None, (1, 2)], [(1, 2)]),
    ("mm", [real(4, 3), real(3, 5)], 3, [(1, 2), (0, 1)], [SUM]),
    ("addmm", [real(5), real(4, 3), real(3, 5)], 4, [None, (0, 1), None], [(0, 1)]),
    ("addmm", [real(4, 5), real(4, 3), real(3, 5)], 5, [(1, 2), None, (1, 2)], [(1, 2)]),
    ("bmm", [real(2, 4, 3), real(2, 3, 5)], 2, [(0, 1), (0, 1)], [(0, 1)]),
    ("bmm", [real(2, 4, 3), real(2, 3, 5)], 4, [(1, 2), None], [(1, 2)]),
    ("bmm", [real(2, 4, 3), real(2, 3, 5)], 3, [(2, 3), (1, 2)], [SUM]),
    ("sum.dim_IntList", [real(5, 3, 4), [2]], 15, [(0, 2)], [(0, 2)]),
    ("sum.dim_IntList", [real(5, 3, 4), [0, 1], True], 15, [(0, 2)], [SUM]),
    ("sum.dim_IntList", [real(5, 3, 4), [0, 2]], 5, [(0, 1)], [SUM]),
    ("sum", [real(5, 4)], 20, [(0, 2)], [SUM]),
    ("mean.dim", [real(5, 4), [-1], True], 5, [(0, 1)], [(0, 1)]),
    ("max.dim", [real(5, 4), 1], 5, [(0, 1)], [(0, 1), (0, 1)]),
    ("argmax", [real(5, 4), -1], 5, [(0, 1)], [(0, 1)]),
    ("_softmax", [real(2, 3, 4), -1, False], 6, [(0, 2)], [(0, 2)]),
    ("_log_softmax_backward_data", [real(6, 3), real(6, 3), 1, torch.float32], 6,
     [(0, 1), (0, 1)], [(0, 1)]),
    ("native_layer_norm", [real(2, 3, 4), [4], real(4), real(4), 1e-5], 6,
     [(0, 2), None, None], [(0, 2)] * 3),
    ("native_layer_norm_backward", [real(2, 3, 4), *NORM, ALL], 6,
     [(0, 2)] * 4 + [None, None], [(0, 2), SUM, SUM]),
    ("native_layer_norm_backward", [real(2, 3, 4), *NORM, [True, False, False]], 2,
     [(0, 1)] * 4 + [None, None], [(0, 1)]),
    ("_fused_rms_norm", [real(2, 3, 4), [4], real(4), 1e-5], 6, [(0, 2), None], [(0, 2), (0, 2)]),
    ("native_group_norm", [real(5, 4, 3), None, None, 5, 4, 3, 2, 1e-5], 5, [(0, 1)], [(0, 1)] * 3),
    ("native_group_norm_backward",
     [real(5, 4, 3), real(5, 4, 3), real(5, 2), real(5, 2), real(4), 5, 4, 3, 2, ALL], 5,
     [(0, 1)] * 4 + [None], [(0, 1), SUM, SUM]),
    ("embedding", [real(9, 5), whole(2, 3)], 6, [None, (0, 2)], [(0, 2)]),
    ("embedding_dense_backward", [real(2, 3, 5), whole(2, 3), 9, -1, False], 6,
     [(0, 2), (0, 2)], [SUM]),
    ("nll_loss_forward", [*LOSS, 0, -100], 6, [(0, 1), (0, 1)], [(0, 1), UNREAD]),
    ("nll_loss_forward", [*LOSS, 2, -100], 6, [(0, 1), (0, 1)], [SUM, SUM]),
    ("nll_loss_backward", [real(), *LOSS, 1, -100, real()], 6,
     [None, (0, 1), (0, 1), None], [(0, 1)]),
    ("gather", [real(5, 4), 1, whole(5, 1)], 5, [(0, 1), (0, 1)], [(0, 1)]),
    ("scatter.value", [real(5, 4), 1, whole(5, 1), -1.0], 5, [(0, 1), (0, 1)], [(0, 1)]),
    ("index_select", [real(5, 4), 1, whole(3)], 5, [(0, 1), None], [(0, 1)]),
    ("cat", [CAT, 1], 2, [(0, 1), (0, 1)], [(0, 1)]),
    ("stack", [CAT[:1] * 2, 0], 6, [(0, 2)], [(1, 3)]),
    ("constant_pad_nd", [real(5, 4), [1, 1]], 5, [(0, 1)], [(0, 1)]),
    ("full_like", [real(5, 4), 1.0], 5, [(0, 1)], [(0, 1)]),
    ("convolution", [real(5, 2, 6, 6), real(3, 2, 2, 2), real(3), *CONV], 5,
     [(0, 1), None, None], [(0, 1)]),
    ("convolution_backward", [real(5, 3, 5, 5), real(5, 2, 6, 6), real(3, 2, 2, 2), [3], *CONV,
     NO_BIAS], 5, [(0, 1), (0, 1), None], [(0, 1), SUM]),
    ("max_pool2d_with_indices", [real(5, 2, 6, 6), [2, 2]], 5, [(0, 1)], [(0, 1), (0, 1)]),
    ("_adaptive_avg_pool2d", [real(5, 2, 6, 6), [2, 2]], 5, [(0, 1)], [(0, 1)]),
    ("upsample_nearest2d_backward", [real(5, 2, 4, 4), [4, 4], [5, 2, 2, 2]], 5,
     [(0, 1)], [(0, 1)]),
    (f"{FLASH}_for_cpu", HEADS, 6, [(0, 2)] * 3, [(0, 2), (0, 2)]),
    (f"{FLASH}_for_cpu", HEADS, 5, [(2, 3), None, None], [(2, 3), (2, 3)]),
    (FLASH, HEADS, 6, [(0, 2)] * 3, [(0, 2), (0, 2), UNREAD, UNREAD, UNREAD]),
    (FLASH, GROUPS, 3, [(1, 2, 2), (1, 2), (1, 2)], [(1, 2, 2), (1, 2, 2), UNREAD, UNREAD, UNREAD]),
    (FLASH, GROUPS, 6, [(0, 2, 2), (0, 2), (0, 2)], [(0, 2, 2), (0, 2, 2), UNREAD, UNREAD, UNREAD]),
    ("view", [real(2, 12), [2, 6, 2]], 3, [(1, 2, 4)], [(1, 2, 2)]),
    ("view", [real(2, 12), [2, 6, 2]], 6, [(1, 2, 2)], [(1, 2)]),
    (EFFICIENT, [*HEADS, None, True], 2, [(0, 1)] * 3, [(0, 1), (0, 1), UNREAD, UNREAD]),
]  # fmt: skip
"""Operators, arguments, rows; of each tensor that is read, and that is returned, where they are."""


@pytest.mark.parametrize(("name", "args", "count", "read", "returned"), FOUND)
def test_a_way_is_found(
    name: str, args: list[Any], count: int, read: list[Place], returned: list[Any]
) -> None:
    op = alone_or_stood_in(name, args)
    rows = lambda place: Rows(*place) if isinstance(place, tuple) else place
    wanted = tuple(map(rows, read)), tuple(map(rows, returned))
    assert wanted in [(way.inputs, way.outputs) for way in ways(op.node, count)]


def alone_or_stood_in(name: str, args: list[Any]) -> Alone:
    name = overload(name)
    if operator_of(name) is None:
        pytest.skip("this torch lacks it")
    stand_in = STAND_INS.get(name)
    more = [0.0, False, False] if stand_in and "attention" in name else []
    return alone(operator_of(name), *args, *more[: 3 if "flash" in name else 2], run=stand_in)


NONE: list[tuple[str, list[Any], int]] = [
    ("_softmax", [real(5, 4), 0, False], 5),
    ("mean.dim", [real(5, 4), [0]], 5),
    ("cumsum", [real(5, 4), 0], 5),
    ("expand", [real(1, 4), [5, 4]], 5),
    ("add.Tensor", [real(2, 3), real(3)], 6),  # broadcast along a part of them
    ("addmm", [real(5), real(4, 3), real(3, 5)], 3),  # each part would add the bias
    ("bmm", [real(2, 4, 3), real(2, 3, 5)], 8),
    ("native_dropout", [real(5, 4), 0.5, True], 5),
    ("bernoulli.p", [real(5, 4), 0.5], 5),
    ("new_zeros", [real(5, 4), [5, 4]], 5),
    ("add_.Tensor", [real(5, 4), real(5, 4)], 5),
    ("nonzero", [real(5, 4)], 5),
    ("nll_loss_forward", [*LOSS, 1, -100], 6),
    ("embedding_dense_backward", [real(6, 5), whole(6), 9, -1, True], 6),
    ("slice.Tensor", [real(5, 4), 0, 0, 5], 1),
    ("slice.Tensor", [real(5, 4), 0, 1, 5], 5),
    ("split.Tensor", [real(5, 4), 3, 0], 5),
    ("cat", [CAT, 1], 8),
    ("native_layer_norm_backward", [real(2, 3, 4), *NORM, ALL], 3),  # it reads rstd densely
    (f"{FLASH}_for_cpu", [*HEADS, 0.0, True], 5),  # causal
    (f"{FLASH}_for_cpu", [*GROUPS, 0.0, True], 12),  # heads that share keys stay together
    ("view", [real(4, 6), [6, 4]], 4),
    ("view.dtype", [real(5, 4), torch.int32], 5),
    ("squeeze.dim", [real(5, 4), 0], 5),
]


@pytest.mark.parametrize(("name", "args", "count"), NONE)
def test_no_way_is_found(name: str, args: list[Any], count: int) -> None:
    assert ways(alone(operator_of(overload(name)), *args).node, count) == ()


def test_a_node_that_is_read_twice_has_its_rows_once() -> None:
    x = real(4, 4)
    assert not ways(alone(operator_of("mm.default"), x, x).node, 4)
    (way,) = ways(alone(operator_of("mul.Tensor"), x, x).node, 16)
    assert way == Way((Rows(0, 2),), (Rows(0, 2),), True)


FORGED: list[tuple[str, list[Any], Way, list[int]]] = [
    ("_softmax", [real(5, 4), 0, False], Way((Rows(0, 1),), (Rows(0, 1),), True), [2, 3]),
    ("_softmax", [real(5, 4), 0, False], Way((Rows(0, 1),), (Rows(0, 1),), False), [2, 3]),
    ("cumsum", [real(5, 4), 0], Way((Rows(0, 1),), (Rows(0, 1),), False), [2, 3]),
    ("mean.dim", [real(5, 4), [0]], Way((Rows(0, 1),), (SUM,), False), [2, 3]),
    ("amax", [real(5, 4), [0]], Way((Rows(0, 1),), (SUM,), False), [2, 3]),
    ("addmm", [real(5), real(4, 3), real(3, 5)],
     Way((None, Rows(1, 2), Rows(0, 1)), (SUM,), False), [1, 2]),
    ("gelu", [real(33)], Way((Rows(0, 1),), (Rows(0, 1),), True), [1] * 33),
]  # fmt: skip


@pytest.mark.parametrize(("name", "args", "way", "sizes"), FORGED)
def test_a_wrong_way_is_caught(name: str, args: list[Any], way: Way, sizes: Sequence[int]) -> None:
    assert differences(alone(operator_of(overload(name)), *args), way, sizes)


def test_what_is_off_by_more_than_rounding_is_caught() -> None:
    op = alone(operator_of("mm.default"), real(4, 3), real(3, 5))
    (way,) = ways(op.node, 4)
    assert not differences(op, way, [1, 3])
    off = 4 * FACTOR * torch.finfo(torch.float32).eps * max(map(largest, op.tensors)) ** 2
    wrong = replace(op, run=lambda a, b: a @ b + off * (len(a) == 1 and a.dtype == torch.float32))
    assert differences(wrong, way, [1, 3])


N, M = Size.named("SIZE0", 8), Size.named("SIZE1", 8)


def sized(op: Alone, *shapes: tuple[int, ...]) -> Alone:
    """``op`` whose tensors, and what it returns, have shapes that follow sizes."""
    for node, shape in zip((*op.node.all_input_nodes, op.node), shapes, strict=True):
        node.meta[LAYOUTS] = (Layout(shape, (1,) * len(shape), 0, 8),)
    return op


def test_sizes_that_happen_to_be_equal_are_not_equal() -> None:
    op = sized(alone(operator_of("mm.default"), real(8, 8), real(8, 8)), (N, M), (M, 8), (N, 8))
    assert [w.outputs for w in ways(op.node, N)] == [(Rows(0, 1),)]
    assert [w.outputs for w in ways(op.node, M)] == [(SUM,)]
    assert [w.outputs for w in ways(op.node, 8)] == [(Rows(1, 2),)]
    # An operation that needs them equal has them so, however they are written.
    op = sized(alone(operator_of("mul.Tensor"), real(8), real(8)), (N,), (M,), (N,))
    assert {way.outputs for way in (*ways(op.node, N), *ways(op.node, M))} == {(Rows(0, 1),)}
    assert not ways(op.node, 8)
    op = sized(alone(operator_of("view.default"), real(8, 8), [8, 8]), (N, M), (M, N))
    assert not [*ways(op.node, N), *ways(op.node, M), *ways(op.node, 8)]


def test_sizes_are_followed_by_what_a_part_is_called_with() -> None:
    op = alone(operator_of("view.default"), real(8, 8, 4), [64, 2, 2])
    op = sized(op, (N, M, 4), (product([N, M]), 2, 2))
    (way,) = ways(op.node, product([M, N]))
    assert way.inputs == (Rows(0, 2),)
    rows = Size.named("ROWS", 16)
    args, _ = for_rows(op.node, way, rows)
    assert args == (op.node.args[0], [rows, 2, 2])
    assert part_of((N, M, 4), Rows(0, 2), rows) == (1, rows, 4)


def test_a_part_of_a_group_norm_has_its_own_number_of_items() -> None:
    op = alone(operator_of("native_group_norm.default"), real(5, 4, 3), None, None, 5, 4, 3, 2, 0.1)
    (way,) = ways(op.node, 5)
    assert for_rows(op.node, way, 2)[0][3:] == (2, 4, 3, 2, 0.1)


def test_keywords_that_are_sizes_follow_a_part() -> None:
    op = alone(operator_of("expand.default"), real(5, 1), size=[5, 4])
    (way,) = ways(op.node, 5)
    assert for_rows(op.node, way, 2)[1] == {"size": [2, 4]}
