"""Small models on the stand-in for CUDA, and what holds of each of their steps."""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import fxremat
from tests.cuda import CUDA, needs_cuda
from tests.models.bits import assert_bitwise_equal
from tests.models.gpt import GPT, GPTConfig

stood_in = bool(os.environ.get("STAND_IN_LIB")) and bool(importlib.util.find_spec("cuda_stand_in"))

needs_stand_in = [
    *needs_cuda,
    pytest.mark.skipif(not stood_in, reason="asks the stand-in for CUDA"),
]

Offload = Literal["auto", "only", False]
Batch = tuple[Tensor, ...]


class Bulk(nn.Module):
    """Makes little of much: each result is a segment of the allocator's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x * self.weight)


def _mlp() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    return nn.Sequential(*layers)


_GPT = GPTConfig(vocabulary=64, context=32, width=32, blocks=2, dropout=0.1)

MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": _mlp,
    "gpt": lambda: GPT(_GPT),
    "bulk": lambda: nn.Sequential(*[Bulk() for _ in range(5)]),
    "tower": lambda: nn.Sequential(*[Bulk() for _ in range(10)]),
}


def batch_of(name: str, seed: int) -> Batch:
    """On the CPU, other numbers for each seed."""
    draw = torch.Generator().manual_seed(seed)
    if name == "gpt":
        tokens = torch.randint(0, 64, (8, 33), generator=draw)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    shape = (512, 64) if name == "mlp" else (11 << 10, 256)
    return (torch.randn(shape, generator=draw),)


def built(name: str, device: torch.device = CUDA) -> nn.Module:
    """The same numbers each time."""
    torch.manual_seed(0)
    return MODELS[name]().to(device)


def to_device(batch: Batch, device: torch.device = CUDA) -> Batch:
    return tuple(x.to(device) for x in batch)


def train_once(call: Callable[..., Any], batch: Batch) -> None:
    """One forward and backward, with the same draws each time."""
    torch.manual_seed(3)
    outputs = call(*batch)
    loss = outputs if outputs.dim() == 0 else outputs.sum()
    del outputs
    loss.backward()


def gradients_of(model: nn.Module) -> list[Tensor]:
    """On the CPU; the model has none any more."""
    found = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


SEEDS = range(3)


@functools.cache
def expected(name: str) -> list[list[Tensor]]:
    """Gradients of steps without a plan, by the seed of their batch."""
    model = built(name)
    call = torch.compile(model, backend="aot_eager")
    found = []
    for seed in SEEDS:
        train_once(call, to_device(batch_of(name, seed)))
        found.append(gradients_of(model))
    torch._dynamo.reset()
    return found


class Trained:
    """A compiled model.

    Args:
        name: in :data:`MODELS`.
        offload: of ``fxremat.compile``, as all that follows.
        warm: so many steps have run.

    Attributes:
        model: as it was given.
        call: as it was compiled.
    """

    def __init__(
        self,
        name: str,
        offload: Offload,
        *,
        warm: int = 6,
        device: torch.device = CUDA,
        budget: str | int = "min",
        **options: Any,
    ) -> None:
        self.name, self.device = name, device
        expected(name)  # which forgets all that is compiled
        self.model = built(name, device)
        sample = fxremat.Sample(to_device(batch_of(name, 0), device), {})
        loss = None if name == "gpt" else torch.sum
        self.call = fxremat.compile(
            self.model, sample, budget, loss=loss, offload=offload, **options
        )
        del sample
        for _ in range(warm):
            self.check(0)

    def step(self, batch: Batch) -> None:
        train_once(self.call, batch)

    def batch(self, seed: int) -> Batch:
        return to_device(batch_of(self.name, seed), self.device)

    def gradients(self) -> list[Tensor]:
        return gradients_of(self.model)

    def check(self, seed: int) -> None:
        """A step keeps to its budget, warns of nothing, and has the right bits."""
        batch = self.batch(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("error", fxremat.BudgetWarning)
            peak = self.peak_of(lambda: self.step(batch))
        assert peak <= self.call.plan.budget_bytes, f"{peak - self.call.plan.budget_bytes} over"
        assert_bitwise_equal(self.gradients(), self.expected(seed))

    def expected(self, seed: int) -> Sequence[Tensor]:
        return expected(self.name)[seed]

    def peak_of(self, step: Callable[[], object]) -> int:
        """Bytes, by the allocator's own count.

        Nothing is waited for before: what an earlier step has left under way goes on.
        """
        torch.cuda.reset_peak_memory_stats(self.device)
        step()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device)
