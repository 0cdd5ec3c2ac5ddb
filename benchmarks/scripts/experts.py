"""Experts of which a router weighs two for each token; all are computed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.scripts import Meter, Wrap


class MoE(nn.Module):
    """Four experts, and a loss that keeps them in use."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 4, bias=False)
        self.w1 = nn.Parameter(torch.randn(4, 64, 128) * 0.1)
        self.w2 = nn.Parameter(torch.randn(4, 128, 64) * 0.1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens, and the loss of balance."""
        probabilities = functional.softmax(self.gate(x), dim=-1)
        weights, chosen = torch.topk(probabilities, 2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        dense = torch.zeros_like(probabilities).scatter(-1, chosen, weights)
        hidden = functional.gelu(torch.einsum("td,edh->teh", x, self.w1))
        outputs = torch.einsum("teh,ehd->ted", hidden, self.w2)
        used = (dense > 0).float().mean(0)
        balance = 4 * (used * probabilities.mean(0)).sum()
        return x + (outputs * dense.unsqueeze(-1)).sum(1), balance


class Model(nn.Module):
    """Two layers of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MoE(), MoE()
        self.head = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and the losses of balance."""
        x, one = self.first(x)
        x, two = self.second(x)
        return self.head(x), one + two


def train(wrap: Wrap, meter: Meter, steps: int) -> Iterator[Tensor]:
    """Train by AdamW."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(384, 64)
    model = wrap(model, x)
    for _ in range(steps):
        x, y = torch.randn(384, 64), torch.randint(0, 16, (384,))
        optimizer.zero_grad()
        meter.begin()
        logits, balance = model(x)
        loss = functional.cross_entropy(logits, y) + 0.01 * balance
        loss.backward()
        meter.end()
        optimizer.step()
        yield loss
