"""Gradients that hooks take away in the backward are in no plan, from the first step on."""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from tests.harness import on_release
from tests.loops.memory import recording, sizes_known
from tests.models.bits import assert_bitwise_equal
from tests.models.zoo import seeded

pytestmark = [
    pytest.mark.usefixtures("quick_search", "fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:Anomaly Detection"),
    on_release,
]

WIDTH, ROWS, LAYERS, STEPS = 128, 64, 6, 6

Hook = Callable[[Any], Any]
Optimizers = dict[Tensor, torch.optim.Optimizer]


def built() -> nn.Module:
    with seeded(0):
        layers = (m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU()))
        return nn.Sequential(*layers)


def batch(number: int) -> Tensor:
    with seeded(number):
        return torch.randn(ROWS, WIDTH)


def squares(output: Tensor) -> Tensor:
    return output.square().mean()


def that_steps(own: Optimizers) -> Hook:
    def hook(parameter: Tensor) -> None:
        own[parameter].step()
        own[parameter].zero_grad()

    return hook


def that_steps_somehow(own: Optimizers) -> Hook:
    """Its source does not say so."""
    clear: list[Callable[[Any], None]] = [lambda p: setattr(p, "grad", None)]

    def hook(parameter: Tensor) -> None:
        own[parameter].step()
        for each in clear:
            each(parameter)

    return hook


def that_keeps(_own: Optimizers) -> Hook:
    """Its source says otherwise."""

    def hook(parameter: Tensor) -> None:
        gradient = parameter.grad
        parameter.grad = None
        parameter.grad = gradient

    return hook


@contextmanager
def hooked(
    model: nn.Module,
    make: Callable[[Optimizers], Hook] | None,
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.SGD,
) -> Iterator[Optimizers]:
    own: Optimizers = {p: optimizer([p]) for p in model.parameters()}
    handles = [p.register_post_accumulate_grad_hook(make(own)) for p in own] if make else []
    yield own
    for handle in handles:  # Python does not collect parameters whose hooks refer to them
        handle.remove()


def least_bytes(make: Callable[[Optimizers], Hook] | None, **options: Any) -> int:
    model = built()
    with hooked(model, make), pytest.raises(fxremat.BudgetError) as raised:
        fxremat.compile(model, batch(0), "1 KiB", loss=squares, **options)
    assert raised.value.least_budget_bytes is not None
    return raised.value.least_budget_bytes


class Ran:
    """What steps left behind and took.

    Attributes:
        left: losses, and parameters at the end.
        peaks_bytes: of each step, from its forward to the end of its backward.
        warned: of each step.
        plans: of each step; none without fxremat.
    """

    def __init__(
        self,
        make: Callable[[Optimizers], Hook] | None,
        budget: Any,
        *,
        anomaly_at: int | None = None,
    ) -> None:
        model = built()
        call: Any
        self.warned: list[list[str]] = []
        self.plans: list[fxremat.Plan] = []
        losses: list[Tensor] = []
        with hooked(model, make) as own, sizes_known():
            if budget is None:
                call = torch.compile(model, backend="aot_eager")
            else:
                call = fxremat.compile(model, batch(0), budget, loss=squares)
            gc.collect()
            with recording() as memory:
                for number in range(STEPS):
                    with warnings.catch_warnings(record=True) as warned:
                        warnings.simplefilter("always", fxremat.BudgetWarning)
                        memory.mark(f"begin {number}")
                        loss = squares(call(batch(number)))
                        with torch.autograd.set_detect_anomaly(number == anomaly_at):
                            loss.backward()
                        memory.mark(f"end {number}")
                    self.warned.append([str(each.message) for each in warned])
                    self.plans += [call.plan] if budget is not None else []
                    losses.append(loss.detach().clone())
                    for parameter, optimizer in own.items():
                        if parameter.grad is not None:
                            optimizer.step()
                            optimizer.zero_grad()
        self.left = [*losses, *(p.detach().clone() for p in model.parameters())]
        self.peaks_bytes = [
            memory.peak(f"begin {n}", f"end {n}", held_bytes=PARAMETERS_BYTES)[0]
            for n in range(STEPS)
        ]


PARAMETERS_BYTES = sum(p.nbytes for p in built().parameters())


def test_the_least_budget_leaves_out_gradients_that_leave():
    plain, known, not_known = map(least_bytes, (None, that_steps, that_steps_somehow))
    assert plain - known >= 0.75 * PARAMETERS_BYTES
    assert not_known == plain


@pytest.mark.parametrize("budget", ["least", "min", 1.0])
def test_optimizers_in_the_backward_keep_to_it_from_the_first_step_on(budget: Any):
    given = least_bytes(that_steps) if budget == "least" else budget
    expected, ran = Ran(that_steps, None), Ran(that_steps, given)
    assert_bitwise_equal(ran.left, expected.left)
    assert not any(ran.warned)
    assert max(ran.peaks_bytes) <= ran.plans[-1].budget_bytes


def test_a_hook_whose_source_does_not_say_it_is_learned_of():
    budget_bytes = least_bytes(None)
    expected, ran = Ran(that_steps_somehow, None), Ran(that_steps_somehow, budget_bytes)
    assert_bitwise_equal(ran.left, expected.left)
    assert not any(ran.warned)
    assert max(ran.peaks_bytes) <= budget_bytes
    first, *_, last = ran.plans
    assert first.least_budget_bytes - last.least_budget_bytes >= 0.75 * PARAMETERS_BYTES


def test_a_hook_that_keeps_what_its_source_says_it_takes_is_warned_of():
    """Its gradients are in later plans, and the warnings name what steps take."""
    budget_bytes = least_bytes(that_keeps)
    expected, ran = Ran(that_keeps, None), Ran(that_keeps, budget_bytes)
    assert_bitwise_equal(ran.left, expected.left)
    for peak_bytes, warned in zip(ran.peaks_bytes, ran.warned, strict=True):
        assert peak_bytes > budget_bytes
        named = re.findall(r"(?:up to|takes at least) (\d+) bytes", " ".join(warned))
        assert peak_bytes <= max(map(int, named)) + 512
    with_room = Ran(that_keeps, least_bytes(None))
    assert not any(with_room.warned[1:])
    assert max(with_room.peaks_bytes) <= with_room.plans[-1].budget_bytes


def test_a_step_whose_gradients_leave_late_is_warned_of():
    """Where anomalies are detected, autograd hands over all gradients at the end."""
    late = Ran(that_steps, least_bytes(that_steps), anomaly_at=STEPS - 2)
    *before, warned, after = late.warned
    assert not any(before)
    assert "FXR106" in warned[0]
    (named,) = re.findall(r"up to (\d+) bytes", warned[0])
    assert late.plans[0].budget_bytes < late.peaks_bytes[-2] <= int(named)
    assert "FXR102" in after[0]


@pytest.mark.parametrize("named", [True, False], ids=["named", "not named"])
def test_what_a_step_in_a_hook_allocates_has_room(named: bool):
    """From the first step on if ``optimizer=`` names it, else once a step was measured."""
    model = built()
    with hooked(model, that_steps, torch.optim.AdamW) as own:
        given = {"optimizer": list(own.values())} if named else {}
        call = fxremat.compile(model, batch(0), "min", loss=squares, **given)

        def step() -> None:
            squares(call(batch(0))).backward()

        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", fxremat.BudgetWarning)
            for _ in range(5):
                step()
            taken_bytes = fxremat.measure_step(call, step).peak_bytes
        assert named != bool(warned), [str(each.message) for each in warned]
        assert taken_bytes <= call.plan.budget_bytes


def test_steps_after_a_hook_that_has_raised_keep_to_the_budget():
    """Gradients that its step has left are cleared, as after any step that failed."""
    model, failing = built(), [False]

    def that_may_fail(own: Optimizers) -> Hook:
        last = list(own)[-6]

        def hook(parameter: Tensor) -> None:
            if failing[0] and parameter is last:
                raise ZeroDivisionError
            own[parameter].step()
            own[parameter].zero_grad()

        return hook

    with hooked(model, that_may_fail, torch.optim.AdamW) as own, warnings.catch_warnings():
        warnings.simplefilter("error", fxremat.BudgetWarning)
        given = {"loss": squares, "optimizer": list(own.values())}
        call = fxremat.compile(model, batch(0), "min", **given)

        def step() -> None:
            squares(call(batch(0))).backward()

        for failing[0] in (False, True, False, True, False, False):
            with pytest.raises(ZeroDivisionError) if failing[0] else nullcontext():
                step()
            model.zero_grad()
        assert fxremat.measure_step(call, step).peak_bytes <= call.plan.budget_bytes
