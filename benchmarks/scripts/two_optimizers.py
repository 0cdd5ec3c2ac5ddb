"""Matrices by one optimizer, all else by another one, as with Muon."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from benchmarks.scripts import Meter, Wrap


def train(wrap: Wrap, meter: Meter, steps: int) -> Iterator[Tensor]:
    """Train by SGD with momentum and by AdamW."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(96, 192),
        nn.LayerNorm(192),
        nn.GELU(),
        nn.Linear(192, 192),
        nn.LayerNorm(192),
        nn.GELU(),
        nn.Linear(192, 32),
    )
    matrices = [p for p in net.parameters() if p.ndim >= 2]
    others = [p for p in net.parameters() if p.ndim < 2]
    optimizers = [
        torch.optim.SGD(matrices, lr=0.02, momentum=0.95, nesterov=True),
        torch.optim.AdamW(others, lr=3e-4),
    ]
    x = torch.randn(512, 96)
    net = wrap(net, x, optimizer=optimizers)
    for _ in range(steps):
        x, y = torch.randn(512, 96), torch.randint(0, 32, (512,))
        meter.begin()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        meter.end()
        for optimizer in optimizers:
            optimizer.step()
        net.zero_grad(set_to_none=True)
        yield loss
