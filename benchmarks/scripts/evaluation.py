"""Between steps the model is evaluated on larger batches, which are held."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from benchmarks.scripts import Meter, Wrap, images


class Mixer(nn.Module):
    """A block of MLP-Mixer, twice, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 4, stride=4)
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(4))
        self.tokens = nn.ModuleList(mlp(64, 128) for _ in range(2))
        self.channels = nn.ModuleList(mlp(64, 256) for _ in range(2))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        for i in range(2):
            x = x + self.tokens[i](self.norms[2 * i](x).transpose(1, 2)).transpose(1, 2)
            x = x + self.channels[i](self.norms[2 * i + 1](x))
        return self.head(x.mean(1))


def mlp(width: int, hidden: int) -> nn.Sequential:
    """Two linear layers."""
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


def train(wrap: Wrap, meter: Meter, steps: int) -> Iterator[Tensor]:
    """Train by AdamW, test after every other step."""
    torch.manual_seed(0)
    model = Mixer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_fn = nn.CrossEntropyLoss()
    X, y = images(16, 3, 32, 10)
    test_X, test_y = images(40, 3, 32, 10)
    model = wrap(model, X, optimizer=optimizer)
    for step in range(steps):
        X, y = images(16, 3, 32, 10)
        model.train()
        optimizer.zero_grad()
        meter.begin()
        pred = model(X)
        loss = loss_fn(pred, y)
        loss.backward()
        meter.end()
        optimizer.step()
        yield loss
        if step % 2 == 0:
            model.eval()
            with torch.no_grad():
                pred = model(test_X)
                test_loss = loss_fn(pred, test_y).item()
                correct = (pred.argmax(1) == test_y).float().mean().item()
            assert test_loss > 0 and correct >= 0
