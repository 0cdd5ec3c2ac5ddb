"""An LSTM language model whose state goes on, detached, from batch to batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.scripts import Meter, Wrap

WORDS, WIDTH, LENGTH, BATCH = 500, 64, 24, 16


class RNNModel(nn.Module):
    """Embedding, two layers of LSTM, decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(WORDS, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.2)
        self.decoder = nn.Linear(WIDTH, WORDS)

    def forward(
        self, words: Tensor, hidden: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Logarithms of probabilities, and the state."""
        output, hidden = self.rnn(self.drop(self.encoder(words)), hidden)
        decoded = self.decoder(self.drop(output)).view(-1, WORDS)
        return functional.log_softmax(decoded, dim=1), hidden


def train(wrap: Wrap, meter: Meter, steps: int) -> Iterator[Tensor]:
    """Train by SGD by hand, with gradients clipped."""
    torch.manual_seed(1111)
    model = RNNModel()
    criterion = nn.NLLLoss()
    hidden = (torch.zeros(2, BATCH, WIDTH), torch.zeros(2, BATCH, WIDTH))
    corpus = torch.randint(0, WORDS, (LENGTH * steps + 1, BATCH))
    model = wrap(model, (corpus[:LENGTH], hidden))
    model.train()
    for i in range(0, LENGTH * steps, LENGTH):
        data, targets = corpus[i : i + LENGTH], corpus[i + 1 : i + 1 + LENGTH].view(-1)
        model.zero_grad()
        hidden = (hidden[0].detach(), hidden[1].detach())
        meter.begin()
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        meter.end()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.5)
        yield loss
