"""What is written over what it reads has its bits, and what a part holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxremat import torch_compat
from fxremat.passes.split.memory import ROW_BY_ROW, is_along_last, makes_its_memory
from fxremat.passes.split.ways import SEEDED
from tests.examples import examples
from tests.passes.split.cases import CASES, Draws, drawn, operator_of

aten = torch.ops.aten


def variant_of(name: str) -> tuple[Any, str] | None:
    operator = operator_of(name)
    if not isinstance(operator, torch._ops.OpOverload) or SEEDED in operator.tags:
        return None
    may = torch.Tag.pointwise in operator.tags or operator in ROW_BY_ROW
    return torch_compat.out_variant(operator, "cpu") if may else None


WRITTEN_OVER = [name for name in CASES if variant_of(name)]


def bits(tensor: Tensor) -> list[int]:
    flat = tensor.flatten()
    return flat.new_empty(flat.shape).copy_(flat).view(torch.uint8).tolist()


def test_there_are_such_operators() -> None:
    over = {operator_of(name) for name in WRITTEN_OVER}
    assert over >= {*ROW_BY_ROW, aten.add.Tensor, aten.gelu_backward.default, aten.exp.default}


@pytest.mark.parametrize("name", WRITTEN_OVER)
@examples(0.5)
@given(data=st.data())
def test_what_is_written_over_what_it_reads_has_its_bits(name: str, data: st.DataObject) -> None:
    op = drawn(name, Draws.of(data))
    target: Any = op.node.target
    assume(target not in ROW_BY_ROW or is_along_last(op.node))
    found = variant_of(name)
    assert found is not None
    variant, argument = found
    args, kwargs = op.arguments
    (expected,) = op.results
    for tensor in op.tensors:
        lies_alike = (tensor.shape, tensor.stride()) == (expected.shape, expected.stride())
        if lies_alike and tensor.dtype is expected.dtype and tensor.numel():
            over = tensor.clone(memory_format=torch.preserve_format)

            def copied(t: Any, old: Tensor = tensor, new: Tensor = over) -> Any:
                return new if t is old else t

            own_args, own_kwargs = pytree.tree_map(copied, (args, kwargs))
            made = variant(*own_args, **own_kwargs, **{argument: over})
            assert made.data_ptr() == over.data_ptr()
            assert bits(made) == bits(expected)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (aten.exp.default, (aten.exp.out, "out")),
        (aten.gelu_backward.default, (aten.gelu_backward.grad_input, "grad_input")),
        (aten.clone.default, None),  # its variant makes a tensor, and copies it
        (aten.native_layer_norm.default, None),  # several results
        (aten.view.default, None),
    ],
)
def test_the_variant_of_an_operator_that_writes_to_a_tensor(target: Any, expected: Any) -> None:
    assert torch_compat.out_variant(target, "cpu") == expected


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (aten.mm.default, True),
        (aten.clone.default, True),
        (aten.view.default, False),
        (aten.reshape.default, False),  # of a whole that it copies a part may be a view
        (aten.contiguous.default, False),
    ],
)
def test_what_may_return_what_it_reads_makes_no_memory_to_write_over(
    target: Any, expected: bool
) -> None:
    assert makes_its_memory(fx.Graph().call_function(target)) == expected


def test_a_softmax_along_another_dimension_is_told() -> None:
    node = fx.Graph().call_function(aten._softmax.default, (None, 0, False))
    node.meta["val"] = torch.empty(3, 4)
    assert not is_along_last(node)
