"""Adapters of low rank over frozen layers, as LoRA has them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

VOCABULARY = 128


class Adapted(nn.Module):
    """A frozen linear layer with a trained product of low rank."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.base.requires_grad_(False)
        self.down = nn.Linear(inputs, 4, bias=False)
        self.up = nn.Linear(4, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner, self.outer = Adapted(width, 4 * width), Adapted(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.outer(nn.functional.gelu(self.inner(self.norm(x)))))


class Adapters(nn.Module):
    """Blocks of adapted layers over a frozen table of embeddings, tied to the last layer."""

    def __init__(self, blocks: int = 4, width: int = 64):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.table.weight
        self.table.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.table(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
