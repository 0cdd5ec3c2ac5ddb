"""Operators with ordered effects: each runs exactly once a step, in order, at every budget."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.nn import functional

import fxremat
from tests.higher_order import ROWS, WIDTH
from tests.models.zoo import sum_of_squares

pytestmark = pytest.mark.usefixtures("quick_search")

ran: list[str] = []


@torch.library.custom_op("fxremat_tests::doubled_and_noted", mutates_args=())
def doubled_and_noted(x: Tensor, name: str) -> Tensor:
    ran.append(name)
    return x * 2


doubled_and_noted.register_fake(lambda x, name: torch.empty_like(x))
doubled_and_noted.register_autograd(lambda ctx, gradient: (gradient * 2, None))


@torch.library.custom_op("fxremat_tests::noted", mutates_args=())
def noted(x: Tensor, name: str) -> None:
    ran.append(name)


noted.register_fake(lambda x, name: None)

OPERATORS = torch.ops.fxremat_tests
_register_effectful_op(OPERATORS.doubled_and_noted.default, _EffectType.ORDERED)
_register_effectful_op(OPERATORS.noted.default, _EffectType.ORDERED)


class NotedInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        OPERATORS.noted(gradient, "first in backward")
        OPERATORS.noted(gradient, "second in backward")
        return gradient * 3


@torch._dynamo.decorators.leaf_function
def leaf(x: Tensor) -> tuple[Tensor]:
    ran.append("leaf")
    return (x * 2,)


@leaf.register_fake
def _(x: Tensor) -> tuple[Tensor]:
    return (x * 2,)


class Model(nn.Module):
    """Layers, with effects after every second one, and two in the backward if ``late``."""

    def __init__(self, *, late: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.late = late

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = functional.gelu(layer(x))
            if i % 2:
                x = OPERATORS.doubled_and_noted(x, f"doubled {i}")
                OPERATORS.noted(x, f"noted {i}")
            if i == 3 and self.late:
                x = NotedInBackward.apply(x)
        return x


@pytest.fixture(autouse=True)
def _nothing_ran() -> Iterator[None]:
    ran.clear()
    yield
    ran.clear()


def step(call: Any, x: Tensor) -> list[str]:
    """What ran, in order."""
    ran.clear()
    call.zero_grad()
    sum_of_squares(call(x)).backward()
    return [*ran]


@pytest.mark.parametrize("late", [False, True])
def test_effects_run_once_in_order_whatever_is_recomputed(late: bool) -> None:
    torch.manual_seed(0)
    plain, x = Model(late=late), torch.randn(ROWS, WIDTH)
    reference = torch.compile(plain, backend="aot_eager")
    expected = step(reference, x)
    assert expected == step(reference, x)
    full = least = 0
    for share in (0.0, 0.5, 1.0):  # of what is between the least budget and everything kept
        torch._dynamo.reset()
        model = Model(late=late)
        model.load_state_dict(plain.state_dict())
        budget = "min" if share == 0 else int(least + share * (full - least))
        ran.clear()
        call = fxremat.compile(model, x, budget, loss=sum_of_squares, assume="strict")
        assert not ran, "planning must have no effect"
        full, least = call.plan.baseline_peak_bytes, call.plan.least_budget_bytes
        assert least < full
        assert step(call, x) == expected
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
        peak = fxremat.measure_step(model, functools.partial(step, call, x)).peak_bytes
        assert peak <= call.plan.budget_bytes


def test_a_function_that_dynamo_does_not_enter_runs_once() -> None:
    class Leaves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                (x,) = leaf(functional.gelu(layer(x)))
            return x

    x = torch.randn(ROWS, WIDTH)
    plain = Leaves()
    reference = torch.compile(plain, backend="aot_eager")
    expected = step(reference, x)
    torch._dynamo.reset()
    model = Leaves()
    model.load_state_dict(plain.state_dict())
    call = fxremat.compile(model, x, "min", loss=sum_of_squares)
    assert step(call, x) == expected
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_a_policy_cannot_ask_for_a_second_run() -> None:
    def recompute(operation: Any) -> str | None:
        return "recompute" if operation.name.startswith("with_effects") else None

    with pytest.raises(fxremat.ArgumentError, match="must run once"):
        fxremat.compile(Model(), torch.randn(ROWS, WIDTH), "min", policy=recompute)
