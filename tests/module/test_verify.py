"""Estimates that are followed: what CUDA's allocator hands out for a plan, whatever its size."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxremat
from fxremat.errors import ArgumentError
from tests.cuda import needs_cuda


def made() -> nn.Module:
    with torch.device("meta"):
        blocks = (
            nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in "abcd"
        )
        return nn.Sequential(*blocks)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_nothing_can_be_verified():
    x = torch.empty(64, 256, device="meta")
    with pytest.raises(ArgumentError, match="omit it") as caught:
        fxremat.estimate(made(), x, device="H100", verify=True)
    assert caught.value.argument == "verify"


def test_what_is_neither_true_nor_false_is_refused():
    with pytest.raises(ArgumentError) as caught:
        fxremat.estimate(made(), torch.empty(64, 256, device="meta"), verify="yes")
    assert caught.value.argument == "verify"


class TestOnCuda:
    """What is followed on a device."""

    pytestmark = needs_cuda

    @pytest.mark.parametrize("counted", ["allocated", "reserved"])
    @pytest.mark.parametrize("budget", ["100%", "min"])
    def test_a_plan_for_shapes_is_followed(self, budget: str, counted: str):
        model, x = made(), torch.empty(256, 256, device="meta")
        found = fxremat.estimate(
            model,
            x,
            device="H100",
            budget=f"{budget} {counted}",
            loss=torch.sum,
            optimizer=torch.optim.AdamW,
            verify=True,
        ).verified
        assert found is not None
        assert found.holds
        assert found.allocated_bytes > 0.95 * found.plan.predicted_peak_bytes
        assert all(p.device.type == "meta" for p in model.parameters())

    def test_what_is_predicted_is_what_is_handed_out(self):
        """But for some of the smallest blocks: numbers that only a loop holds are set aside."""
        x = torch.empty(256, 256, device="meta")
        found = fxremat.estimate(made(), x, device="H100", loss=torch.sum, verify=True).verified
        assert found is not None
        assert 0 <= found.plan.predicted_peak_bytes - found.allocated_bytes <= 16 * 512
