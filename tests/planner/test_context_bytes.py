"""What is held around the graphs: nothing forgotten, nothing counted twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fxremat.planner.context.context_bytes import (
    SCALARS,
    Caller,
    ContextBytes,
    context_bytes_of,
)
from tests.harness import Captured, capture

WIDTH, ROWS = 8, 4
OUTPUT_BYTES = ROWS * WIDTH * 4
WEIGHT_BYTES = WIDTH * WIDTH * 4


class Net(nn.Module):
    """Two layers, of which one may be frozen, and a parameter that nobody reads."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.b = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.unread = nn.Parameter(torch.randn(100))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.a).tanh() @ self.b


def around(model: nn.Module, caller: Caller | None = None) -> tuple[Captured, ContextBytes]:
    step = capture(model, (torch.randn(ROWS, WIDTH),))
    real = dict(zip(step.joint.primals, step.primals, strict=True))
    return step, context_bytes_of(step.joint, real, caller or Caller())


GIVEN_BYTES = 2 * WEIGHT_BYTES + OUTPUT_BYTES + 8 * SCALARS
"""Weights, the input (as large as the output) and a few numbers."""


def test_parameters_and_inputs_are_given():
    _, found = around(Net())
    assert found.given_bytes == GIVEN_BYTES
    assert found.tangent_bytes == OUTPUT_BYTES
    assert found.loss_point_bytes == 3 * OUTPUT_BYTES


@pytest.mark.parametrize(("measured", "loss_point"), [(0, OUTPUT_BYTES), (10_000, 10_000)])
def test_a_measured_loss_is_believed_but_tangents_are_there_anyway(measured: int, loss_point: int):
    _, found = around(Net(), Caller(loss_bytes=measured))
    assert found.loss_point_bytes == loss_point


def test_what_is_reserved_is_added():
    _, found = around(Net(), Caller(reserve_bytes=12_345))
    assert found.given_bytes == GIVEN_BYTES + 12_345


@pytest.mark.parametrize(
    ("dtype", "each"),
    [(torch.float64, 24), (torch.float32, 12), (torch.bfloat16, 14), (torch.float16, 14)],
)
def test_an_unknown_loss_computes_in_full_precision(dtype: torch.dtype, each: int):
    """Logarithms, their gradient and the output's; of few bits, a copy in full as well."""
    model = Net().to(dtype)
    step = capture(model, (torch.randn(ROWS, WIDTH, dtype=dtype),))
    assert context_bytes_of(step.joint, {}, Caller()).loss_point_bytes == each * ROWS * WIDTH


def test_gradients_of_what_the_step_reads_are_no_part_of_it():
    """They come and go: each call finds its own."""
    model = Net()
    model.a.grad = torch.zeros_like(model.a)
    for caller in (Caller(), Caller(accumulate=True)):
        _, found = around(model, caller)
        assert found.given_bytes == GIVEN_BYTES


def test_residents_that_no_operation_reads_are_held_too():
    model = Net()
    _, found = around(model, Caller(resident=tuple(model.parameters())))
    assert found.given_bytes == GIVEN_BYTES + model.unread.nbytes
    model.unread.grad = torch.zeros(100)
    _, found = around(model, Caller(resident=tuple(model.parameters())))
    assert found.given_bytes == GIVEN_BYTES + 2 * model.unread.nbytes


def test_residents_that_share_memory_are_counted_once():
    base = torch.zeros(1000)
    _, found = around(Net(), Caller(resident=(base[:10], base[20:], base)))
    assert found.given_bytes == GIVEN_BYTES + base.nbytes


def test_residents_elsewhere_are_not_counted():
    _, found = around(Net(), Caller(resident=(torch.zeros(1000, device="meta"),)))
    assert found.given_bytes == GIVEN_BYTES


class Shifted(nn.Module):
    """The gradient of an elementwise operation has the strides of the other factor."""

    def __init__(self, *, transposed: bool):
        super().__init__()
        shift = torch.randn(WIDTH, ROWS).t() if transposed else torch.randn(ROWS, WIDTH)
        self.shift = nn.Parameter(shift)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.shift


@pytest.mark.parametrize("transposed", [False, True])
def test_a_gradient_of_other_strides_is_copied_at_the_end(transposed: bool):
    _, found = around(Shifted(transposed=transposed))
    assert found.end_bytes == (OUTPUT_BYTES if transposed else 0)


class Same(nn.Module):
    """Two parameters whose gradients are one tensor."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.b = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.a + self.b)


def test_a_gradient_of_two_parameters_is_copied_at_the_end():
    _, found = around(Same())
    assert found.end_bytes == WEIGHT_BYTES


def test_nothing_else_is_there():
    _, found = around(Net())
    assert found == replace(found, end_bytes=0)
