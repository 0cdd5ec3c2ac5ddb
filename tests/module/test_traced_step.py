"""A step's real timeline has the plan's events, in the plan's order."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.ir import Copy, Lane
from tests.models import ZOO
from tests.moving import intercept_copies
from tests.trials import compiled

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def step_of(name: str, **options: Any) -> tuple[Any, Callable[[], None]]:
    entry = ZOO[name]
    _, call = compiled(entry, 0.7, **options)
    args, kwargs = entry.sample(0)

    def step() -> None:
        entry.loss(call(*args, **kwargs)).backward()

    step()
    return call, step


@pytest.mark.parametrize("mode", [False, "only"])
def test_same_events_in_the_order_of_their_lanes(mode: Any):
    call, step = step_of("gpt", offload=mode)
    begin_s = time.perf_counter()
    trace = call.trace_step(step)
    taken_s = time.perf_counter() - begin_s
    plan, real = trace.predicted.events, trace.measured.events
    assert trace.predicted == call.plan.timeline
    assert [(e.op, e.lane) for e in plan] == [(e.op, e.lane) for e in real]
    for lane in Lane:
        times = [(e.start_s, e.end_s) for e in real if e.lane is lane]
        assert times == sorted(times)
    assert all(0 <= e.start_s <= e.end_s <= taken_s for e in real)
    assert any(isinstance(e.op, Copy) for e in real) == (mode == "only")
    assert 0 <= trace.overlap <= 1


class Times(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor, times: int) -> Tensor:
        """``times`` shapes nothing."""
        return self.layer(x).tanh() * times


def test_a_number_that_shapes_nothing_may_be_another_one_at_each_step():
    call, x = fxremat.compile(Times(), budget="16 MiB"), torch.randn(32, 64)
    for times in (2, 3, 4):
        call(x, times).sum().backward()
    for times in (5, 4):
        trace = call.trace_step(lambda times=times: call(x, times).sum().backward())
        plan, real = trace.predicted.events, trace.measured.events
        assert [(e.op, e.lane) for e in plan] == [(e.op, e.lane) for e in real]
    call(x, 5).sum().backward()


def test_slow_copies_are_seen():
    call, step = step_of("gpt", offload="only")

    def slow(copy: Callable[[], None]) -> None:
        time.sleep(0.004)
        copy()

    with intercept_copies(slow):
        measured = call.trace_step(step).measured
    assert all(e.end_s - e.start_s >= 0.004 for e in measured.events if isinstance(e.op, Copy))


def test_it_is_shown_side_by_side():
    call, step = step_of("gpt", offload="only")
    text = call.trace_step(step).show()
    assert "D2H" in text
    assert "B 3" in text
    assert "measured duration" in text


def test_two_steps_are_refused():
    call, step = step_of("gpt")

    def twice() -> None:
        step()
        step()

    with pytest.raises(ValueError, match="its plan has"):
        call.trace_step(twice)


def test_nothing_stays_behind():
    call, step = step_of("gpt")
    call.trace_step(step)
    blocks = [b for g in call._training.latest[1].both for b in g.body.stages.values()]
    assert not any(b._forward_hooks or b._forward_pre_hooks for b in blocks)
