"""Layers of a transformer in parts, whose inputs wait on the host: attention by heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxremat
from fxremat.graph import further
from tests.efforts import ROUNDED_PARTS

WIDTH, HEADS, TOKENS, LAYERS = 32, 8, 384, 3


class Layer(nn.Module):
    """Attention and an MLP that add to a stream; heads of queries share heads of keys."""

    def __init__(self, keys: int) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.norm, self.again = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = (nn.Linear(WIDTH, keys * size) for _ in range(2))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normal = self.norm(x)
        heads = (
            own(normal).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for own in (self.query, self.key, self.value)
        )
        seen = functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        x = x + self.out(seen.transpose(1, 2).flatten(-2))
        return x + self.down(functional.silu(self.up(self.again(x))))


class Model(nn.Module):
    """Layers behind a linear one."""

    def __init__(self, keys: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(*(Layer(keys) for _ in range(LAYERS)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.first(x)).square().mean()


@pytest.fixture(autouse=True)
def only_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other form in parts is searched."""
    every = further.parted

    def inner(*args: Any, **options: Any) -> list[Any]:
        return [form for form in every(*args, **options) if form.inner_bytes]

    monkeypatch.setattr(further, "parted", inner)


def gradients(model: nn.Module, call: Any, x: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    call(x).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("keys", [8, 4])
@pytest.mark.parametrize("batch", [1, 2])
def test_gradients_are_equal_to_rounding_within_the_budget(keys: int, batch: int):
    torch.manual_seed(0)
    model = Model(keys).double()
    x = torch.randn(batch, TOKENS, WIDTH, dtype=torch.float64)
    expected = gradients(model, model, x)
    model.zero_grad(set_to_none=True)
    torch._dynamo.reset()
    whole = fxremat.compile(model, x, "min", loss="own", offload="auto", effort=0, bits="exact")
    torch._dynamo.reset()
    call = fxremat.compile(model, x, "min", loss="own", offload="auto", **ROUNDED_PARTS)
    plan = call.plan
    assert plan.form.inner_bytes
    assert plan.least_budget_bytes < whole.plan.least_budget_bytes
    by_heads = [u for u in plan.fused if "attention" in str(u)]
    assert by_heads
    assert all(1 < unit.parts <= batch * keys for unit in by_heads)
    for _ in range(3):
        found = gradients(model, call, x)
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-12)

    def step() -> None:
        gradients(model, call, x)

    model.zero_grad(set_to_none=True)
    peak_bytes = fxremat.measure_step(model, step).peak_bytes
    assert peak_bytes <= call.plan.budget_bytes
