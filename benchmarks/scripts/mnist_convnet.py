"""The convnet of pytorch/examples/mnist: dropout, Adadelta, a scheduler."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

import fxremat
from benchmarks.scripts import Meter, Wrap, images


class Net(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, 1)
        self.conv2 = nn.Conv2d(16, 32, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(4608, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logarithms of probabilities."""
        x = functional.relu(self.conv1(x))
        x = functional.relu(self.conv2(x))
        x = self.dropout1(functional.max_pool2d(x, 2))
        x = functional.relu(self.fc1(torch.flatten(x, 1)))
        x = self.fc2(self.dropout2(x))
        return functional.log_softmax(x, dim=1)


def train(wrap: Wrap, meter: Meter, steps: int) -> Iterator[Tensor]:
    """Train by Adadelta."""
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.7)
    data, target = images(32, 1, 28, 10)
    model = wrap(
        model, data, optimizer=optimizer, loss=fxremat.Loss(functional.nll_loss, target=target)
    )
    model.train()
    for _ in range(steps):
        data, target = images(32, 1, 28, 10)
        optimizer.zero_grad()
        meter.begin()
        output = model(data)
        loss = functional.nll_loss(output, target)
        loss.backward()
        meter.end()
        optimizer.step()
        scheduler.step()
        yield loss
