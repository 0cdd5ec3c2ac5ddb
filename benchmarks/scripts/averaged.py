"""Averages of weights: one that follows each step, and one of the last steps (SWA)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from benchmarks.scripts import Meter, Wrap


def train(wrap: Wrap, meter: Meter, steps: int) -> Iterator[Tensor]:
    """Train by SGD; averages are taken after steps."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    x = torch.randn(512, 128)
    model = wrap(model, x, optimizer=optimizer)
    ema_model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    swa_model = AveragedModel(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    swa_scheduler = SWALR(optimizer, swa_lr=0.05)
    for step in range(steps):
        x, y = torch.randn(512, 128), torch.randint(0, 10, (512,))
        optimizer.zero_grad()
        meter.begin()
        loss = criterion(model(x), y)
        loss.backward()
        meter.end()
        optimizer.step()
        ema_model.update_parameters(model)
        if step > steps // 2:
            swa_model.update_parameters(model)
            swa_scheduler.step()
        else:
            scheduler.step()
        yield loss
