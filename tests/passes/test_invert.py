"""Norms undone: what is rebuilt, how far it is off, and that nobody gets it unasked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.library import opcheck
from torch.nn import functional

import fxremat
from fxremat.runtime.inverse import invert_batch_norm
from tests.efforts import WHOLE

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

OPERATOR = torch.ops.fxremat.invert_batch_norm.default


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten._native_batch_norm_legit.no_stats(x, weight, bias, True, 0.1, 1e-5)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(16, 3), (4, 3, 7), (2, 3, 5, 4)])
def test_the_input_comes_back_up_to_rounding(shape: tuple[int, ...], affine: bool):
    x = torch.randn(shape) * 3 + 1
    weight, bias = (torch.tensor([0.5, -2.0, 1.0]), torch.randn(3)) if affine else (None, None)
    y, mean, rstd = norm(x, weight, bias)
    z = functional.leaky_relu(y, 0.1)
    torch.testing.assert_close(invert_batch_norm(z, weight, bias, mean, rstd, 0.1), x)


def test_a_channel_without_scale_gives_its_mean():
    x = torch.randn(8, 2, 4) + 5
    weight, bias = torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.0])
    y, mean, rstd = norm(x, weight, bias)
    found = invert_batch_norm(functional.leaky_relu(y, 0.01), weight, bias, mean, rstd, 0.01)
    torch.testing.assert_close(found[:, 0], mean[0].expand(8, 4))
    torch.testing.assert_close(found[:, 1], x[:, 1])


def test_opcheck():
    ones = torch.ones(3)
    opcheck(OPERATOR, (torch.randn(2, 3, 4), ones, ones, ones, ones, 0.1))


def network(*, inplace: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    width = 3
    for _ in range(6):
        layers += [
            nn.Conv2d(width, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.LeakyReLU(0.1, inplace=inplace),
        ]
        width = 8
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def loss_of(outputs: Tensor) -> Tensor:
    return outputs.square().sum()


X = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def step(model: nn.Module, call: nn.Module) -> None:
    model.zero_grad(set_to_none=True)
    loss_of(call(X)).backward()


def gradients(model: nn.Module, call: nn.Module) -> list[Tensor]:
    step(model, call)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.fixture(scope="module")
def exact() -> list[Tensor]:
    model = network()
    return gradients(model, model)


@pytest.mark.parametrize("inplace", [False, True])
def test_leaky_relus_keep_their_result_with_the_same_bits(exact: list[Tensor], inplace: bool):
    model = network(inplace=inplace)
    call = fxremat.compile(model, X, "min", loss=loss_of)
    assert all(map(torch.equal, gradients(model, call), exact))
    assert call.plan.form.exact


def middling(**options: Any) -> tuple[nn.Module, fxremat.CompiledModule]:
    model = network()
    found = fxremat.plan(network(), X, 1.0, loss=loss_of)
    budget = (found.least_budget_bytes + 2 * found.baseline_peak_bytes) // 3
    torch._dynamo.reset()
    return model, fxremat.compile(model, X, budget, loss=loss_of, **options)


def test_gradients_are_up_to_rounding_within_the_budget(exact: list[Tensor], monkeypatch):
    # As if convolutions were so dear that rebuilding from results always pays.
    monkeypatch.setattr("fxremat.planning.choose.fastest", _always_rebuilt)
    model, call = middling(bits="rounding", effort=WHOLE)  # rebuilding is looked at last then
    assert not call.plan.form.exact
    assert "up to rounding" in call.plan.explain()
    for found, expected in zip(gradients(model, call), exact, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    model.zero_grad(set_to_none=True)
    measured = fxremat.measure_step(model, lambda: step(model, call)).peak_bytes
    assert measured <= call.plan.predicted_peak_bytes <= call.plan.budget_bytes


def _always_rebuilt(ways, budget_bytes):
    way = ways[-1]
    return way, way.fastest_within(budget_bytes)


def test_statistics_and_outputs_keep_their_bits(monkeypatch):
    monkeypatch.setattr("fxremat.planning.choose.fastest", _always_rebuilt)
    model, call = middling(bits="rounding", effort=WHOLE)
    assert not call.plan.form.exact
    eager = network()
    assert torch.equal(call(X), eager(X))
    assert all(map(torch.equal, model.buffers(), eager.buffers()))


def test_never_slower_and_never_more_than_the_exact_plan():
    _, with_rounding = middling(bits="rounding")
    _, with_bits = middling()
    assert with_bits.plan.form.exact
    assert with_rounding.plan.least_budget_bytes <= with_bits.plan.least_budget_bytes
    # Equal operations are timed once in a process, so both compare the same times.
    assert with_rounding.plan.predicted_s <= with_bits.plan.predicted_s


def test_what_fits_is_left_alone():
    model = network()
    call = fxremat.compile(model, X, 1.0, loss=loss_of, bits="rounding", effort=WHOLE)
    assert call.plan.form.exact
    assert call.plan.predicted_s == call.plan.baseline_s


def test_a_model_without_such_norms_is_planned_as_ever():
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    assert fxremat.plan(model, torch.randn(16, 8), "min", bits="rounding", effort=WHOLE).form.exact
