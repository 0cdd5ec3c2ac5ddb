"""An exact Gaussian process: its Cholesky runs between two captured graphs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.scripts import Meter, Wrap


@torch.compiler.disable
def psd_safe_cholesky(covariance: Tensor) -> Tensor:
    """A Cholesky factor, of a little more than the matrix where it has none."""
    factor, info = torch.linalg.cholesky_ex(covariance)
    jitter = 1e-6
    while info.any():
        factor, info = torch.linalg.cholesky_ex(covariance + jitter * torch.eye(len(covariance)))
        jitter *= 10
    return factor


class ExactGP(nn.Module):
    """A kernel on features that a network makes."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
        self.raw_scale = nn.Parameter(torch.zeros(()))
        self.raw_length = nn.Parameter(torch.zeros(()))
        self.raw_noise = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The negative logarithm of the marginal likelihood, a point."""
        z = self.features(x) / functional.softplus(self.raw_length)
        square = (z.unsqueeze(1) - z.unsqueeze(0)).pow(2).sum(-1)
        covariance = functional.softplus(self.raw_scale) * torch.exp(-0.5 * square)
        covariance = covariance + functional.softplus(self.raw_noise) * torch.eye(len(x))
        factor = psd_safe_cholesky(covariance)
        alpha = torch.cholesky_solve(y.unsqueeze(1), factor)
        fit = 0.5 * (y.unsqueeze(0) @ alpha).squeeze()
        return (fit + torch.diagonal(factor).log().sum()) / len(x)


def train(wrap: Wrap, meter: Meter, steps: int) -> Iterator[Tensor]:
    """Train by Adam on all points."""
    torch.manual_seed(0)
    x = torch.rand(320, 8)
    y = torch.sin(6 * x.sum(1)) + 0.1 * torch.randn(320)
    model = ExactGP()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    model = wrap(model, (x, y))
    for _ in range(steps):
        optimizer.zero_grad()
        meter.begin()
        loss = model(x, y)
        loss.backward()
        meter.end()
        optimizer.step()
        yield loss
