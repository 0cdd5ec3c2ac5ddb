"""A character-level GPT with dropout, in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Config:
    """Sizes of the model."""

    characters: int = 128
    context: int = 256
    width: int = 96
    heads: int = 4
    blocks: int = 6
    dropout: float = 0.1


class Block(nn.Module):
    """Attention and a two-layer network, each on a normalized copy of the stream."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, length, width)`` to the same."""
        x = x + self.dropout(self.attend(self.norm1(x)))
        change: Tensor = self.dropout(self.mlp(self.norm2(x)))
        return x + change

    def attend(self, x: Tensor) -> Tensor:
        """Each position looks at those before it; ``(batch, length, width)`` to the same."""
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=2)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return mixed


class GPT(nn.Module):
    """Predicts the next character; returns the loss."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.characters = nn.Embedding(config.characters, config.width)
        self.positions = nn.Parameter(torch.zeros(config.context, config.width))
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.characters)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, text: Tensor, following: Tensor) -> Tensor:
        """Mean cross entropy of ``following`` given ``text``.

        Args:
            text: character codes, ``(batch, context)``.
            following: the same moved on by one.
        """
        x = self.dropout(self.characters(text) + self.positions)
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x))
        return functional.cross_entropy(scores.flatten(0, 1), following.flatten())
