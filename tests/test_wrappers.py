"""Tensors of wrapper subclasses, as parameters and as inputs: same bits, and their true bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat import torch_compat
from tests.models.wrappers import Packed, adapted
from tests.works_with.training import Subject, by_torch, train, within

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "quick_search")

WIDTH, ROWS = 64, 256


def rows(number: int) -> tuple[Tensor]:
    return (torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number)),)


def packed_rows(number: int) -> tuple[Tensor]:
    return (Packed.of(*rows(number)),)


class Plain(nn.Sequential):
    """A model whose input is in eight bits."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0)


def plain() -> nn.Module:
    torch.manual_seed(0)
    return Plain(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


SUBJECTS = {"parameter": Subject(adapted, rows), "input": Subject(plain, packed_rows)}


@pytest.mark.parametrize("budget", [1.0, 0.6, "min"])
@pytest.mark.parametrize("name", SUBJECTS)
def test_trains_with_the_same_bits_within_the_budget(name: str, budget: float | str):
    expected, found = (train(SUBJECTS[name], c) for c in (by_torch, within(budget)))
    assert found.bits == expected.bits
    assert found.planned and not (found.learned + found.warned)
    assert found.peak_bytes <= found.budget_bytes


def least_bytes(build: Callable[[], nn.Module], **options: Any) -> int:
    torch._dynamo.reset()
    return fxremat.plan(build(), *rows(0), "min", assume="strict", **options).budget_bytes


def test_a_wrapper_counts_as_what_it_holds():
    def dense() -> nn.Module:
        model = adapted()
        for layer in model[::2]:
            layer.weight = nn.Parameter(layer.weight.floats(), requires_grad=False)
        return model

    held_bytes = WIDTH * WIDTH + 4 * WIDTH
    saved_bytes = least_bytes(dense) - least_bytes(adapted)
    # One matrix at a time is there as floats.
    assert saved_bytes >= 3 * (4 * WIDTH * WIDTH - held_bytes) - held_bytes


def test_a_measured_step_counts_what_a_wrapper_holds():
    model, (x,) = adapted(), rows(0)
    step = fxremat.measure_step(model, lambda: model(x).sum().backward())
    tensors = [x, *model.parameters()]
    parts = [part for tensor in tensors for part in torch_compat.dense_parts(tensor)]
    assert step.resident_bytes == sum(part.nbytes for part in parts)


def test_an_estimate_counts_what_a_wrapper_holds():
    found = fxremat.estimate(adapted(), rows(0), device="cpu", loss=torch.sum)
    torch._dynamo.reset()
    planned = fxremat.plan(adapted(), *rows(0), 1.0, loss=torch.sum)
    assert found.peak_bytes == planned.baseline_peak_bytes
