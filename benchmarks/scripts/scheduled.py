"""Gradients are clipped, the learning rate has a schedule, an epoch's last batch is smaller."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.scripts import Meter, Wrap


class TextClassifier(nn.Module):
    """Convolutions over words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(400, 48)
        self.convs = nn.ModuleList(nn.Conv1d(48, 48, size) for size in (3, 4, 5))
        self.dropout = nn.Dropout(0.5)
        self.fc = nn.Linear(144, 4)

    def forward(self, text: Tensor) -> Tensor:
        """Logits."""
        embedded = self.embedding(text).transpose(1, 2)
        pooled = [functional.relu(conv(embedded)).amax(2) for conv in self.convs]
        return self.fc(self.dropout(torch.cat(pooled, 1)))


def train(wrap: Wrap, meter: Meter, steps: int) -> Iterator[Tensor]:
    """Train by AdamW in epochs of four batches: 64, 64, 64 and 23 texts."""
    torch.manual_seed(0)
    model = TextClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps + 1)
    criterion = nn.CrossEntropyLoss()
    text = torch.randint(0, 400, (64, 40))
    model = wrap(model, text, optimizer=optimizer)
    for step in range(steps):
        batch = 23 if step % 4 == 3 else 64
        text, label = torch.randint(0, 400, (batch, 40)), torch.randint(0, 4, (batch,))
        optimizer.zero_grad()
        meter.begin()
        predicted_label = model(text)
        loss = criterion(predicted_label, label)
        loss.backward()
        meter.end()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
        yield loss
