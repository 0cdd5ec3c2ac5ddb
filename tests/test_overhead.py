"""What a step takes beside its graphs."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import fxremat
from fxremat.overhead import way_in_s, way_out_s

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_the_way_in_is_timed():
    assert 0.01 <= way_in_s(lambda: time.sleep(0.01)) < 0.1


def test_more_gradients_and_more_saved_tensors_take_longer():
    """By the least of three: another process may be in the way of one."""

    def least_s(saved: int, gradients: int) -> float:
        return min(way_out_s(saved=saved, gradients=gradients) for _ in range(3))

    little = least_s(0, 1)
    assert 0 < little < least_s(0, 2000)
    assert little < least_s(20_000, 1)


def test_it_leaves_no_trace():
    state = torch.get_rng_state()
    with torch.no_grad():
        way_out_s(saved=3, gradients=5)
        assert not torch.is_grad_enabled()
    assert torch.equal(state, torch.get_rng_state())


def test_all_times_of_a_plan_hold_it():
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(16, 16), nn.Tanh())])
    plan = fxremat.compile(model, torch.randn(64, 16), "min").plan
    assert plan.overhead_s > 0
    assert plan.predicted_s == pytest.approx(plan.timeline.makespan_s + plan.overhead_s)
    assert plan.frontier.points[0].predicted_s == pytest.approx(plan.predicted_s)
    assert plan.frontier.baseline.predicted_s == pytest.approx(plan.baseline_s)
    assert plan.overhead_s < plan.lower_bound_s <= plan.predicted_s
    bare = plan.with_overhead(0.0)
    assert bare.predicted_s == pytest.approx(plan.timeline.makespan_s)
    assert bare.baseline_s == pytest.approx(plan.baseline_s - plan.overhead_s)


def test_other_shapes_are_charged_with_it_as_well():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    call = fxremat.compile(model, torch.randn(64, 16), "1 MiB")
    call(torch.randn(32, 16)).sum().backward()
    assert len(call.plans) == 2
    assert call.plans[0].overhead_s == call.plans[1].overhead_s > 0
