"""Names by a GRU; gradients are cleared after the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from benchmarks.scripts import Meter, Wrap


class Classifier(nn.Module):
    """The last state of a GRU decides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 48)
        self.gru = nn.GRU(48, 96, batch_first=True)
        self.fc = nn.Linear(96, 18)

    def forward(self, words: Tensor) -> Tensor:
        """Logits."""
        _, hidden = self.gru(self.embedding(words))
        return self.fc(hidden[-1])


def train(wrap: Wrap, meter: Meter, steps: int) -> Iterator[Tensor]:
    """Train by Adam."""
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    words = torch.randint(0, 64, (48, 24))
    model = wrap(model, words, optimizer=optimizer)
    for _ in range(steps):
        words, labels = torch.randint(0, 64, (48, 24)), torch.randint(0, 18, (48,))
        meter.begin()
        output = model(words)
        loss = criterion(output, labels)
        loss.backward()
        meter.end()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
