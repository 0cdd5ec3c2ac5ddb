"""Super resolution by sub-pixel convolutions; the losses of an epoch are kept as they are."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from benchmarks.scripts import Meter, Wrap


class Net(nn.Module):
    """Three times as many pixels on each side."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1 = nn.Conv2d(1, 32, 5, 1, 2)
        self.conv2 = nn.Conv2d(32, 32, 3, 1, 1)
        self.conv3 = nn.Conv2d(32, 16, 3, 1, 1)
        self.conv4 = nn.Conv2d(16, 9, 3, 1, 1)
        self.pixel_shuffle = nn.PixelShuffle(3)

    def forward(self, x: Tensor) -> Tensor:
        """A larger image."""
        x = self.relu(self.conv1(x))
        x = self.relu(self.conv2(x))
        x = self.relu(self.conv3(x))
        return self.pixel_shuffle(self.conv4(x))


def train(wrap: Wrap, meter: Meter, steps: int) -> Iterator[Tensor]:
    """Train by Adam."""
    torch.manual_seed(123)
    model = Net()
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    small, target = torch.rand(8, 1, 28, 28), torch.rand(8, 1, 84, 84)
    model = wrap(model, small)
    losses, outputs = [], []
    for step in range(steps):
        small, target = torch.rand(8, 1, 28, 28), torch.rand(8, 1, 84, 84)
        optimizer.zero_grad()
        meter.begin()
        output = model(small)
        loss = criterion(output, target)
        losses.append(loss)
        loss.backward()
        meter.end()
        optimizer.step()
        if step % 3 == 0:
            outputs.append(output[0])
        yield loss
