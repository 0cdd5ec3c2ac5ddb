"""Optimizers of a model: what a step of one takes, and what is left where it raises."""

from __future__ import annotations

import gc
import re
import warnings
import weakref
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fxremat
from fxremat import torch_compat
from fxremat.errors import BudgetWarning
from fxremat.loop.optimizers import MOST_WATCHED, Optimizers
from tests.models.zoo import seeded

CPU = torch.device("cpu")
BYTES = 4 * 100 * 50


@contextmanager
def watched(model: nn.Module, budget_bytes: int | None = None):
    optimizers = Optimizers(lambda: budget_bytes)
    unwatch = optimizers.watch(model, CPU)
    try:
        yield optimizers
    finally:
        unwatch()


def layer() -> nn.Linear:
    with seeded(0):
        return nn.Linear(100, 50, bias=False)


def step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step(closure)


class WrongError(Exception):
    """Of the user's own."""


def failing_step(optimizer: torch.optim.Optimizer) -> None:
    def closure() -> None:
        raise WrongError

    with pytest.raises(WrongError):
        step(optimizer, closure)


class Greedy(torch.optim.SGD):
    """Its step takes ten times its parameters."""

    def step(self, closure=None):
        if closure is not None:
            closure()
        torch.empty(10 * BYTES, dtype=torch.uint8)


def planned_anew() -> None:
    with torch_compat.AllocationLog() as log:
        torch.ones(100)
    assert log.peak_bytes == 400


def profiled() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as found:
        torch.ones(3).add(1)
    assert "aten::add" in {event.key for event in found.key_averages()}


@pytest.mark.parametrize("then", [planned_anew, profiled])
def test_a_step_that_raises_stands_in_nobodys_way(then: Callable[[], None]):
    model = layer()
    with watched(model):
        failing_step(torch.optim.SGD(model.parameters(), 0.1))
        then()


def test_a_step_that_is_too_much_is_told_with_remedies_that_work():
    with watched(model := layer(), 1), pytest.warns(BudgetWarning) as told:
        step(torch.optim.AdamW(model.parameters(), foreach=False))
    (least,) = {int(n) for n in re.findall(r"at least (\d+)", str(told[0].message))}
    with watched(model := layer(), least), warnings.catch_warnings():
        warnings.simplefilter("error")
        step(torch.optim.AdamW(model.parameters(), foreach=False))
    with watched(model := layer(), least - 1024), pytest.warns(BudgetWarning, match="fused=True"):
        step(torch.optim.AdamW(model.parameters()))
    with watched(model := layer(), least - 1), warnings.catch_warnings():
        warnings.simplefilter("error")
        step(torch.optim.AdamW(model.parameters(), fused=True))


def test_fused_is_no_remedy_where_an_optimizer_has_it_not():
    with watched(model := layer(), 1), pytest.warns(BudgetWarning) as told:
        step(torch.optim.Adadelta(model.parameters()))
    assert "fused" not in str(told[0].message)


def test_a_step_of_all_parameters_at_once_has_a_remedy_that_works():
    def momenta(foreach: bool) -> torch.optim.Optimizer:
        return torch.optim.Adadelta(model.parameters(), foreach=foreach)

    def layers() -> nn.Module:
        return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))

    with watched(model := layers(), 1), pytest.warns(BudgetWarning, match="foreach=False") as told:
        step(momenta(foreach=True))
    (least,) = {int(n) for n in re.findall(r"at least (\d+)", str(told[-1].message))}
    with watched(model := layers(), least - 1024), warnings.catch_warnings():
        warnings.simplefilter("error")
        step(momenta(foreach=False))


class Momenta(torch.optim.Optimizer):
    """Its step makes two moments, and may raise after that."""

    def __init__(self, parameters: Any, *, raises: bool) -> None:
        self.raises = raises
        super().__init__(parameters, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"first": torch.zeros_like(p), "second": torch.zeros_like(p)}
        if self.raises:
            raise WrongError


def held_after_a_step(*, raises: bool) -> list[int]:
    """Bytes that plans say are held, before and after a first step of an optimizer."""
    torch._dynamo.reset()
    model, batch = nn.Sequential(layer(), nn.GELU()), torch.ones(4, 100)
    call = fxremat.compile(model, batch, "16 MiB")
    optimizer, held = Momenta(model.parameters(), raises=raises), []
    for _ in range(2):
        call(batch).sum().backward()
        held.append(call.plan.predicted_held_bytes)
        with pytest.raises(WrongError) if raises else nullcontext():
            optimizer.step()
        optimizer.zero_grad()
    return held


@pytest.mark.usefixtures("fresh_dynamo", "quick_search")
def test_state_of_a_step_that_has_raised_is_counted_in_the_next_plan():
    raised = held_after_a_step(raises=True)
    assert raised == held_after_a_step(raises=False)
    assert raised[1] - raised[0] >= BYTES


def test_the_next_step_is_seen_after_one_that_has_raised():
    model = layer()
    with watched(model, 5 * BYTES):
        optimizer = Greedy(model.parameters(), 0.1)
        failing_step(optimizer)
        big = torch.empty(100 * BYTES, dtype=torch.uint8)  # none of a step
        del big
        with pytest.warns(BudgetWarning, match=str(10 * BYTES)):
            step(optimizer)
    assert not torch.autograd._profiler_enabled()


def test_a_step_that_has_raised_is_told_of_nobody():
    """Not what was allocated after it either."""
    model = layer()
    with watched(model, 5 * BYTES), warnings.catch_warnings():
        warnings.simplefilter("error")
        failing_step(torch.optim.SGD(model.parameters(), 0.1))
        torch.empty(100 * BYTES, dtype=torch.uint8)
        step(torch.optim.SGD(model.parameters(), 0.1))


def test_nothing_is_watched_any_more_when_the_model_is_gone():
    model = layer()
    with watched(model):
        failing_step(torch.optim.SGD(model.parameters(), 0.1))
    assert not torch.autograd._profiler_enabled()


@pytest.mark.usefixtures("fresh_dynamo", "quick_search")
def test_the_next_forward_is_not_watched_for_a_step_that_has_raised():
    model, batch = nn.Sequential(layer(), nn.GELU()), torch.ones(4, 100)
    call = fxremat.compile(model, batch, "16 MiB")
    is_watched = True
    while is_watched:  # on its own account
        loss = call(batch).sum()
        is_watched = torch.autograd._profiler_enabled()
        loss.backward()
        del loss
    failing_step(torch.optim.SGD(model.parameters(), 0.1))
    loss = call(batch).sum()
    assert not torch.autograd._profiler_enabled()
    loss.backward()


def test_state_is_counted_as_long_as_its_optimizer_lives():
    model = layer()
    with watched(model) as optimizers:
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        step(optimizer)
        assert optimizers.more_bytes == BYTES
        del optimizer
        gc.collect()
        assert not optimizers.more_bytes


def test_one_in_the_place_of_another_models_is_counted():
    """Python gives a new object the address of one that is gone."""
    model, other = layer(), layer()
    places: set[int] = set()
    with watched(model) as optimizers:
        for _ in range(100):
            foreign = torch.optim.SGD(other.parameters(), 0.1)
            step(foreign)
            places.add(id(foreign))
            del foreign
            gc.collect()
            own = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            if id(own) in places:
                break
        else:
            pytest.skip("no address was given twice")
        step(own)
        assert optimizers.more_bytes == BYTES


def test_the_steps_of_another_model_count_for_nothing():
    model, other = layer(), layer()
    with watched(model, 1) as optimizers, warnings.catch_warnings():
        warnings.simplefilter("error")
        foreign = torch.optim.SGD(other.parameters(), 0.1, momentum=0.9)
        for _ in range(MOST_WATCHED):
            step(foreign)
        assert not optimizers.more_bytes


@pytest.mark.usefixtures("fresh_dynamo")
def test_the_state_of_what_is_dropped_is_not_kept():
    """Neither by a circle, which Python's collector would have to look for."""

    def trained() -> weakref.ref[torch.optim.Optimizer]:
        model, x = layer(), torch.randn(8, 100)
        optimizer = torch.optim.AdamW(model.parameters())
        call = fxremat.compile(model, x, 1.0, loss=torch.sum, optimizer=optimizer)
        for _ in range(3):
            call(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return weakref.ref(optimizer)

    trained()
    gc.collect()
    gc.disable()
    try:
        assert trained()() is None
    finally:
        gc.enable()
