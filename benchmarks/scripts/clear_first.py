"""A small residual network; gradients are cleared first, and all that compile asks for is given."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

import fxremat
from benchmarks.scripts import Meter, Wrap, images


class Block(nn.Module):
    """Two convolutions with norms, and what comes in is added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """Of the same shape."""
        out = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(out)) + x)


def train(wrap: Wrap, meter: Meter, steps: int) -> Iterator[Tensor]:
    """Train by AdamW."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        Block(16),
        Block(16),
        nn.AvgPool2d(2),
        Block(16),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    inputs, labels = images(16, 3, 32, 10)
    net = wrap(net, inputs, optimizer=optimizer, loss=fxremat.Loss(criterion, target=labels))
    for _ in range(steps):
        inputs, labels = images(16, 3, 32, 10)
        optimizer.zero_grad()
        meter.begin()
        outputs = net(inputs)
        loss = criterion(outputs, labels)
        loss.backward()
        meter.end()
        optimizer.step()
        yield loss
