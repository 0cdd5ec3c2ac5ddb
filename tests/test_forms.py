"""Forms of a step that buy only the bytes that a budget lacks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.report.plan import Plan
from tests.efforts import WHOLE, plan_with
from tests.models.zoo import seeded

ROWS, WIDTH, HIDDEN = 1152, 16, 256


@pytest.fixture(autouse=True)
def first_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first form that fits is taken, however long others seem to take."""
    plan_with(monkeypatch, much_slower=math.inf)


class Layers(nn.Module):
    """Residual layers, of which one is four times as wide inside."""

    def __init__(self) -> None:
        super().__init__()
        widths = [HIDDEN, HIDDEN, 4 * HIDDEN, HIDDEN, HIDDEN]
        self.up = nn.ModuleList(nn.Linear(WIDTH, own) for own in widths)
        self.down = nn.ModuleList(nn.Linear(own, WIDTH) for own in widths)

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(nn.functional.gelu(up(x)))
        return x.square().mean()


class Masked(nn.Module):
    """Layers that make the same mask, each for itself, and have more than a mask inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.up = nn.ModuleList(nn.Linear(WIDTH, 4 * HIDDEN) for _ in range(6))
        self.down = nn.ModuleList(nn.Linear(4 * HIDDEN, WIDTH) for _ in range(6))

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        for layer, up, down in zip(self.layers, self.up, self.down, strict=True):
            mask = torch.where(seen, 0.5, 2.0)
            x = x + (torch.tanh(layer(x) @ x.T) * mask) @ x / len(x)
            x = x + down(nn.functional.gelu(up(x)))
        return x.square().mean()


def planned(model: nn.Module, budget: Any, *given: Tensor, **options: Any) -> Plan:
    """The plan for the captured call, where steps have eager's bits and keep to their plans."""
    torch._dynamo.reset()
    call = fxremat.compile(model, given, budget, loss="own", **options)
    found = call.plan

    def step(of: Any) -> None:
        model.zero_grad(set_to_none=True)
        of(*given).backward()

    for _ in range(3):
        step(call)
    ours = [p.grad for p in model.parameters()]
    step(model)
    for own, theirs in zip(ours, model.parameters(), strict=True):
        assert own is not None
        assert theirs.grad is not None
        assert torch.equal(own, theirs.grad)
    model.zero_grad(set_to_none=True)
    measured = fxremat.measure_step(model, lambda: step(call)).peak_bytes
    assert measured <= call.plan.predicted_peak_bytes <= call.plan.budget_bytes
    model.zero_grad(set_to_none=True)
    return found


def test_only_what_is_at_the_peak_is_in_parts():
    with seeded(0):
        model, x = Layers(), torch.randn(ROWS, WIDTH)
    least_bytes = planned(model, "min", x, effort=WHOLE).least_budget_bytes
    plan = planned(model, int(0.95 * least_bytes), x)
    assert plan.form.peak
    assert "at the peak are computed in parts" in " ".join(plan.explain().split())
    assert plan.form.parts_bytes == 0
    assert 0 < sum(unit.calls for unit in plan.fused) <= 2  # of ten MLPs, forwards and backwards


def test_a_mask_of_all_layers_is_made_for_each_where_it_does_not_fit():
    with seeded(0):
        model, x, seen = Masked(), torch.randn(256, WIDTH), torch.rand(256, 256) > 0.3
    whole = planned(model, "100%", x, seen, effort=WHOLE)
    least = planned(model, "min", x, seen, effort=WHOLE)
    assert whole.form.shared
    assert not least.form.shared
    assert least.predicted_peak_bytes < least.baseline_peak_bytes
