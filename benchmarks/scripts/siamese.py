"""A siamese network: two forwards of one network before a backward."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.scripts import Meter, Wrap

CALLS = None


class SiameseNetwork(nn.Module):
    """An image to a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.fc = nn.Sequential(nn.Linear(16 * 49, 128), nn.ReLU(), nn.Linear(128, 32))

    def forward(self, x: Tensor) -> Tensor:
        """Vectors."""
        return self.fc(torch.flatten(self.cnn(x), 1))


def contrastive(first: Tensor, second: Tensor, differ: Tensor) -> Tensor:
    """Small for pairs that are close and alike, or far and not."""
    distance = functional.pairwise_distance(first, second)
    far = torch.clamp(2.0 - distance, min=0.0)
    return torch.mean((1 - differ) * distance.pow(2) + differ * far.pow(2))


def train(wrap: Wrap, meter: Meter, steps: int) -> Iterator[Tensor]:
    """Train by Adam."""
    torch.manual_seed(0)
    net = SiameseNetwork()
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-4)
    first = torch.randn(48, 1, 28, 28)
    net = wrap(net, first, optimizer=optimizer)
    for _ in range(steps):
        first, second = torch.randn(48, 1, 28, 28), torch.randn(48, 1, 28, 28)
        differ = torch.randint(0, 2, (48,)).float()
        optimizer.zero_grad()
        meter.begin()
        output1 = net(first)
        output2 = net(second)
        loss = contrastive(output1, output2, differ)
        loss.backward()
        meter.end()
        optimizer.step()
        yield loss
