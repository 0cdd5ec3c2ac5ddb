"""Half way model and optimizer are saved, and training goes on from the checkpoint."""

from __future__ import annotations

import io
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from benchmarks.scripts import Meter, Wrap, images


def network() -> nn.Sequential:
    """Convolutions with group norms."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.SiLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.GroupNorm(4, 32),
        nn.SiLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def train(wrap: Wrap, meter: Meter, steps: int) -> Iterator[Tensor]:
    """Train by Adam."""
    torch.manual_seed(0)
    criterion = nn.CrossEntropyLoss()
    file = io.BytesIO()
    for begin, end in ((0, steps // 2), (steps // 2, steps)):
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        inputs, labels = images(12, 3, 32, 10)
        model = wrap(model, inputs, optimizer=optimizer)
        if begin:
            file.seek(0)
            checkpoint = torch.load(file, weights_only=True)
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
        for _ in range(begin, end):
            inputs, labels = images(12, 3, 32, 10)
            optimizer.zero_grad()
            meter.begin()
            outputs = model(inputs)
            loss = criterion(outputs, labels)
            loss.backward()
            meter.end()
            optimizer.step()
            yield loss
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        del model, optimizer, outputs, loss
