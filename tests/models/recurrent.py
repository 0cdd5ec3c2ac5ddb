"""Long chains: a GRU unrolled by hand, and a WaveNet with two running sums."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.models.gpt import tokens
from tests.models.zoo import Args, Kwargs, ZooModel, drawn_once, seeded, sum_of_squares


class UnrolledGRU(nn.Module):
    """Every step reads the same weights; every step's state reaches the output."""

    def __init__(self, *, inputs: int = 16, width: int = 32, steps: int = 24):
        super().__init__()
        self.width, self.steps = width, steps
        self.gates = nn.Linear(inputs + width, 2 * width)
        self.candidate = nn.Linear(inputs + width, width)
        self.head = nn.Linear(width, inputs)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], self.width)
        states = []
        for step in range(self.steps):
            now = x[:, step]
            update, reset = self.gates(torch.cat([now, state], 1)).sigmoid().chunk(2, 1)
            candidate = self.candidate(torch.cat([now, reset * state], 1)).tanh()
            state = torch.lerp(state, candidate, update)
            states.append(state)
        return self.head(torch.stack(states, 1))


class WaveNet(nn.Module):
    """Dilated gated convolutions: two tensors, residual and skip sum, cross every block."""

    def __init__(self, *, vocabulary: int = 64, width: int = 24, blocks: int = 8):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.gated = nn.ModuleList(
            nn.Conv1d(width, 2 * width, 2, dilation=1 << (index % 4)) for index in range(blocks)
        )
        self.residual = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(blocks))
        self.skip = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(blocks))
        self.head = nn.Sequential(
            nn.ReLU(), nn.Conv1d(width, width, 1), nn.ReLU(), nn.Conv1d(width, vocabulary, 1)
        )

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(idx).transpose(1, 2)
        skips = torch.zeros_like(x)
        for gated, residual, skip in zip(self.gated, self.residual, self.skip, strict=True):
            # Pad on the left only: a position must not see its future.
            padded = nn.functional.pad(x, (gated.dilation[0], 0))
            signal, gate = gated(padded).chunk(2, 1)
            y = signal.tanh() * gate.sigmoid()
            x = x + residual(y)
            skips = skips + skip(y)
        return nn.functional.cross_entropy(self.head(skips), targets)


def _series(seed: int) -> tuple[Args, Kwargs]:
    with seeded(seed):
        return (torch.randn(32, 24, 16),), {}


def _tokens(seed: int) -> tuple[Args, Kwargs]:
    return tokens(seed, vocabulary=64, batch=4, length=96), {}


ZOO = [
    ZooModel(name="gru", build=drawn_once(UnrolledGRU), sample=_series, loss=sum_of_squares),
    ZooModel(
        name="wavenet",
        build=drawn_once(WaveNet),
        sample=_tokens,
        loss=lambda loss: loss,
        loss_inside=True,
        # The last block's residual goes nowhere.
        without_gradient=frozenset({"residual.7.weight", "residual.7.bias"}),
    ),
]
BENCH: list = []
