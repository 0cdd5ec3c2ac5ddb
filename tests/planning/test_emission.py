"""A plan that is followed again leads to the same graphs, and to the same bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.errors import PlanError
from fxremat.ir import Backward, Keep
from tests.efforts import WHOLE
from tests.models import ZOO
from tests.models.bits import assert_bitwise_equal
from tests.models.reference import run_step
from tests.passes.test_invert import X, loss_of, network
from tests.trials import compiled, reference

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured or searched from here on."""

    def refuse(*_args: object, **_options: object) -> None:
        raise AssertionError("a plan was there")

    for place in (
        "graph.graph.measure_line",
        "graph.further.measure_link",
        "planning.planner.emit",
        "planning.choose.fastest",
    ):
        monkeypatch.setattr(f"fxremat.{place}", refuse)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt", {}),
        ("siamese", {}),
        ("gpt", {"budget": "min reserved", "accumulate": True}),
        ("unet", {"offload": "only"}),
    ],
    ids=["line with dropout", "join", "reserved", "transfers"],
)
def test_the_same_code_and_the_same_bits(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, quick_search: None
):
    options = dict(options)
    budget = options.pop("budget", "min")
    _, first = compiled(ZOO[name], budget, input_gradients=True, **options)
    plan = first.plan
    assert plan.host_bytes or "offload" not in options
    torch._dynamo.reset()
    no_measuring(monkeypatch)
    model, call = compiled(ZOO[name], None, input_gradients=True, plan=plan, **options)
    assert call.plan == plan
    result = run_step(ZOO[name], model, call, input_gradients=True)
    assert_bitwise_equal(result, reference(name))


def test_norms_undone_are_so_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "fxremat.planning.choose.fastest",
        lambda ways, budget_bytes: (ways[-1], ways[-1].fastest_within(budget_bytes)),
    )
    options: dict[str, Any] = {"loss": loss_of, "bits": "rounding", "effort": WHOLE}
    plan = fxremat.plan(network(), X, 0.8, **options)
    assert not plan.form.exact
    torch._dynamo.reset()
    no_measuring(monkeypatch)
    assert fxremat.compile(network(), X, plan=plan, **options).plan == plan
    torch._dynamo.reset()
    with pytest.raises(PlanError) as caught:
        fxremat.compile(network(), X, plan=plan, loss=loss_of, effort=WHOLE)
    assert any("exact" in told for told in caught.value.differs)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(16, 16), nn.GELU())])


SAMPLE = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def plan() -> fxremat.Plan:
    torch._dynamo.reset()
    return fxremat.plan(model(), SAMPLE, "min")


def altered(plan: fxremat.Plan) -> dict[str, fxremat.Plan]:
    keeps_all = tuple(
        op if isinstance(op, Backward) else replace(op, keep=Keep.ALL, option=0)
        for op in plan.schedule.computations
    )
    decision = plan.decision
    return {
        "schedule": replace(plan, schedule=replace(plan.schedule, ops=keeps_all)),
        "no schedule": replace(plan, schedule=replace(plan.schedule, ops=())),
        "another node": replace(plan, decision=replace(decision, missing=((0, (10**6,)),))),
        "code": replace(plan, forward_code=plan.forward_code + "\n"),
        "no timeline": replace(plan, timeline=type(plan.timeline)(())),
    }


ALTERED = (
    "schedule", "no schedule", "another node", "code", "no timeline",
)  # fmt: skip


@pytest.mark.parametrize("what", ALTERED)
def test_a_plan_that_does_not_lead_to_its_code_is_refused(plan: fxremat.Plan, what: str):
    other = altered(plan)[what]
    with pytest.raises(PlanError) as caught:
        fxremat.compile(model(), SAMPLE, plan=other)
    assert caught.value.differs == ()


def test_other_shapes_are_planned_for_the_plans_budget(plan: fxremat.Plan):
    call = fxremat.compile(model(), SAMPLE, plan=plan)
    other: Tensor = call(SAMPLE[:32])
    other.sum().backward()
    assert [p.budget_bytes for p in call.plans] == [plan.budget_bytes] * 2
    assert call.plans[0] == plan
    assert call.plan.baseline_peak_bytes < plan.baseline_peak_bytes


def test_a_budget_beside_a_plan_is_one_that_it_keeps_to(plan: fxremat.Plan):
    peak_bytes = plan.predicted_peak_bytes
    for budget in (peak_bytes, f"{peak_bytes} B", 1.0, "min"):
        torch._dynamo.reset()
        assert fxremat.compile(model(), SAMPLE, budget, plan=plan).plan == plan
    for budget in (peak_bytes - 1, 1e-9, "1 KiB"):
        with pytest.raises(fxremat.BudgetError, match="plan="):
            fxremat.compile(model(), SAMPLE, budget, plan=plan)
    with pytest.raises(fxremat.BudgetError, match="plan="):
        fxremat.compile(model(), SAMPLE)
