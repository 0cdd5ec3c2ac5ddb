"""A plan of another step is refused, and the error says what is another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import fxremat
from fxremat.cache.origins import key_of
from fxremat.errors import PlanError
from tests.planning.test_emission import SAMPLE, model
from tests.plans import everything_kept, plan_of


def told(call: Callable[[], object]) -> tuple[str, ...]:
    """What a plan is refused for."""
    torch._dynamo.reset()
    with pytest.raises(PlanError) as caught:
        call()
    assert all(reason in str(caught.value) for reason in caught.value.differs)
    return caught.value.differs


@pytest.fixture(scope="module")
def plan() -> fxremat.Plan:
    torch._dynamo.reset()
    return fxremat.plan(model(), SAMPLE, 1.0)


def test_another_model(plan: fxremat.Plan):
    other = nn.Sequential(*model(), nn.Tanh())
    (reason,) = told(lambda: fxremat.compile(other, SAMPLE, plan=plan))
    assert "operations" in reason
    wider = nn.Sequential(*model(), nn.Linear(16, 4))
    inputs, _operations = told(lambda: fxremat.compile(wider, SAMPLE, plan=plan))
    assert "are 15, the plan's were 13" in inputs


def test_another_batch_or_dtype(plan: fxremat.Plan):
    (reason,) = told(lambda: fxremat.compile(model(), SAMPLE[:8], plan=plan))
    assert "float32[8, 16]" in reason and "float32[64, 16]" in reason
    reasons = told(lambda: fxremat.compile(model().double(), SAMPLE.double(), plan=plan))
    assert all("float64" in reason for reason in reasons)


def test_the_same_sizes_otherwise_laid_out(plan: fxremat.Plan):
    turned = SAMPLE.T.contiguous().T
    (reason,) = told(lambda: fxremat.compile(model(), turned, plan=plan))
    assert "strides" in reason


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"reserve": 4096}, "reserve"),
        ({"accumulate": True}, "accumulate"),
        ({"optimizer": torch.optim.Adam}, "optimizer"),
        ({"loss": torch.sum}, "loss"),
        ({"offload": "auto"}, "offload"),
        ({"budget": "100% reserved"}, "budget_on"),
    ],
)
def test_another_option(plan: fxremat.Plan, options: dict[str, Any], name: str):
    reasons = told(lambda: fxremat.compile(model(), SAMPLE, plan=plan, **options))
    assert any(f"option {name} " in reason for reason in reasons)


def test_gradients_that_were_not_there(plan: fxremat.Plan):
    trained = model()
    for parameter in trained.parameters():
        parameter.grad = torch.zeros_like(parameter)
    reasons = told(lambda: fxremat.compile(trained, SAMPLE, plan=plan))
    assert any("held" in reason for reason in reasons)


def test_another_place(plan: fxremat.Plan):
    assert plan.origin is not None
    versions = tuple((name, "'0.0'") for name, _ in plan.origin.versions)
    elsewhere = replace(plan, origin=replace(plan.origin, device="a Z80", versions=versions))
    device, *others = told(lambda: fxremat.compile(model(), SAMPLE, plan=elsewhere))
    assert "a Z80" in device
    assert any(torch.__version__ in reason for reason in others)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        (reason,) = told(lambda: fxremat.compile(model(), SAMPLE, plan=plan))
    finally:
        torch.set_num_threads(before)
    assert "threads" in reason


def test_a_plan_of_no_model():
    written = plan_of(everything_kept(3), stages=3)
    assert told(lambda: fxremat.compile(model(), SAMPLE, plan=written)) == ()


@pytest.mark.parametrize("value", [3, b"plan.json", ["plan.json"]])
def test_what_is_neither_a_plan_nor_a_path(value: object):
    with pytest.raises(fxremat.ArgumentError) as caught:
        fxremat.compile(model(), SAMPLE, plan=value)  # type: ignore[arg-type]
    assert caught.value.argument == "plan"


def test_keys_differ_in_whatever_they_are_of(plan: fxremat.Plan):
    origin = plan.origin
    assert origin is not None
    changed = {
        "code": "another",
        "device": "another",
        "versions": (),
        "settings": (),
        "options": (),
        "held": (),
    }
    keys = {key_of(replace(origin, **{name: value})) for name, value in changed.items()}
    keys |= {key_of(origin), key_of(origin, budget=1), key_of(origin, budget=2)}
    assert len(keys) == len(changed) + 3
    assert key_of(origin, budget=1) == key_of(replace(origin), budget=1)
