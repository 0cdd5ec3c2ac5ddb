"""Estimates of steps with masks of attention: nothing takes bytes for each pair of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxremat

WIDTH, TOKENS = 32, 16384
PAIRS = TOKENS**2


class Attention(nn.Module):
    """Layers of attention whose mask follows from positions; with a window, or for all keys."""

    def __init__(self, *, window: int | None = None, layers: int = 2) -> None:
        super().__init__()
        self.window = window
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(layers))

    def forward(self, x: Tensor, shown: Tensor | None = None) -> Tensor:
        at = torch.arange(x.shape[1], device=x.device)
        mask = at[None, :] <= at[:, None]
        if self.window is not None:
            mask = mask & (at[None, :] > at[:, None] - self.window)
        if shown is not None:
            mask = mask & shown[:, None, None, :]
        for layer in self.layers:
            q, k, v = layer(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
            y = functional.scaled_dot_product_attention(q, k, v, mask)
            x = x + y.transpose(1, 2).flatten(2)
        return x


def on_meta(**options: Any) -> tuple[nn.Module, Tensor]:
    with torch.device("meta"):
        return Attention(**options).bfloat16(), torch.empty(1, TOKENS, WIDTH).bfloat16()


def least_bytes(*, device: str, bits: str, dim: int | None = 1, **options: Any) -> int:
    model, x = on_meta(**options)
    found = fxremat.estimate(
        model, x, device=device, bits=bits, dim=dim, budget="200 MiB", effort=0
    )
    return found.least_budget_bytes


@pytest.mark.parametrize("dim", [None, 1])
def test_a_causal_mask_is_not_counted_to_rounding(dim: int | None):
    assert least_bytes(device="H100", bits="rounding", dim=dim) < PAIRS


def test_a_mask_that_may_have_to_stay_is_counted():
    """No kernel of the device can be run, and bits must be those with the mask."""
    assert least_bytes(device="H100", bits="exact") > PAIRS


def test_on_a_cpu_masks_are_compared_here():
    x = torch.randn(1, 1024, WIDTH)
    real = fxremat.plan(Attention(), x, 1.0)
    found = fxremat.estimate(Attention(), x, costs=real)
    assert found.least_budget_bytes == real.least_budget_bytes
    assert real.baseline_peak_bytes < 4 * 1024**2, "less than a mask of numbers"


def test_costs_of_a_device_say_whether_it_needs_masks():
    """A plan of a device that was made without masks, and an estimate that would count them."""
    without = fxremat.estimate(*on_meta(), device="H100", bits="rounding").kept
    found = fxremat.estimate(*on_meta(), device="H100", costs=without)
    assert found.least_budget_bytes < PAIRS


@pytest.mark.parametrize("window", [None, 100])
def test_the_longest_sequence_grows_with_the_budget(window: int | None):
    """With a mask of all pairs it would grow with the square root of the budget."""
    model, x = on_meta(window=window, layers=1)
    device = "H100" if window is None else "cpu"  # whose kernel is computed in parts
    longest = []
    for budget in ("128 MiB", "512 MiB"):
        found = fxremat.estimate(
            model, x, device=device, bits="rounding", dim=1, budget=budget, effort=0
        )
        assert found.batches is not None
        longest.append(found.batches.largest.size)
    assert longest[1] > 3 * longest[0]


def test_parts_of_a_window_do_not_grow_with_the_mask():
    """The largest value is the mask, but parts are shares of other values, too."""
    model, x = on_meta(window=100, layers=1)
    least = []
    for tokens in (4 * TOKENS, 16 * TOKENS):
        x = torch.empty(1, tokens, WIDTH, device="meta").bfloat16()
        found = fxremat.estimate(model, x, device="cpu", bits="rounding", budget="min")
        least.append(found.least_budget_bytes)
    assert least[1] < 5 * least[0]


@pytest.mark.parametrize("padded", [False, True])
def test_a_window_is_made_in_slices(padded: bool):
    tokens = 1024
    torch.manual_seed(0)
    model, x = Attention(window=100, layers=1), torch.randn(1, tokens, WIDTH)
    shown = torch.ones(1, tokens, dtype=torch.bool)
    shown[0, -7:] = False
    given = (x, shown) if padded else (x,)
    model(*given).square().sum().backward()
    truth = [p.grad for p in model.parameters()]
    model.zero_grad()
    compiled = fxremat.compile(model, given, "min", bits="rounding", loss=Tensor.sum)
    compiled(*given).square().sum().backward()
    for parameter, expected in zip(model.parameters(), truth, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-3, atol=1e-3)
    plan = compiled.plans[-1]
    assert plan.predicted_peak_bytes < 2 * tokens**2, "less than half a mask of numbers"
