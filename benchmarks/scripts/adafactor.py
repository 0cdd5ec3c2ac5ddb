"""Adafactor: its state is a row and a column of each matrix."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import fxremat
from benchmarks.scripts import Meter, Wrap


class Encoder(nn.Module):
    """A text encoder with a pooled head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 96)
        self.ff = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(96), nn.Linear(96, 384), nn.ReLU(), nn.Linear(384, 96))
            for _ in range(3)
        )
        self.head = nn.Linear(96, 8)

    def forward(self, words: Tensor) -> Tensor:
        """Logits."""
        x = self.embedding(words)
        for ff in self.ff:
            x = x + ff(x)
        return self.head(x.mean(1))


def train(wrap: Wrap, meter: Meter, steps: int) -> Iterator[Tensor]:
    """Train by Adafactor."""
    torch.manual_seed(0)
    model = Encoder()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    criterion = nn.CrossEntropyLoss()
    words = torch.randint(0, 1000, (16, 16))
    model = wrap(
        model,
        words,
        optimizer=optimizer,
        loss=fxremat.Loss(criterion, target=torch.zeros(16).long()),
    )
    for _ in range(steps):
        words, labels = torch.randint(0, 1000, (16, 16)), torch.randint(0, 8, (16,))
        optimizer.zero_grad()
        meter.begin()
        output = model(words)
        loss = criterion(output, labels)
        loss.backward()
        meter.end()
        optimizer.step()
        yield loss
