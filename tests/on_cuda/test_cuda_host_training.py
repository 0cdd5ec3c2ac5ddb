"""Gradients and optimizer state in host memory on CUDA: bits, peaks with the optimizer, order."""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.runtime.host_tensor import HostTensor
from tests.cuda import CUDA, needs_cuda
from tests.models.zoo import seeded
from tests.on_cuda.happens_before import checked

pytestmark = [*needs_cuda, pytest.mark.usefixtures("fresh_dynamo")]

on_stand_in = pytest.mark.skipif("STAND_IN_LIB" not in os.environ, reason="not the CUDA stand-in")
OPTIONS: dict[str, dict[str, bool]] = {"foreach": {}, "fused": {"fused": True}}
STEPS = 10


def _model() -> nn.Module:
    with seeded(0):
        blocks = (
            nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512)) for _ in range(3)
        )
        return nn.Sequential(*blocks).to(CUDA)


def _rows() -> Tensor:
    return torch.randn(32, 512, generator=torch.Generator().manual_seed(1)).to(CUDA)


def trained(budget: Any, name: str, *, steps: int = STEPS, offload: bool = True) -> list[Tensor]:
    """Parameters, state and norms after some steps, each of which is within the budget."""
    torch._dynamo.reset()
    model, rows = _model(), _rows()
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS[name])
    memory: Any = fxremat.HostMemory("auto", state=True) if offload else False
    call = fxremat.compile(model, rows, budget, optimizer=optimizer, offload=memory)
    budget_bytes = call._training.loop.budget.nbytes
    results = []
    for _ in range(steps):
        torch.cuda.reset_peak_memory_stats()
        call(rows).square().mean().backward()
        results.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        away = [isinstance(p.grad, HostTensor) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        assert torch.cuda.max_memory_allocated() <= budget_bytes
        assert any(away) == (budget == "min")
    results += model.parameters()
    results += [v for state in optimizer.state_dict()["state"].values() for v in state.values()]
    return [result.detach().cpu() for result in results]


@functools.cache
def on_the_device(name: str, steps: int) -> list[Tensor]:
    """A step of the optimizer for all parameters takes more than the forward and the backward."""
    return trained("128 MiB", name, steps=steps, offload=False)


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("budget", ["min", 0.8])
@pytest.mark.parametrize("name", OPTIONS)
def test_ten_steps_have_the_same_bits_within_the_budget(name: str, budget: Any):
    assert same(trained(budget, name), on_the_device(name, STEPS))


@on_stand_in
@pytest.mark.parametrize("mode", ["eager", "random", "late", "early"])
@pytest.mark.parametrize("name", OPTIONS)
def test_in_any_order_that_the_device_may_choose(name: str, mode: str):
    import cuda_stand_in

    expected = on_the_device(name, 3)
    cuda_stand_in.mode(mode)
    try:
        assert same(trained("min", name, steps=3), expected)
    finally:
        torch.cuda.synchronize()
        cuda_stand_in.mode(os.environ.get("STAND_IN_MODE", "eager"))


@on_stand_in
@pytest.mark.parametrize("name", OPTIONS)
def test_no_two_accesses_race(name: str):
    with checked() as found:
        trained("min", name, steps=3)
        torch.cuda.synchronize()
    assert not found.races
    assert found.compared and found.copies_beside
