"""An MLP under autocast to bfloat16."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from benchmarks.scripts import Meter, Wrap


def train(wrap: Wrap, meter: Meter, steps: int) -> Iterator[Tensor]:
    """Train by SGD, as in the recipe of automatic mixed precision."""
    torch.manual_seed(0)
    layers = [part for _ in range(4) for part in (nn.Linear(192, 192), nn.ReLU())]
    net = nn.Sequential(*layers, nn.Linear(192, 192))
    loss_fn = nn.MSELoss()
    opt = torch.optim.SGD(net.parameters(), lr=0.001)
    data = torch.randn(512, 192)
    net = wrap(net, data)
    for _ in range(steps):
        data, target = torch.randn(512, 192), torch.randn(512, 192)
        meter.begin()
        with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
            output = net(data)
            loss = loss_fn(output, target)
        loss.backward()
        meter.end()
        opt.step()
        opt.zero_grad()
        yield loss
