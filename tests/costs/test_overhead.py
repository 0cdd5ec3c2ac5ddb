"""What a step takes beside its calls."""

from __future__ import annotations

import itertools
import time
import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.costs.overhead import Rehearsal, call_s

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


CPU = torch.device("cpu")


def work_for(seconds: float) -> None:
    """Keep the thread busy for so long."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def rehearsal(
    *, takes_s: float = 0.0, calls_s: float = 0.0, gradients: int = 1, saved: int = 1
) -> Rehearsal:
    """Of a step whose graphs take ``2 takes_s``, two outputs of it for its caller."""

    def forward(args: list[Tensor]) -> list[Tensor]:
        (x,) = args
        work_for(takes_s)
        return [x.sin(), x.cos(), *(x.clone() for _ in range(saved))]

    def backward(args: list[Tensor]) -> list[Tensor]:
        assert len(args) == saved + 2
        work_for(takes_s)
        return [args.pop(0)]

    x = torch.ones(3)
    # The number makes each one the first of its kind.
    return Rehearsal(CPU, next(numbers), gradients, forward, backward, 2, (x,), (x,), calls_s)


numbers = itertools.count()


def nothing() -> None:
    """A way in that takes no time."""


def test_what_is_beside_the_calls_is_timed():
    assert 0.02 <= rehearsal(takes_s=0.01).overhead_s(nothing) < 0.1
    assert 0.01 <= rehearsal(takes_s=0.01, calls_s=0.01).overhead_s(nothing) < 0.09
    assert 0.01 <= rehearsal().overhead_s(lambda: work_for(0.01)) < 0.1


def test_of_long_steps_only_the_ways_in_and_out_are():
    def refuse(_args: list[Tensor]) -> list[Tensor]:
        raise AssertionError("a long step is run")

    long = replace(rehearsal(calls_s=1.0), forward=refuse)
    assert 0.01 <= long.overhead_s(lambda: work_for(0.01)) < 0.1


def test_more_gradients_and_more_saved_tensors_take_longer():
    """By the least of three: another process may be in the way of one."""

    def least_s(**counts: int) -> float:
        return min(rehearsal(**counts).overhead_s(nothing) for _ in range(3))

    little = least_s()
    assert 0 < little < least_s(gradients=2000)
    assert little < least_s(saved=20_000)


def test_it_is_the_same_for_all_plans_of_a_step():
    step = rehearsal(takes_s=0.001)
    assert step.overhead_s(nothing) == step.overhead_s(lambda: work_for(0.01))


def test_a_gpu_has_its_host_run_ahead():
    step = rehearsal(takes_s=0.01)
    on_gpu = replace(step, device=torch.device("cuda", 0))
    assert on_gpu.overhead_s(nothing) == 0.0


def test_it_leaves_no_trace_and_frees_what_it_saved():
    state = torch.get_rng_state()
    gone: list[bool] = []
    saved: list[weakref.ref[Tensor]] = []

    def forward(args: list[Tensor]) -> list[Tensor]:
        made = args[0] + torch.rand(3)
        saved.append(weakref.ref(made))
        return [args[0], args[0], made]

    def backward(args: list[Tensor]) -> list[Tensor]:
        args.clear()
        gone.append(saved[-1]() is None)
        return []

    with torch.no_grad():
        replace(rehearsal(), forward=forward, backward=backward).overhead_s(nothing)
        assert not torch.is_grad_enabled()
    assert torch.equal(state, torch.get_rng_state())
    assert gone and all(gone)


def test_all_times_of_a_plan_hold_it():
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(16, 16), nn.Tanh())])
    plan = fxremat.compile(model, torch.randn(64, 16), "min", assume="strict").plan
    assert plan.predicted_s == pytest.approx(plan.timeline.makespan_s + plan.overhead_s)
    assert plan.frontier.points[0].predicted_s == pytest.approx(plan.predicted_s)
    assert plan.frontier.baseline.predicted_s == pytest.approx(plan.baseline_s)
    assert plan.lower_bound_s <= plan.predicted_s
    bare = plan.with_overhead(0.0)
    assert bare.predicted_s == pytest.approx(plan.timeline.makespan_s)
    assert bare.baseline_s == pytest.approx(plan.baseline_s - plan.overhead_s)


def test_other_shapes_are_charged_with_it_as_well():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    call = fxremat.compile(model, torch.randn(64, 16), "1 MiB")
    call(torch.randn(32, 16)).sum().backward()
    assert len(call.plans) == 2
    assert call.plans[0].overhead_s == call.plans[1].overhead_s != 0
    assert call._compiler.latest.planned.measure_overhead is None, "the batch is held"


def test_a_call_takes_microseconds():
    call_s.cache_clear()
    found = call_s()
    assert 0 <= found < 1e-4
    assert call_s() == found
