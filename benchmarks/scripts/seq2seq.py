"""Translation by torch.nn.Transformer, with masks."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from benchmarks.scripts import Meter, Wrap

SOURCE, TARGET, WIDTH, PAD = 300, 320, 64, 1


class Seq2SeqTransformer(nn.Module):
    """Embeddings, encoder and decoder, generator."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(WIDTH, 4, 2, 2, 128, dropout=0.1)
        self.generator = nn.Linear(WIDTH, TARGET)
        self.src_tok_emb = nn.Embedding(SOURCE, WIDTH)
        self.tgt_tok_emb = nn.Embedding(TARGET, WIDTH)

    def forward(
        self, src: Tensor, trg: Tensor, tgt_mask: Tensor, src_padding: Tensor, tgt_padding: Tensor
    ) -> Tensor:
        """Logits."""
        outs = self.transformer(
            self.src_tok_emb(src) * math.sqrt(WIDTH),
            self.tgt_tok_emb(trg) * math.sqrt(WIDTH),
            tgt_mask=tgt_mask,
            src_key_padding_mask=src_padding,
            tgt_key_padding_mask=tgt_padding,
            memory_key_padding_mask=src_padding,
        )
        return self.generator(outs)


def sentences(words: int, length: int) -> Tensor:
    """Sixteen, of which some end early."""
    found = torch.randint(4, words, (length, 16))
    found[length - 4 :, ::3] = PAD
    return found


def arguments(src: Tensor, tgt_input: Tensor) -> tuple[Tensor, ...]:
    """What the model is called with."""
    later = torch.triu(torch.ones(len(tgt_input), len(tgt_input), dtype=torch.bool), 1)
    return src, tgt_input, later, (src == PAD).T, (tgt_input == PAD).T


def train(wrap: Wrap, meter: Meter, steps: int) -> Iterator[Tensor]:
    """Train by Adam."""
    torch.manual_seed(0)
    model = Seq2SeqTransformer()
    loss_fn = nn.CrossEntropyLoss(ignore_index=PAD)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9)
    src, tgt = sentences(SOURCE, 20), sentences(TARGET, 22)
    model = wrap(model, arguments(src, tgt[:-1]))
    for _ in range(steps):
        src, tgt = sentences(SOURCE, 20), sentences(TARGET, 22)
        given = arguments(src, tgt[:-1])
        meter.begin()
        logits = model(*given)
        optimizer.zero_grad()
        tgt_out = tgt[1:, :]
        loss = loss_fn(logits.reshape(-1, logits.shape[-1]), tgt_out.reshape(-1))
        loss.backward()
        meter.end()
        optimizer.step()
        yield loss
