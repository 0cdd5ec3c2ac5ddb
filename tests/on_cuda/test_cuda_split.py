"""Runs in parts on CUDA: bytes of the allocator, and bits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from tests.cuda import CUDA
from tests.efforts import WHOLE, plan_with
from tests.on_cuda.stood_in import needs_stand_in
from tests.test_split import Language, batch


def on_stand_in(test):
    for mark in needs_stand_in:
        test = mark(test)
    return test


def made() -> nn.Module:
    torch.manual_seed(0)
    return Language().to(CUDA)


def gradients(
    model: nn.Module, call: Any, given: tuple[Tensor, ...], *, factor: float = 1.0
) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    loss = call(*given)
    loss.backward(torch.full_like(loss, factor))
    found = [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)]
    model.zero_grad(set_to_none=True)
    return found


@on_stand_in
def test_half_the_least_has_the_same_bits():
    given = tuple(tensor.to(CUDA) for tensor in batch())
    truth = made()
    expected = gradients(truth, truth, given)
    del truth
    least_bytes = fxremat.plan(made(), given, "min", loss="own", effort=WHOLE).budget_bytes
    torch._dynamo.reset()
    model = made()
    call = fxremat.compile(model, given, int(0.6 * least_bytes), loss="own")
    assert call.plan.form.parts_bytes
    for _ in range(2):
        assert all(map(torch.equal, gradients(model, call, given), expected))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    gradients(model, call, given)
    assert torch.cuda.max_memory_allocated() <= call.plan.budget_bytes


@on_stand_in
def test_a_loss_whose_gradient_is_another_has_the_same_bits_within_the_budget(
    monkeypatch: pytest.MonkeyPatch,
):
    plan_with(monkeypatch, much_slower=math.inf)  # the first form that fits is taken
    given = tuple(tensor.to(CUDA) for tensor in batch())
    truth = made()
    expected = {factor: gradients(truth, truth, given, factor=factor) for factor in (1.0, 0.3)}
    del truth
    least_bytes = fxremat.plan(made(), given, "min", loss="own", effort=WHOLE).budget_bytes
    torch._dynamo.reset()
    model = made()
    call = fxremat.compile(model, given, int(0.7 * least_bytes), loss="own")
    assert call.plan.form.early_gradients
    for factor in (1.0, 0.3, 0.3, 1.0):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        found = gradients(model, call, given, factor=factor)
        assert all(map(torch.equal, found, expected[factor]))
        assert torch.cuda.max_memory_allocated() <= call.plan.budget_bytes
