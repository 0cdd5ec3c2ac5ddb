"""Ways that an operation has, and that a wrong one is seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fxremat.passes.parts.rows import Result, Rows, Way
from fxremat.passes.split.ways import ways
from tests.passes.split.parts import Alone, alone, differences

aten = torch.ops.aten

SUM = Result.SUM

Found = tuple[tuple[Any, ...], tuple[Any, ...]]


def real(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def whole(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def found(node: fx.Node, count: int) -> set[Found]:
    """Ways in short: dimensions as pairs."""

    def short(wheres: Any) -> tuple[Any, ...]:
        return tuple((w.first, w.last) if isinstance(w, Rows) else w for w in wheres)

    return {(short(way.inputs), short(way.outputs)) for way in ways(node, count)}


FIRST, SECOND, BOTH = (0, 1), (1, 2), (0, 2)

ADDED = (real(2), real(4, 3), real(3, 2))

NORM = (real(4, 3), real(4, 3), [3], real(4, 1), real(4, 1), real(3), real(3))

CONV = ([1], [0], [1], False, [0], 1)

KNOWN: list[tuple[Any, tuple[Any, ...], int, set[Found]]] = [
    (aten.add.Tensor, (real(4, 3), real(3)), 4, {((FIRST, None), (FIRST,))}),
    (aten.add.Tensor, (real(4, 3), real(3)), 3, {((SECOND, FIRST), (SECOND,))}),
    (aten.add.Tensor, (real(4, 3), real(3)), 12, set()),
    (aten.add.Tensor, (real(4, 3), real(4, 3)), 12, {((BOTH, BOTH), (BOTH,))}),
    (aten.mul.Tensor, (real(4, 1), real(1, 3)), 4, {((FIRST, None), (FIRST,))}),
    (aten.exp.default, (real(1, 4, 1, 3, 1),), 12, {(((1, 4),), ((1, 4),))}),
    (aten.exp.default, (real(4, 4),), 4, {((FIRST,), (FIRST,)), ((SECOND,), (SECOND,))}),
    (aten.bernoulli.default, (real(4, 4).sigmoid(),), 4, set()),
    (aten.native_dropout.default, (real(4, 3), 0.5, True), 4, set()),
    (aten.relu_.default, (real(4, 3),), 4, set()),
    (aten.nonzero.default, (real(4, 3),), 4, set()),
    (aten.view.default, (real(2, 3, 4), [6, 4]), 6, {((BOTH,), (FIRST,))}),
    (aten.view.default, (real(2, 3, 4), [6, 4]), 4, {(((2, 3),), (SECOND,))}),
    (aten.view.default, (real(2, 3, 4), [6, 4]), 3, set()),
    (aten.permute.default, (real(2, 3, 4), [2, 0, 1]), 6, {((BOTH,), ((1, 3),))}),
    (aten.permute.default, (real(2, 3, 4), [2, 0, 1]), 12, set()),
    (aten.expand.default, (real(1, 4), [3, 4]), 4, {((SECOND,), (SECOND,))}),
    (aten.expand.default, (real(1, 4), [3, 4]), 3, set()),
    (aten.slice.Tensor, (real(4, 3), 0, 1, 3), 3, {((SECOND,), (SECOND,))}),
    (aten.slice.Tensor, (real(4, 3), 0, 1, 3), 4, set()),
    (aten.slice.Tensor, (real(4, 3), 0, 0, 4), 12, {((BOTH,), (BOTH,))}),
    (aten.select.int, (real(4, 3), 1, 2), 4, {((FIRST,), (FIRST,))}),
    (aten.cat.default, ([real(4, 3), real(4, 2)], 1), 4, {((FIRST, FIRST), (FIRST,))}),
    (aten.gather.default, (real(4, 3), 1, whole(4, 2)), 4, {((FIRST, FIRST), (FIRST,))}),
    (aten.mm.default, (real(4, 3), real(3, 2)), 4, {((FIRST, None), (FIRST,))}),
    (aten.mm.default, (real(4, 3), real(3, 2)), 2, {((None, SECOND), (SECOND,))}),
    (aten.mm.default, (real(4, 3), real(3, 2)), 3, {((SECOND, FIRST), (SUM,))}),
    (aten.addmm.default, ADDED, 4, {((None, FIRST, None), (FIRST,))}),
    (aten.addmm.default, ADDED, 2, {((FIRST, None, SECOND), (SECOND,))}),
    (aten.addmm.default, ADDED, 3, set()),
    (aten.bmm.default, (real(5, 4, 3), real(5, 3, 2)), 5, {((FIRST, FIRST), (FIRST,))}),
    (aten.bmm.default, (real(5, 4, 3), real(5, 3, 2)), 4, {((SECOND, None), (SECOND,))}),
    (aten.bmm.default, (real(5, 4, 3), real(5, 3, 2)), 3, {(((2, 3), SECOND), (SUM,))}),
    (aten.bmm.default, (real(5, 4, 3), real(5, 3, 2)), 20, set()),
    (aten.dot.default, (real(4), real(4)), 4, set()),
    (aten.sum.dim_IntList, (real(4, 3), [1]), 4, {((FIRST,), (FIRST,))}),
    (aten.sum.dim_IntList, (real(4, 3), [1]), 3, {((SECOND,), (SUM,))}),
    (aten.sum.default, (real(4, 3),), 12, {((BOTH,), (SUM,))}),
    (aten.mean.dim, (real(4, 3), [1]), 3, set()),
    (aten._log_softmax.default, (real(4, 3), -1, False), 4, {((FIRST,), (FIRST,))}),
    (aten._log_softmax.default, (real(4, 3), -1, False), 3, set()),
    (aten.native_layer_norm_backward.default, (*NORM, [True, True, False]), 4,
     {((FIRST, FIRST, FIRST, FIRST, None, None), (FIRST, SUM))}),
    (aten.native_layer_norm_backward.default, (*NORM, [False, True, True]), 4,
     {((FIRST, FIRST, FIRST, FIRST, None, None), (SUM, SUM))}),
    (aten.embedding.default, (real(7, 3), whole(2, 4)), 8, {((None, BOTH), (BOTH,))}),
    (
        aten.embedding_dense_backward.default,
        (real(2, 4, 3), whole(2, 4), 7, -1, False),
        8,
        {((BOTH, BOTH), (SUM,))},
    ),
    (aten.nll_loss_forward.default, (real(4, 3), whole(4), None, 2, -100), 4,
     {((FIRST, FIRST), (SUM, SUM))}),
    (aten.nll_loss_forward.default, (real(4, 3), whole(4), None, 0, -100), 4,
     {((FIRST, FIRST), (FIRST, Result.UNREAD))}),
    (aten.nll_loss_forward.default, (real(4, 3), whole(4), None, 1, -100), 4, set()),
    (
        aten.nll_loss_backward.default,
        (real(), real(4, 3), whole(4), None, 1, -100, real()),
        4,
        {((None, FIRST, FIRST, None), (FIRST,))},
    ),
    (
        aten.convolution.default,
        (real(5, 2, 7), real(3, 2, 4), real(3), *CONV),
        5,
        {((FIRST, None, None), (FIRST,))},
    ),
    (
        aten.convolution_backward.default,
        (real(5, 3, 4), real(5, 2, 7), real(3, 2, 4), [3], *CONV, [True, True, True]),
        5,
        {((FIRST, FIRST, None), (FIRST, SUM, SUM))},
    ),
    (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        (real(2, 3, 4, 8), real(2, 3, 5, 8), real(2, 3, 5, 8)),
        6,
        {((BOTH, BOTH, BOTH), (BOTH, BOTH))},
    ),
    (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        (real(2, 3, 4, 8), real(2, 3, 5, 8), real(2, 3, 5, 8)),
        4,
        {(((2, 3), None, None), ((2, 3), (2, 3)))},
    ),
    (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        (real(2, 3, 4, 8), real(2, 3, 5, 8), real(2, 3, 5, 8), 0.0, True),
        4,
        set(),
    ),
    (aten.new_zeros.default, (real(4, 3), [4, 3]), 4, set()),
    (aten.exp.default, (real(1, 3),), 1, set()),
]  # fmt: skip


@pytest.mark.parametrize(("target", "args", "count", "expected"), KNOWN)
def test_ways_of(target: Any, args: Any, count: int, expected: set[Found]) -> None:
    assert found(alone(target, *args).node, count) == expected


ROWS = Rows(0, 1)

WRONG: list[tuple[Any, tuple[Any, ...], Way]] = [
    (aten._softmax.default, (real(6, 5), 0, False), Way((ROWS,), (ROWS,), False)),
    (aten.cumsum.default, (real(6, 5), 0), Way((ROWS,), (ROWS,), True)),
    (aten.mean.dim, (real(6, 5), [0]), Way((ROWS,), (Result.SUM,), False)),
    (aten.mm.default, (real(6, 6), real(6, 6)), Way((Rows(1, 2), None), (ROWS,), False)),
    (aten.addmm.default, (real(5), real(4, 6), real(6, 5)),
     Way((None, Rows(1, 2), ROWS), (Result.SUM,), False)),
    (aten.add.Tensor, (real(6, 6), real(6)), Way((ROWS, ROWS), (ROWS,), True)),
    (aten.view.default, (real(6, 2), [2, 6]), Way((ROWS,), (Rows(1, 2),), True)),
    (aten.flip.default, (real(6, 2), [0]), Way((ROWS,), (ROWS,), True)),
    (aten.nll_loss_forward.default, (real(6, 3), whole(6), None, 1, -100),
     Way((ROWS, ROWS), (Result.SUM, Result.SUM), False)),
    (aten.sigmoid.default, (real(6, 333),), Way((Rows(1, 2),), (Rows(1, 2),), True)),
]  # fmt: skip


@pytest.mark.parametrize(("target", "args", "way"), WRONG)
def test_a_wrong_way_is_seen(target: Any, args: Any, way: Way) -> None:
    op = alone(target, *args)
    (count,) = {op.tensors[i].shape[w.first] for i, w in enumerate(way.inputs) if w is not None}
    assert way not in ways(op.node, count)
    assert is_seen(op, way, [1, count // 2, count - 1 - count // 2])


def is_seen(op: Alone, way: Way, sizes: list[int]) -> bool:
    """Whether parts show that a way is wrong, be it that they cannot be computed."""
    try:
        return bool(differences(op, way, sizes))
    except (AssertionError, RuntimeError):
        return True


def test_a_right_way_is_let_pass() -> None:
    op = alone(aten._softmax.default, real(6, 5), 1, False)
    assert not is_seen(op, Way((ROWS,), (ROWS,), True), [1, 3, 2])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("target", "expected"), [(aten.tanh.default, True), (aten.gelu.default, False)]
)
def test_what_a_kernel_computes_alike_everywhere_is_told_of_each_device(
    target: Any, expected: bool, device: str
) -> None:
    node = fx.Graph().call_function(target, (fx.Graph().placeholder("x"),))
    with FakeTensorMode():
        node.meta["val"] = node.args[0].meta["val"] = torch.empty(4, 3, device=device)
    assert [way.same_bits for way in ways(node, 4)] == [expected]
