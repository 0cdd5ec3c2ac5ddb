"""The promise holds for whatever plan comes out: costs at random make plans of every kind."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fxremat
from fxremat.costs import cost
from fxremat.passes.stages.signature import Key, block_key
from fxremat.planner import search
from tests.models import ZOO
from tests.models.reference import reference_step
from tests.trials import attempt


@pytest.fixture
def made_up_costs(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[None]:
    """Seconds of stages and operations that have little to do with the real ones."""
    draw = random.Random(request.param)
    known: dict[Key, float] = {}
    measured_s, time_operations = cost._Walk._time, cost.time_operations

    def block_s(walk: Any, block: Any) -> float:
        key = block_key(block, walk._line.joint.storages)
        if key not in known:
            known[key] = measured_s(walk, block) * draw.lognormvariate(0, 1.2)
        return known[key]

    def operations(block: Any, inputs: Any, seconds: dict[Key, float], **options: Any) -> None:
        before = set(seconds)
        time_operations(block, inputs, seconds, **options)
        for key in seconds.keys() - before:
            seconds[key] *= draw.lognormvariate(0, 1.2)

    monkeypatch.setattr(cost._Walk, "_time", block_s)
    monkeypatch.setattr(cost, "time_operations", operations)
    monkeypatch.setattr(search, "COSTS", defaultdict(cost.CostCache))
    yield
    torch._dynamo.reset()


def tried(name: str) -> int:
    expected = reference_step(ZOO[name], input_gradients=True)
    torch._dynamo.reset()
    count = 0
    for budget in ("min", 0.6, 0.75, 0.9):
        try:
            attempt(ZOO[name], budget, expected)
        except fxremat.BudgetError:
            torch._dynamo.reset()
        else:
            count += 1
    return count


@pytest.mark.parametrize("made_up_costs", [0], indirect=True)
@pytest.mark.parametrize("name", ["hf_llama", "siamese"])
def test_same_bits_within_the_budget(name: str, made_up_costs: None):
    assert tried(name) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("made_up_costs", [1, 2], indirect=True)
@pytest.mark.parametrize("name", sorted(ZOO))
def test_same_bits_within_the_budget_over_the_zoo(name: str, made_up_costs: None):
    assert tried(name) >= 1
