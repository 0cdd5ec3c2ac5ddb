"""The promise with storages that travel: every zoo model, on the allocator and the worker."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fxremat
from fxremat.errors import TransferError
from tests.models import ZOO
from tests.models.bits import assert_bitwise_equal
from tests.models.reference import compile_reference, run_step
from tests.moving import intercept_copies
from tests.test_zoo import LARGE, check_all, every_model, quick
from tests.trials import Tried, attempt, compiled, reference

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "quick_search")

SHARES = (0.0, 0.35, 0.7, 1.0)
"""Budgets, from the least feasible one to the full peak."""

modes = pytest.mark.parametrize("mode", ["auto", "only"])

USUAL = ("gpt", "siamese", "buffers")
"""A line, a join and one with statistics: each time tried in both modes, but for the line."""

OTHERS = (("autocast_inside", "auto"), ("inplace", "auto"))
"""Tried each time as well; what is left, in the slow suite."""


def _marks(name: str, mode: str) -> list[pytest.MarkDecorator]:
    if name in USUAL and (name, mode) != ("gpt", "only"):
        return []
    return [] if (name, mode) in OTHERS else [pytest.mark.slow]


def attempt_all(name: str, mode: str, shares: tuple[float, ...]) -> list[Tried]:
    """At ``shares`` of the way from the least feasible budget to the full peak."""

    def at(budget: int | str) -> Tried:
        return attempt(ZOO[name], budget, reference(name), offload=mode)

    least = at("min")
    way = least.full_bytes - least.budget_bytes
    return [least, *(at(least.budget_bytes + int(share * way)) for share in shares[1:])]


def check(tried: list[Tried], mode: str) -> None:
    """Something travels where something must, and nothing where everything fits."""
    check_all(tried)
    assert tried[-1].host_bytes == 0
    if mode == "only":
        assert tried[0].host_bytes > 0
        assert not any(t.again for t in tried)


@quick
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(n, mode, marks=_marks(n, mode))
        for n in ZOO
        if n not in LARGE
        for mode in ("auto", "only")
    ],
)
def test_same_bits_within_the_budget(name: str, mode: str):
    check(attempt_all(name, mode, (0.0, 1.0)), mode)


@modes
@pytest.mark.slow
@every_model
def test_same_bits_within_four_budgets(name: str, mode: str):
    check(attempt_all(name, mode, SHARES), mode)


class Late:
    """Delays every copy, each by another time."""

    def __init__(self, seed: int, most_s: float = 0.02) -> None:
        self._draw = random.Random(seed)
        self._most_s = most_s
        self.count = 0

    def __call__(self, copy: Callable[[], None]) -> None:
        time.sleep(self._draw.uniform(0, self._most_s))
        self.count += 1
        copy()


def steps_of(name: str, call: Any, model: Any, count: int) -> list[Any]:
    """Steps with other data and other random numbers each time; gradients add up."""
    entry = ZOO[name]
    return [run_step(entry, model, call, data_seed=i, step_seed=i) for i in range(count)]


def interleaved(name: str, call: Any, model: Any) -> list[Any]:
    """Two forwards, then their backwards, the first one first; twice."""
    entry = ZOO[name]
    for loss_point in range(2):
        losses = []
        for seed in (loss_point, loss_point + 7):
            args, kwargs = entry.sample(seed)
            torch.manual_seed(seed)
            with entry.context():
                losses.append(entry.loss(call(*args, **kwargs)))
        for loss in losses:
            loss.backward()
    return [p.grad for p in model.parameters()]


def interleaved_in_the_least(name: str, mode: str) -> list[Any]:
    """Within the least budget that errors ask for: one step's least is not enough for two."""
    model, call = compiled(ZOO[name], "min", offload=mode, accumulate=True)
    budget = call.plan.budget_bytes
    while True:
        try:
            return interleaved(name, call, model)
        except fxremat.BudgetError as error:
            assert error.least_budget_bytes > budget
            budget = error.least_budget_bytes
        torch._dynamo.reset()
        model, call = compiled(ZOO[name], budget, offload=mode, accumulate=True)


MARKS: dict[tuple[str, str], Any] = {("siamese", "only"): ()}
"""Of models and modes; all others are slow."""


@quick
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=MARKS.get((name, mode), pytest.mark.slow))
        for name in ("gpt", "siamese", "buffers", "unet")
        for mode in ("auto", "only")
    ],
)
def test_steps_follow_and_overlap_each_other_however_late_copies_are(name: str, mode: str):
    """Slots are used again, each time with other data."""
    entry = ZOO[name]
    model, call = compiled(entry, "min", offload=mode, accumulate=True)
    late = Late(seed=3)
    with intercept_copies(late):
        ours = steps_of(name, call, model, 3)
        assert late.count == 3 * sum(
            isinstance(e.op, fxremat.ir.Copy) for e in call.plan.timeline.events
        )
        torch._dynamo.reset()
        overlapping = interleaved_in_the_least(name, mode)
    torch._dynamo.reset()
    model = entry.build()
    assert_bitwise_equal(ours, steps_of(name, compile_reference(entry, model), model, 3))
    torch._dynamo.reset()
    model = entry.build()
    expected = interleaved(name, compile_reference(entry, model), model)
    assert_bitwise_equal(overlapping, expected)


class Killed(BaseException):
    """Ends the worker."""


def test_a_dead_worker_is_an_error_and_the_next_compilation_is_right():
    entry = ZOO["gpt"]
    model, call = compiled(entry, "min", offload="only")

    def kill(_copy: Callable[[], None]) -> None:
        raise Killed

    with intercept_copies(kill), pytest.raises(TransferError):
        run_step(entry, model, call)
    torch._dynamo.reset()
    attempt(entry, "min", reference("gpt"), offload="only")
