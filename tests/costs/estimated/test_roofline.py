"""Costs from shapes: what an operation takes of a device, and bytes that traces do not tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from fxremat.costs.estimated.devices import DEVICES, Device
from fxremat.costs.estimated.roofline import aside_bytes, estimate_line, operation_seconds
from fxremat.passes.joint.graph import is_tensor
from tests.harness import Captured, capture

PLAIN = Device("plain", "cpu", 1e9, (("float32", 1e9), ("float64", 1e8)), 1e-6, 1e9)


class Product(nn.Module):
    """A product and what follows it."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32, 16, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x @ self.weight).t()


def captured(dtype: torch.dtype = torch.float32) -> Captured:
    return capture(Product(dtype), (torch.ones(64, 32, dtype=dtype),))


def seconds_of(step: Captured, target: object, device: Device) -> float:
    (node,) = (n for n in step.joint.forward if n.target is target)
    index = list(step.joint.module.graph.nodes).index(node)
    return float(operation_seconds(step.joint, device)[index])


mm, sigmoid, t = torch.ops.aten.mm.default, torch.ops.aten.sigmoid.default, torch.ops.aten.t.default


def test_a_product_takes_its_arithmetic() -> None:
    flops = 2 * 64 * 32 * 16
    assert seconds_of(captured(), mm, PLAIN) == pytest.approx(1e-6 + flops / 1e9)
    assert seconds_of(captured(torch.float64), mm, PLAIN) == pytest.approx(1e-6 + flops / 1e8)


def test_a_product_takes_its_bytes_where_arithmetic_is_fast() -> None:
    fast = replace(PLAIN, flops_per_s=(("float32", 1e15),))
    nbytes = 4 * (64 * 32 + 32 * 16 + 64 * 16)
    assert seconds_of(captured(), mm, fast) == pytest.approx(1e-6 + nbytes / 1e9)


def test_what_is_no_product_takes_its_bytes() -> None:
    assert seconds_of(captured(), sigmoid, PLAIN) == pytest.approx(1e-6 + 2 * 4 * 64 * 16 / 1e9)


def test_a_view_takes_nothing() -> None:
    assert seconds_of(captured(), t, PLAIN) == 0.0


def test_stages_take_what_their_operations_take() -> None:
    step = captured()
    costs = estimate_line(step.line, step.blocks, PLAIN).costs
    forward = seconds_of(step, mm, PLAIN) + seconds_of(step, sigmoid, PLAIN)
    assert sum(stage.forward_s for stage in costs.stages) == pytest.approx(forward)
    assert all(nbytes == 0 for _, _, nbytes in costs.workspace_bytes)


def test_products_of_float32_are_those_of_tf32_where_torch_computes_so() -> None:
    step, device = captured(), DEVICES["A100"]
    fast = replace(device, launch_s=1e-12, bytes_per_s=1e20)
    before = torch.get_float32_matmul_precision()
    exact_s = seconds_of(step, mm, fast)
    try:
        torch.set_float32_matmul_precision("high")
        assert seconds_of(step, mm, fast) < exact_s / 4
    finally:
        torch.set_float32_matmul_precision(before)


class Loss(nn.Module):
    def __init__(self, loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.loss = nn.Linear(8, 8), loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.inner(x))


def _written(x: Tensor) -> Tensor:
    """A column of something larger is written."""
    table = torch.zeros(16, 8)
    table[:, 3].copy_(x.sum(1))
    return table * x


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: functional.mse_loss(x, torch.zeros_like(x)),
        lambda x: functional.mse_loss(x, torch.zeros_like(x), reduction="none"),
        lambda x: functional.mse_loss(x.sum(1, keepdim=True), torch.zeros_like(x)),
        lambda x: functional.smooth_l1_loss(x, torch.zeros_like(x)),
        lambda x: functional.huber_loss(x, torch.zeros_like(x)),
        lambda x: functional.binary_cross_entropy(x.sigmoid(), torch.zeros_like(x)),
        lambda x: functional.soft_margin_loss(x, torch.ones_like(x)),
        lambda x: functional.cross_entropy(x, torch.zeros_like(x)),
        _written,
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_storages_are_as_large_as_kernels_make_them(loss: Callable[[Tensor], Tensor]) -> None:
    step = capture(Loss(loss), (torch.randn(16, 8),))
    found = estimate_line(step.line, step.blocks, PLAIN).costs
    assert found.storage_bytes == step.measured.costs.storage_bytes


def most_measured(step: Captured) -> int:
    return max(nbytes for _, _, nbytes in step.measured.costs.workspace_bytes)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Conv2d(4, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 3)),
        nn.Sequential(nn.Conv2d(4, 16, 3, groups=2), nn.BatchNorm2d(16)),
        nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1)),
    ],
)
def test_enough_is_set_aside_for_what_takes_workspaces(model: nn.Module) -> None:
    torch.manual_seed(0)
    step = capture(model, (torch.randn(8, 4, 32, 32),))
    assert most_measured(step) > 0
    assert aside_bytes(step.joint) >= most_measured(step)


def test_nothing_is_set_aside_for_what_takes_none() -> None:
    assert aside_bytes(captured().joint) == 0


def test_every_operation_that_may_run_again_has_its_seconds() -> None:
    step = captured()
    nodes = list(step.joint.module.graph.nodes)
    found = {nodes[i] for i, _ in estimate_line(step.line, step.blocks, PLAIN).costs.again_s}
    measured = {nodes[i] for i, _ in step.measured.costs.again_s}
    assert found == measured
    assert any(isinstance(n, fx.Node) and is_tensor(n) for n in found)
