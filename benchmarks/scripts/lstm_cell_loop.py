"""Time series by two LSTMCells in a loop over the sequence, as in time_sequence_prediction."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from benchmarks.scripts import Meter, Wrap


class Sequence(nn.Module):
    """Predicts each next value."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm1 = nn.LSTMCell(1, 51)
        self.lstm2 = nn.LSTMCell(51, 51)
        self.linear = nn.Linear(51, 1)

    def forward(self, values: Tensor) -> Tensor:
        """One prediction for each value."""
        outputs = []
        h_t = torch.zeros(values.size(0), 51)
        c_t = torch.zeros(values.size(0), 51)
        h_t2 = torch.zeros(values.size(0), 51)
        c_t2 = torch.zeros(values.size(0), 51)
        for value in values.split(1, dim=1):
            h_t, c_t = self.lstm1(value, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            outputs += [self.linear(h_t2)]
        return torch.cat(outputs, dim=1)


def train(wrap: Wrap, meter: Meter, steps: int) -> Iterator[Tensor]:
    """Train by Adam on sines."""
    torch.manual_seed(0)
    seq = Sequence()
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(seq.parameters(), lr=0.01)
    data = torch.sin(torch.arange(13.0) / 2 + 4 * torch.rand(97, 1))
    values, target = data[:, :-1], data[:, 1:]
    seq = wrap(seq, values)
    for _ in range(steps):
        optimizer.zero_grad()
        meter.begin()
        out = seq(values)
        loss = criterion(out, target)
        loss.backward()
        meter.end()
        optimizer.step()
        yield loss
