"""Pointwise operators whose kernels compute a number alike wherever it is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tests.passes.split.layers  # noqa: F401
from fxremat.costs.measured.cache import CostCache
from fxremat.costs.measured.contrast import contrasts
from fxremat.passes.parts.bits import same_bits
from fxremat.passes.split.operators import EXACT
from fxremat.passes.split.ways import is_pointwise, ways
from tests.examples import examples
from tests.passes.split.cases import CASES, Draws, drawn, operator_of
from tests.passes.split.parts import alone

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

NAMES = [name for name in CASES if name in EXACT and operator_of(name)]

OF_ONE = [
    name for name in NAMES if len(operator_of(name)._schema.arguments) == 1 and "bit" not in name
]


@pytest.mark.parametrize("name", NAMES)
@examples(0.1)
@given(data=st.data())
def test_no_number_depends_on_its_place(name: str, data: st.DataObject) -> None:
    d = Draws.of(data)
    for dtype in DTYPES:
        d.dtype = dtype
        op = drawn(name, d)
        if is_pointwise(op.node) and any(
            way.same_bits for n in op.counts() for way in ways(op.node, n)
        ):
            assert contrasts(op.node, CostCache()) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OF_ONE)
def test_no_half_depends_on_its_place(name: str, dtype: torch.dtype) -> None:
    run = operator_of(name)
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    apart: Tensor = torch.empty(2 * len(every), dtype=dtype)[::2].copy_(every)
    assert same_bits(run(every), run(apart)).all()


@pytest.mark.parametrize("name", ["gelu", "maximum", "hardtanh_backward", "clamp_min.Tensor"])
def test_numbers_that_do_are_seen(name: str) -> None:
    x = torch.randn(4, 3)
    pair = [x, x.clone()]
    more = {"gelu": [x], "hardtanh_backward": [*pair, -0.5, 0.5]}
    op = alone(operator_of(name if "." in name else f"{name}.default"), *more.get(name, pair))
    assert contrasts(op.node, CostCache())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_divisor_of_a_single_number_has_a_kernel_of_its_own(dtype: torch.dtype) -> None:
    pair = torch.randn(4, 3).to(dtype), torch.randn(4, 1).to(dtype)
    op = alone(operator_of("div.Tensor_mode"), *pair, rounding_mode="trunc")
    assert contrasts(op.node, CostCache())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_operation_that_broadcasts_otherwise_has_an_answer_of_its_own(
    dtype: torch.dtype,
) -> None:
    run, cache = operator_of("div.Tensor_mode"), CostCache()
    few, many = torch.randn(4, 1).to(dtype), torch.randn(4, 3).to(dtype)
    for pair in ((few, many), (many, few)):
        own = alone(run, *pair, rounding_mode="trunc").node
        found, expected = contrasts(own, cache), contrasts(own, CostCache())
        assert found is not None and expected is not None
        assert bool(found) == bool(expected)


def test_a_copied_number_is_never_copied_to_fewer_than_it_is() -> None:
    op = alone(operator_of("copy.default"), torch.zeros(3), torch.randn(1))
    assert contrasts(op.node, CostCache()) == []


@pytest.mark.parametrize("shape", [(4, 3), (4, 1), ()])
@pytest.mark.parametrize("pair", ["float32 bfloat16", "bfloat16 float32", "float64 float32"])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_numbers_of_two_dtypes_depend_on_no_place(
    name: str, pair: str, shape: tuple[int, ...]
) -> None:
    one, other = (getattr(torch, dtype) for dtype in pair.split())
    args = torch.randn(4, 3).to(one), torch.randn(shape).to(other)
    op = alone(operator_of(f"{name}.Tensor"), *args)
    assert contrasts(op.node, CostCache()) == []
