"""LBFGS: the optimizer calls forward and backward as often as it likes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import fxremat
from benchmarks.scripts import Meter, Wrap


class Fit(nn.Module):
    """A function of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Its values."""
        return self.layers(x)


def train(wrap: Wrap, meter: Meter, steps: int) -> Iterator[Tensor]:
    """Fit a sine by LBFGS."""
    torch.manual_seed(0)
    model = Fit()
    criterion = nn.MSELoss()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=5)
    x = torch.linspace(-3, 3, 2048).unsqueeze(1)
    y = torch.sin(2 * x)
    model = wrap(model, x, loss=fxremat.Loss(criterion, target=y))

    def closure() -> Tensor:
        optimizer.zero_grad()
        meter.begin()
        out = model(x)
        loss = criterion(out, y)
        loss.backward()
        meter.end()
        return loss

    for _ in range(steps):
        yield optimizer.step(closure)
