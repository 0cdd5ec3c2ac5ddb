"""A decoder-only transformer, pre-LN, with its loss inside."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models.zoo import Args, Kwargs, ZooModel, drawn_once, seeded


@dataclass(frozen=True)
class GPTConfig:
    vocabulary: int = 512
    context: int = 512
    width: int = 128
    heads: int = 4
    blocks: int = 16
    dropout: float = 0.0
    returns_logits: bool = False


class Attention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(_initialize)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        where = torch.arange(idx.shape[1], device=idx.device)
        x = self.dropout(self.tokens(idx) + self.positions(where))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))
        return (logits, loss) if self.config.returns_logits else loss


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def tokens(seed: int, *, vocabulary: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """``(batch, length)`` token ids and the same shifted by one."""
    with seeded(seed):
        ids = torch.randint(vocabulary, (batch, length + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def gpt_entry(name: str, config: GPTConfig, *, batch: int, length: int) -> ZooModel:
    """A zoo entry for ``config`` on random tokens."""

    def sample(seed: int) -> tuple[Args, Kwargs]:
        return tokens(seed, vocabulary=config.vocabulary, batch=batch, length=length), {}

    return ZooModel(
        name=name,
        build=drawn_once(lambda: GPT(config)),
        sample=sample,
        loss=(lambda outputs: outputs[1]) if config.returns_logits else (lambda loss: loss),
        loss_inside=True,
        draws=config.dropout > 0,
    )


_SMALL = {"vocabulary": 96, "context": 64, "width": 64, "blocks": 4}

ZOO = [
    gpt_entry("gpt", GPTConfig(**_SMALL, dropout=0.1), batch=2, length=64),
    gpt_entry("gpt_logits", GPTConfig(**_SMALL, returns_logits=True), batch=2, length=64),
]
BENCH = [
    gpt_entry("gpt16", GPTConfig(), batch=4, length=512),
    gpt_entry("gpt16_dropout", GPTConfig(dropout=0.1), batch=4, length=512),
]
