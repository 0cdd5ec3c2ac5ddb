"""What CUDA's allocator counts anyway tells of steps that nobody watches."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat import torch_compat
from fxremat.errors import BudgetWarning
from fxremat.runtime.counted import Count

CPU = torch.device("cpu")


class Allocator:
    """Counts, as CUDA's does; none of them is ever reset."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.most = 1000
        monkeypatch.setattr(torch_compat, "counted_bytes", lambda _device: (self.now, self.most))

    def take(self, nbytes: int) -> None:
        """For a while."""
        self.most = max(self.most, self.now + nbytes)


def test_a_peak_is_seen_where_it_is_higher_than_all_before(monkeypatch: pytest.MonkeyPatch):
    allocator = Allocator(monkeypatch)
    count = Count.begin(CPU, lambda: 300)  # 700 are others'
    assert count is not None and count.peak_bytes() is None
    allocator.take(500)
    assert count.peak_bytes() == 800
    again = Count.begin(CPU, lambda: 300)
    allocator.take(500)
    assert again is not None and again.peak_bytes() is None
    allocator.take(501)
    assert again.peak_bytes() == 801


def test_nothing_is_counted_on_a_cpu():
    assert torch_compat.counted_bytes(CPU) is None
    assert Count.begin(CPU, lambda: 300) is None


class Two(nn.Module):
    """Layers, with a break between them or none."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        if self.breaks:
            torch._dynamo.graph_break()
        return self.second(x)


@pytest.mark.parametrize("breaks", [False, True])
def test_a_step_that_nobody_watched_is_told_of(breaks: bool, monkeypatch: pytest.MonkeyPatch):
    torch._dynamo.reset()
    allocator = Allocator(monkeypatch)
    model = Two(breaks)
    x = torch.randn(64, 16)
    call = fxremat.compile(model, x, 1_000_000)

    def step(nbytes: int) -> list[Any]:
        model.zero_grad()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            outputs = call(x)
            outputs.register_hook(lambda _: allocator.take(nbytes))
            outputs.sum().backward()
        return [w.message for w in told if issubclass(w.category, BudgetWarning)]

    for _ in range(6):
        assert not step(0)
    (told,) = step(2_000_000)
    assert "more than its budget of 1000000" in str(told)
    for more in (3_000_000, 4_000_000, 5_000_000, 6_000_000):  # another thread's, maybe
        for _ in range(3):  # they are watched, and there is nothing to see
            assert not step(0)
        assert step(more)  # told, but never a reason to refuse a step
