"""A vision transformer with dropout and smoothed labels; the next batch is fetched ahead."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import fxremat
from benchmarks.scripts import Meter, Wrap, images


class ViT(nn.Module):
    """Patches, a class token, encoder layers, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 64, 4, stride=4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 64))
        self.pos_embedding = nn.Parameter(torch.randn(1, 65, 64) * 0.02)
        self.dropout = nn.Dropout(0.1)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                64, 4, 128, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(3)
        )
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 10)

    def forward(self, img: Tensor) -> Tensor:
        """Logits."""
        x = self.patch(img).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embedding
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x[:, 0]))


def prefetched(batches: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches, each of which is there while the one before is trained on."""
    following = images(8, 3, 32, 10)
    for _ in range(batches):
        current, following = following, images(8, 3, 32, 10)
        yield current


def train(wrap: Wrap, meter: Meter, steps: int) -> Iterator[Tensor]:
    """Train by AdamW."""
    torch.manual_seed(0)
    model = ViT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.05)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    sample, labels = images(8, 3, 32, 10)
    model = wrap(model, sample, optimizer=optimizer, loss=fxremat.Loss(criterion, target=labels))
    for data, label in prefetched(steps):
        meter.begin()
        output = model(data)
        loss = criterion(output, label)
        optimizer.zero_grad()
        loss.backward()
        meter.end()
        optimizer.step()
        yield loss
