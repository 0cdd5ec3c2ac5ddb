"""Masks of attention on CUDA: compared on the device, at all lengths."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.costs.measured import causal
from tests.cuda import CUDA
from tests.models.bits import first_difference
from tests.on_cuda.stood_in import needs_stand_in
from tests.sizing.test_masks import WIDTH, Attention

pytestmark = needs_stand_in  # whose kernels have the same bits with and without masks


def gradients(model: nn.Module, call: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    model.zero_grad(set_to_none=True)
    call(x).float().square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_step_reads_a_mask(dtype: torch.dtype):
    torch.manual_seed(0)
    model, tokens = Attention().to(CUDA, dtype), 37
    x = torch.randn(2, tokens, WIDTH, device=CUDA, dtype=dtype)
    compiled = fxremat.compile(model, x, "64 MiB", dynamic=True)
    assert "arange" not in compiled.plan.forward_code
    for length in (tokens, 130):
        x = torch.randn(2, length, WIDTH, device=CUDA, dtype=dtype)
        found = gradients(model, compiled, x)
        with torch.random.fork_rng():
            traced = torch.compile(model, backend="aot_eager", dynamic=True)
            assert first_difference(found, gradients(model, traced, x)) is None


def test_the_mask_stays_where_the_device_has_other_bits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(causal, "are_equal", lambda one, other: False)
    monkeypatch.setattr("fxremat.graph.graph.cost_cache", causal.CostCache)
    torch.manual_seed(0)
    model = Attention().to(CUDA)
    x = torch.randn(2, 37, WIDTH, device=CUDA)
    assert "arange" in fxremat.compile(model, x, "64 MiB").plan.forward_code
    torch._dynamo.reset()
    rounded = fxremat.compile(model, x, "64 MiB", bits="rounding")
    assert "arange" not in rounded.plan.forward_code, "nothing is compared"
