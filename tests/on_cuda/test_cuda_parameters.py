"""Frozen parameters in pinned memory, on CUDA's allocator: same bits, peaks within the budget."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fxremat
from fxremat.runtime.host_parameter import HostParameter
from tests.cuda import CUDA
from tests.models.adapters import Adapters
from tests.models.bits import assert_bitwise_equal
from tests.on_cuda.happens_before import checked
from tests.on_cuda.stood_in import needs_stand_in, stood_in

if stood_in:
    import cuda_stand_in as stand_in

pytestmark = needs_stand_in

TOKENS = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(1))
HOST = fxremat.HostMemory(parameters=True)


@pytest.fixture(autouse=True)
def streams_in_any_order() -> Iterator[None]:
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    stand_in.mode("random", seed=1)
    yield
    stand_in.mode("eager")
    torch._dynamo.reset()


def trained(budget: Any, offload: Any, steps: int = 4) -> tuple[list[Tensor], Any, Any, int]:
    """Bits that training leaves, the model, its plan, and the largest peak of a step."""
    model = Adapters(width=256).to(CUDA)
    tokens = TOKENS.to(CUDA)
    call = fxremat.compile(model, tokens, budget, offload=offload, assume="strict")
    changing = [own for own in model.parameters() if own.requires_grad]
    optimizer = torch.optim.SGD(changing, lr=0.1)
    torch.manual_seed(5)
    peak = 0
    for _ in range(steps):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        call(tokens).backward()
        torch.cuda.synchronize()
        peak = max(peak, torch.cuda.max_memory_allocated())
        optimizer.step()
        optimizer.zero_grad()
    return [own.detach().cpu() for own in model.parameters()], model, call.plan, peak


def test_the_least_budget_holds_with_the_same_bits():
    expected, _, without, _ = trained("100%", False)
    left, model, plan, peak = trained("min", HOST)
    assert sum(isinstance(own, HostParameter) for own in model.parameters()) > 4
    assert plan.least_budget_bytes < 0.6 * without.least_budget_bytes
    assert peak <= plan.budget_bytes
    for own, other in zip(left, expected, strict=True):
        assert_bitwise_equal(own, other)


def test_a_budget_between_holds_with_the_same_bits():
    expected = trained("100%", False)[0]
    left, model, plan, peak = trained("80%", HOST)
    assert any(isinstance(own, HostParameter) for own in model.parameters())
    assert peak <= plan.budget_bytes
    for own, other in zip(left, expected, strict=True):
        assert_bitwise_equal(own, other)


@pytest.mark.parametrize("budget", ["min", "80%"])
def test_no_accesses_race_and_the_host_waits_for_nothing(budget: str):
    stand_in.mode("eager")
    model = Adapters(width=256).to(CUDA)
    tokens = TOKENS.to(CUDA)
    call = fxremat.compile(model, tokens, budget, offload=HOST, assume="strict")
    changing = [own for own in model.parameters() if own.requires_grad]
    optimizer = torch.optim.SGD(changing, lr=0.1)

    def step() -> None:
        call(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(6):  # libraries wait when they are loaded, and so do new plans
        step()
    with checked() as found:
        for _ in range(3):
            step()
    assert "fetch_early(" in call.forward_code + call.backward_code
    assert found.races == []
    assert found.host_waits == 0
    assert found.compared > found.accesses > found.items
