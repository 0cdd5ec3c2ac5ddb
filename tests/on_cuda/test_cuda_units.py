"""Bits of Inductor's kernels on a GPU: the same at every budget, and each time.

Over the stand-in Triton's kernels compute nothing; tests/on_cuda/test_cuda_promise.py compares bits
by Triton's interpreter there.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.cuda import (  # noqa: F401
    CUDA,
    ENTRIES,
    Mode,
    compiled,
    forget,
    needs_cuda,
    same_bits_each_time,
    steps,
)
from tests.models.bits import assert_bitwise_equal
from tests.models.reference import StepResult

pytestmark = [*needs_cuda, pytest.mark.gpu, pytest.mark.usefixtures("same_bits_each_time")]

STEPS = 2


def fused_steps(name: str, mode: Mode, share: Any) -> list[StepResult]:
    """Steps by Inductor's kernels, on the CPU what they leave."""
    entry = ENTRIES[name]
    trained = compiled(entry, mode, share, executor="inductor")
    assert trained.call.plan.fused
    found = steps(entry, trained.model, trained.call, STEPS, accumulate=False)
    del trained
    forget(CUDA)
    return found


@pytest.mark.parametrize("name", ENTRIES)
def test_fused_steps_have_the_same_bits_at_every_budget(name: str):
    expected = fused_steps(name, False, 1.0)
    assert_bitwise_equal(fused_steps(name, False, 1.0), expected)
    for mode, share in ((False, "min"), (False, 0.5), ("auto", "min")):
        assert_bitwise_equal(fused_steps(name, mode, share), expected)
