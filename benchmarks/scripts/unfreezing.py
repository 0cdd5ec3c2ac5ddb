"""A frozen body is trained layer by layer: groups are added to the optimizer later."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from benchmarks.scripts import Meter, Wrap


def train(wrap: Wrap, meter: Meter, steps: int) -> Iterator[Tensor]:
    """Train by AdamW: the head at first, a further layer every third step."""
    torch.manual_seed(0)
    body = nn.ModuleList(
        nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(2)
    )
    head = nn.Linear(64, 5)
    model = nn.Sequential(*body, head)
    for p in body.parameters():
        p.requires_grad = False
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    x = torch.randn(8, 32, 64)
    model = wrap(model, x, optimizer=optimizer)
    frozen = list(body)
    for step in range(steps):
        if frozen and step and step % 3 == 0:
            layer = frozen.pop()
            for p in layer.parameters():
                p.requires_grad = True
            optimizer.add_param_group({"params": list(layer.parameters()), "lr": 1e-4})
        x, y = torch.randn(8, 32, 64), torch.randint(0, 5, (8, 32))
        optimizer.zero_grad()
        meter.begin()
        output = model(x)
        loss = criterion(output.flatten(0, 1), y.flatten())
        loss.backward()
        meter.end()
        optimizer.step()
        yield loss
