"""A small GPT that returns logits and its loss, as nanoGPT's."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.scripts import Meter, Wrap

WORDS, WIDTH, HEADS, LENGTH = 256, 64, 4, 48


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.c_fc, self.c_out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.resid_dropout = nn.Dropout(0.1)

    def attention(self, x: Tensor) -> Tensor:
        """Causal."""
        batch, length, width = x.size()
        q, k, v = self.c_attn(x).split(width, dim=2)
        q, k, v = (t.view(batch, length, HEADS, width // HEADS).transpose(1, 2) for t in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(batch, length, width)
        return self.resid_dropout(self.c_proj(y))

    def forward(self, x: Tensor) -> Tensor:
        """Of the same shape."""
        x = x + self.attention(self.ln_1(x))
        return x + self.resid_dropout(self.c_out(functional.gelu(self.c_fc(self.ln_2(x)))))


class GPT(nn.Module):
    """Four blocks; the head shares the embedding's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(4))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Logits, and the loss where targets are given."""
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = None
        if targets is not None:
            loss = functional.cross_entropy(
                logits.view(-1, WORDS), targets.view(-1), ignore_index=-1
            )
        return logits, loss


def train(wrap: Wrap, meter: Meter, steps: int) -> Iterator[Tensor]:
    """Train by AdamW, with gradients clipped; the next batch is there before the backward."""
    torch.manual_seed(1337)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99))

    def get_batch() -> tuple[Tensor, Tensor]:
        words = torch.randint(0, WORDS, (8, LENGTH + 1))
        return words[:, :-1].contiguous(), words[:, 1:].contiguous()

    X, Y = get_batch()
    model = wrap(model, (X, Y), optimizer=optimizer)
    for _ in range(steps):
        meter.begin()
        _logits, loss = model(X, Y)
        X, Y = get_batch()
        loss.backward()
        meter.end()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss
