"""The choice of what optimizer state and gradients live in host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.errors import BudgetError, PlanError
from fxremat.report.plan import Plan
from tests.models.zoo import seeded

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

WIDTH = 192
SHARES = (0.9, 0.75, 0.6)


def layers() -> nn.Module:
    with seeded(0):
        pairs = ((nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(5))
        return nn.Sequential(*(module for pair in pairs for module in pair))


def wide() -> nn.Module:
    """Nearly all bytes are in one parameter, which a step of the optimizer copies whole."""
    with seeded(0):
        return nn.Sequential(nn.Linear(16, 4096), nn.GELU(), nn.Linear(4096, 4, bias=False))


def rows(width: int = WIDTH) -> Tensor:
    with seeded(1):
        return torch.randn(16, width)


Made = tuple[nn.Module, torch.optim.Optimizer]


def compiled(
    model: nn.Module, budget: Any, x: Tensor, *, state: Any = True, kind: Any = None, **options: Any
) -> Made:
    optimizer = (kind or torch.optim.AdamW)(model.parameters(), lr=1e-3)
    host = fxremat.HostMemory("auto", state=state)
    made = fxremat.compile(
        model, x, budget, optimizer=optimizer, offload=host, loss=torch.sum, **options
    )
    return made, optimizer


def plan_of(made: Made) -> Plan:
    plan: Plan = made[0].plan
    return plan


def test_nothing_moves_where_everything_fits():
    made, optimizer = compiled(layers(), 1.0, rows())
    assert made.plan.training_state is None
    assert "step" not in vars(optimizer)


def test_all_of_it_moves_if_asked_for():
    placed = plan_of(compiled(layers(), 1.0, rows(), state="all")).training_state
    assert placed is not None
    weights_bytes = 5 * 4 * WIDTH * WIDTH
    assert placed.state_bytes == 2 * weights_bytes  # what is small stays
    assert placed.gradient_bytes >= weights_bytes


def test_a_share_is_one_of_what_the_step_takes_with_everything_on_the_device():
    full = plan_of(compiled(layers(), 1.0, rows(), state=False)).baseline_peak_bytes
    for share in SHARES:
        torch._dynamo.reset()
        plan = plan_of(compiled(layers(), share, rows()))
        assert plan.budget_bytes == int(share * full)
        assert plan.predicted_peak_bytes <= plan.budget_bytes
        assert plan.training_state is not None


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize(("model", "width"), [(layers, WIDTH), (wide, 16)])
def test_min_is_never_above_that_without_host_memory(model: Any, width: int, kind: Any):
    least = plan_of(compiled(model(), "min", rows(width), state=False, kind=kind)).budget_bytes
    torch._dynamo.reset()
    assert plan_of(compiled(model(), "min", rows(width), kind=kind)).budget_bytes <= least


def test_what_fits_only_without_host_memory_is_not_refused():
    """A step of the one large parameter would take more than its gradient and state."""
    least = plan_of(compiled(wide(), "min", rows(16), state=False, kind=torch.optim.SGD))
    torch._dynamo.reset()
    plan = plan_of(compiled(wide(), least.budget_bytes, rows(16), kind=torch.optim.SGD))
    assert plan.predicted_peak_bytes <= least.budget_bytes


def test_a_refused_budget_changes_nothing_and_names_one_that_trains():
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    host = fxremat.HostMemory("auto", state=True)
    with pytest.raises(BudgetError) as refused:
        fxremat.compile(model, rows(), 1000, optimizer=optimizer, offload=host)
    assert "step" not in vars(optimizer)
    least = refused.value.least_budget_bytes
    made = fxremat.compile(model, rows(), least, optimizer=optimizer, offload=host)
    assert made.plan.predicted_peak_bytes <= (least or 0)
    made(rows()).sum().backward()
    optimizer.step()


def test_what_fails_after_the_choice_gives_the_optimizer_its_step_again():
    made, _ = compiled(layers(), 0.6, rows())
    plan = made.plan
    torch._dynamo.reset()
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    with pytest.raises(PlanError):
        fxremat.compile(
            model, rows(), plan.budget_bytes, optimizer=optimizer, loss=torch.sum, plan=plan,
            offload=fxremat.HostMemory("auto", state=True),
        )  # fmt: skip
    assert "step" not in vars(optimizer)


@pytest.mark.parametrize("budget", [1.0, 0.8, 0.6, "min"])
def test_a_saved_plan_has_what_was_in_host_memory(budget: Any):
    plan = plan_of(compiled(layers(), budget, rows()))
    torch._dynamo.reset()
    again = plan_of(compiled(layers(), plan.budget_bytes, rows(), plan=plan))
    assert again.training_state == plan.training_state
