"""The promise on a GPU: bytes and bits, by recomputing, by offloading, and by both."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fxremat
from tests.cuda import (  # noqa: F401
    ENTRIES,
    MODES,
    Mode,
    Share,
    compiled,
    copies,
    needs_cuda,
    reference_steps,
    same_bits_each_time,
    step_of,
    steps,
)
from tests.models.bits import assert_bitwise_equal
from tests.trials import captures

pytestmark = [*needs_cuda, pytest.mark.usefixtures("same_bits_each_time")]

models = pytest.mark.parametrize("name", ENTRIES)
SHARES: tuple[Share, ...] = ("min", 0.5, 1.0)

QUICK = {
    ("resnet50", "auto", 0.5),
    ("gpt", False, "min"),
    ("gpt", False, 0.5),
    ("gpt", "auto", "min"),
    ("gpt", "only", "min"),
    ("gpt", "only", 0.5),
}
"""What is tried each time; the rest is slow."""


def _cases() -> Iterator[Any]:
    for name, (label, mode), share in itertools.product(ENTRIES, MODES.items(), SHARES):
        marks = [] if (name, mode, share) in QUICK else [pytest.mark.slow]
        yield pytest.param(name, mode, share, marks=marks, id=f"{name}-{label}-{share}")


@models
def test_without_a_plan_the_bits_are_the_same_each_time(name: str):
    first = reference_steps(name, 1)
    reference_steps.cache_clear()
    assert_bitwise_equal(reference_steps(name, 1), first)


@pytest.mark.parametrize(("name", "mode", "share"), list(_cases()))
def test_the_peak_is_within_the_budget_and_the_bits_are_the_same(
    name: str, mode: Mode, share: Share
):
    entry = ENTRIES[name]
    expected = reference_steps(name, 1)
    trained = compiled(entry, mode, share)
    found = steps(entry, trained.model, trained.call, 1, accumulate=False)
    assert_bitwise_equal(found, expected)
    assert captures(trained.call) == 1, "the step was captured again"
    if share == 1.0 or mode is False:
        assert copies(trained.call) == 0
    elif mode == "only":
        assert copies(trained.call) > 0
    step = step_of(entry, trained)
    step()
    trained.model.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    measured = fxremat.measure_step(trained.model, step).peak_bytes
    plan = trained.call.plan
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    asked = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    assert measured <= plan.budget_bytes, (
        f"{measured - plan.budget_bytes} bytes over; {measured - asked} were never asked for"
    )


def _decided(operation: fxremat.Operation) -> Any:
    """Keep some operations, recompute others, send some away, and leave the rest to the planner."""
    answers = ("keep", "recompute", "offload", None)
    return answers[sum(map(ord, operation.name)) % 4]


def test_a_policy_keeps_the_budget_and_the_bits():
    expected = reference_steps("gpt", 1)
    trained = compiled(ENTRIES["gpt"], "auto", "min", policy=_decided)
    assert_bitwise_equal(
        steps(ENTRIES["gpt"], trained.model, trained.call, 1, accumulate=False), expected
    )
    step = step_of(ENTRIES["gpt"], trained)
    step()
    trained.model.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    plan = trained.call.plan
    assert fxremat.measure_step(trained.model, step).peak_bytes <= plan.budget_bytes
    assert {one.answer for one in plan.decided} == {"keep", "recompute", "offload"}
    assert copies(trained.call) > 0
