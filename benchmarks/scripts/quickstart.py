"""The quickstart tutorial: gradients are cleared between forward and backward."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from benchmarks.scripts import Meter, Wrap, images


class NeuralNetwork(nn.Module):
    """An MLP on flattened images."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.stack = nn.Sequential(
            nn.Linear(28 * 28, 256),
            nn.ReLU(),
            nn.Linear(256, 256),
            nn.ReLU(),
            nn.Linear(256, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.stack(self.flatten(x))


def train(wrap: Wrap, meter: Meter, steps: int) -> Iterator[Tensor]:
    """Train by SGD."""
    torch.manual_seed(0)
    model = NeuralNetwork()
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    X, y = images(1024, 1, 28, 10)
    model = wrap(model, X)
    model.train()
    for _ in range(steps):
        X, y = images(1024, 1, 28, 10)
        meter.begin()
        pred = model(X)
        loss = loss_fn(pred, y)
        optimizer.zero_grad()
        loss.backward()
        meter.end()
        optimizer.step()
        yield loss
