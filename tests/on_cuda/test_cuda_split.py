"""Runs in parts on CUDA: bytes of the allocator, and bits."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.costs.measured.cache import COSTS
from tests.cuda import CUDA
from tests.efforts import WHOLE, plan_with
from tests.on_cuda.stood_in import needs_stand_in
from tests.test_split import Language, batch

SEGMENT_BYTES = 40 << 20
"""What the allocator may reserve beyond what it hands out."""


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


@contextlib.contextmanager
def device_of(nbytes: int) -> Iterator[None]:
    """The device has no more memory than ``nbytes``, whatever its allocator holds."""
    torch.cuda.empty_cache()
    total_bytes = torch.cuda.get_device_properties(CUDA).total_memory
    torch.cuda.set_per_process_memory_fraction(nbytes / total_bytes, CUDA)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, CUDA)


@on_stand_in
def test_a_step_that_fits_only_in_parts_is_planned_in_the_memory_that_it_takes(
    caplog: pytest.LogCaptureFixture,
):
    """Measuring a stage, or an operation, as a whole takes more memory than the device has."""
    given = tuple(tensor.to(CUDA) for tensor in batch(32))
    least_bytes = fxremat.plan(made(), given, "min", loss="own", effort=WHOLE).budget_bytes
    torch._dynamo.reset()
    COSTS.clear()
    gc.collect()
    model, budget_bytes = made(), int(0.6 * least_bytes)
    with device_of(budget_bytes + SEGMENT_BYTES), caplog.at_level("INFO", logger="fxremat"):
        with pytest.raises(fxremat.BudgetError, match="bits='rounding' allows"):
            fxremat.compile(model, given, budget_bytes, loss="own")
        call = fxremat.compile(model, given, budget_bytes, loss="own", bits="rounding")
        assert "no plan runs them whole" in caplog.text
        assert call.plan.form.has_parts
        for _ in range(2):
            gradients(model, call, given)
        torch.cuda.reset_peak_memory_stats()
        gradients(model, call, given)
    assert torch.cuda.max_memory_allocated() <= call.plan.predicted_peak_bytes <= budget_bytes
