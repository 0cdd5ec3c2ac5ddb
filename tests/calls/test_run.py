"""Gradients of outputs are there until the backward has read them, and no longer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxremat
from fxremat.planner.context.context_bytes import SCALARS
from fxremat.runtime.steps import SCALAR_BYTES
from tests.harness import on_release

pytestmark = [pytest.mark.usefixtures("quick_search"), on_release]

NUMBERS_BYTES = SCALARS * SCALAR_BYTES
"""What is planned for the loss, its gradient and their like, be they there or not."""


class Decoder(nn.Module):
    """Outputs as large as all else, and a peak in the middle of the backward."""

    def __init__(self, *, heads: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(16, 512), nn.GELU(), nn.Linear(512, 16))
        self.heads = nn.ModuleList(nn.Linear(16, 256) for _ in range(heads))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.body(x)
        return tuple(head(y) for head in self.heads)


def loss_of(outputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
    losses = [functional.cross_entropy(own, target) for own in outputs]
    return torch.stack(losses).sum()


Backward = Callable[[tuple[Tensor, ...]], object]


def taken(model: fxremat.CompiledModule, x: Tensor, backward: Backward) -> tuple[int, int]:
    """Predicted and measured peak of a step whose plan has seen some."""

    def step() -> None:
        model.zero_grad()
        outputs = model(x)
        held = backward(outputs)
        del held

    for _ in range(4):
        step()
    model.zero_grad()  # the release of what was there before is not seen
    found = fxremat.measure_step(model, step)
    return model.plan.predicted_peak_bytes, found.peak_bytes


def compiled(
    heads: int, budget: float | str = 1.0, *, reserve: int = 0
) -> tuple[fxremat.CompiledModule, Tensor, Tensor]:
    x, target = torch.randn(256, 16), torch.randint(0, 256, (256,))
    net = Decoder(heads=heads)
    model = fxremat.compile(
        net, x, budget, loss=fxremat.Loss(loss_of, target=target), reserve=reserve
    )
    return model, x, target


@pytest.mark.parametrize(
    ("budget", "heads"),
    [
        ("min", 1),
        (1.0, 3),
        *(pytest.param(*c, marks=pytest.mark.slow) for c in [(1.0, 1), ("min", 3)]),
    ],
)
def test_a_step_takes_what_is_planned(heads: int, budget: float | str):
    model, x, target = compiled(heads, budget)
    predicted, measured = taken(model, x, lambda outputs: loss_of(outputs, target).backward())
    assert 0 <= predicted - measured <= NUMBERS_BYTES


def test_a_gradient_of_an_output_that_somebody_holds_is_planned_as_held():
    model, x, target = compiled(1)

    def backward(outputs: tuple[Tensor, ...]) -> object:
        outputs[0].retain_grad()
        loss_of(outputs, target).backward()
        return outputs[0].grad

    predicted, measured = taken(model, x, backward)
    assert 0 <= predicted - measured <= 2 * NUMBERS_BYTES  # some are seen in the backward, too


def test_gradients_of_outputs_in_one_storage_are_planned_as_held():
    model, x, target = compiled(2)

    def backward(outputs: tuple[Tensor, ...]) -> object:
        functional.cross_entropy(torch.cat(outputs), torch.cat([target, target])).backward()

    predicted, measured = taken(model, x, backward)
    assert measured <= predicted + NUMBERS_BYTES


@pytest.mark.parametrize("budget", [1.0, "min"])
def test_the_gradient_of_an_output_that_its_caller_made_is_planned_as_held(budget: float | str):
    gradient = torch.randn(256, 256)
    model, x, target = compiled(1, budget, reserve=gradient.nbytes)
    predicted, measured = taken(model, x, lambda outputs: outputs[0].backward(gradient))
    assert 0 <= predicted - measured - target.nbytes <= 2 * NUMBERS_BYTES
