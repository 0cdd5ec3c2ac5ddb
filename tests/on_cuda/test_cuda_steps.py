"""Many steps on a GPU, one after the other and one inside another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.cuda import (  # noqa: F401
    CUDA,
    ENTRIES,
    MODES,
    Mode,
    cases,
    compiled,
    needs_cuda,
    reference_steps,
    same_bits_each_time,
    steps,
)
from tests.models.bits import assert_bitwise_equal
from tests.models.reference import compile_reference, move

pytestmark = [*needs_cuda, pytest.mark.usefixtures("same_bits_each_time")]

STEPS = 6


@cases("gpt-recompute", "gpt-auto", "gpt-only", "resnet50-auto")
def test_slots_are_used_again_with_other_data(name: str, mode: Mode):
    entry = ENTRIES[name]
    expected = reference_steps(name, STEPS, accumulate=True)
    trained = compiled(entry, mode, "min", accumulate=True)
    host_bytes = trained.call.plan.host_bytes
    found = steps(entry, trained.model, trained.call, STEPS, accumulate=True)
    assert_bitwise_equal(found, expected)
    if host_bytes:
        arena = trained.call._training.latest[1].arena
        assert arena.allocated_bytes == host_bytes, "a step did not give its memory back"


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, id=label, marks=[] if label == "auto" else [pytest.mark.slow])
        for label, mode in MODES.items()
    ],
)
def test_steps_may_overlap(mode: Mode):
    entry = ENTRIES["gpt"]

    def interleaved(model: nn.Module, call: Callable[..., Any]) -> list[Any]:
        for loss_point in range(2):
            losses = []
            for seed in (loss_point, loss_point + 7):
                args, kwargs = move(entry.sample(seed), CUDA)
                torch.manual_seed(seed)
                losses.append(entry.loss(call(*args, **kwargs)))
            for loss in losses:
                loss.backward()
        return [p.grad for p in model.parameters()]

    trained = compiled(entry, mode, "min", accumulate=True)
    ours = interleaved(trained.model, trained.call)
    torch._dynamo.reset()
    model = entry.build().to(CUDA)
    assert_bitwise_equal(ours, interleaved(model, compile_reference(entry, model)))
