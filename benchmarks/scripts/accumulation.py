"""Gradients of four microbatches are added up before a step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from benchmarks.scripts import Meter, Wrap

CALLS = 4


def train(wrap: Wrap, meter: Meter, steps: int) -> Iterator[Tensor]:
    """Train by AdamW."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    head = nn.Linear(64, 8)
    model = nn.Sequential(model, head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_fn = nn.MSELoss()
    x = torch.randn(8, 32, 64)
    model = wrap(model, x, optimizer=optimizer, accumulate=True)
    for _step in range(steps):
        total = torch.zeros(())
        meter.begin()
        for _ in range(4):
            x, y = torch.randn(8, 32, 64), torch.randn(8, 32, 8)
            outputs = model(x)
            loss = loss_fn(outputs, y) / 4
            loss.backward()
            total += loss.detach()
        meter.end()
        optimizer.step()
        optimizer.zero_grad()
        yield total
